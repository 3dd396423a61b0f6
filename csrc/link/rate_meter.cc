#include "link/rate_meter.hpp"

#include <algorithm>
#include <cmath>

namespace r2ccl {
namespace {

constexpr TimeNs enough_ns = 50 * ns_per_ms;         // of being behind, for a measurement
constexpr TimeNs window_ns = 2000 * ns_per_ms;       // in which that must come together
constexpr TimeNs longest_step_ns = 20 * ns_per_ms;   // a longer one was not watched
constexpr std::uint64_t traffic_bytes = 256U << 10;  // less in a window says nothing
constexpr double doubling_ns = 1e9;
constexpr double weight = 0.5;  // of a new measurement

}  // namespace

bool RateMeter::observe(TimeNs elapsed, std::uint64_t sent, std::uint64_t acked,
                        std::uint64_t held_back) {
  age_ += elapsed;
  if (measured_ > 0)
    believed_ = measured_ * std::exp2(std::min(static_cast<double>(age_) / doubling_ns, 60.0));
  if (elapsed > longest_step_ns) {
    restart(acked);
    return false;
  }
  window_ += elapsed;
  if (sent - acked > held_back) behind_ += elapsed;
  const auto bytes = static_cast<double>(acked - begin_);
  if (behind_ >= enough_ns && bytes > 0) {
    const double rate = bytes * 1e9 / static_cast<double>(behind_);
    // What is far below the old measurement is no noise, and traffic may be gone before the next.
    const bool anew = measured_ == 0 || rate < measured_ / 2;
    measure(anew ? rate : weight * rate + (1 - weight) * measured_);
  } else if (behind_ < enough_ns && window_ < window_ns) {
    return false;
  } else if (behind_ < enough_ns && acked - begin_ >= traffic_bytes) {
    // It was hardly ever behind with all this, so it takes at least that much.
    measure(std::max(measured_, bytes * 1e9 / static_cast<double>(enough_ns)));
  } else {
    restart(acked);
    return false;
  }
  restart(acked);
  return true;
}

void RateMeter::measure(double rate) {
  measured_ = believed_ = rate;
  age_ = 0;
}

void RateMeter::restart(std::uint64_t acked) {
  window_ = behind_ = 0;
  begin_ = acked;
}

}  // namespace r2ccl
