#include "link/rate_meter.hpp"

#include <algorithm>
#include <cmath>

namespace r2ccl {
namespace {

constexpr TimeNs enough_ns = 50 * ns_per_ms;        // time behind per measurement, against noise
constexpr TimeNs window_ns = 2000 * ns_per_ms;      // longest measurement
constexpr TimeNs longest_step_ns = 20 * ns_per_ms;  // a longer tick is not observed
constexpr std::uint64_t enough_bytes = 256U << 10;  // minimum for carry() within enough_ns
constexpr double doubling_ns = 1e9;                 // believed() doubles after this time
constexpr double new_weight = 0.5;                  // of a new measurement

double per_second(std::uint64_t bytes, TimeNs time) {
  return static_cast<double>(bytes) * 1e9 / static_cast<double>(time);
}

}  // namespace

bool RateMeter::observe(TimeNs elapsed, std::uint64_t sent, std::uint64_t acked,
                        std::uint64_t held_back) {
  age_ += elapsed;
  believed_ = measured_ * std::exp2(std::min(static_cast<double>(age_) / doubling_ns, 60.0));
  if (elapsed <= 0 || elapsed > longest_step_ns) {
    restart(sent, acked);
    return false;
  }
  const bool behind = acked + held_back < last_sent_;
  const std::uint64_t bytes = acked - last_acked_;
  last_sent_ = sent;
  last_acked_ = acked;
  window_ += elapsed;
  if (behind) {
    behind_ += elapsed;
    taken_ += bytes;
  }
  const double carried = carry(elapsed, bytes);
  carried_ = std::max(carried_, carried);
  if (measured_ > 0 && carried > measured_) {  // the estimate was too low
    measure(carried);
    restart(sent, acked);
    return true;
  }
  if (behind_ < enough_ns) {
    if (window_ >= window_ns) restart(sent, acked);
    return false;
  }
  const double rate = per_second(taken_, behind_);
  const bool silent = taken_ == 0;
  restart(sent, acked);
  if (silent) return false;
  // A rate below half of the old value is no noise and counts at once: traffic may end soon.
  const bool anew = measured_ <= 0 || rate < measured_ / 2;
  measure(anew ? rate : new_weight * rate + (1 - new_weight) * measured_);
  return true;
}

double RateMeter::carry(TimeNs elapsed, std::uint64_t bytes) {
  carry_time_ += elapsed;
  carry_bytes_ += bytes;
  if (carry_time_ < enough_ns) return 0;
  const double rate = carry_bytes_ >= enough_bytes ? per_second(carry_bytes_, carry_time_) : 0;
  carry_time_ = 0;
  carry_bytes_ = 0;
  return rate;
}

void RateMeter::measure(double rate) {
  measured_ = believed_ = rate;
  age_ = 0;
}

void RateMeter::restart(std::uint64_t sent, std::uint64_t acked) {
  window_ = behind_ = 0;
  carry_time_ = 0;
  taken_ = carry_bytes_ = 0;
  last_sent_ = sent;
  last_acked_ = acked;
}

}  // namespace r2ccl
