// Choice of the rail for small messages, and the rates of the rails.
#include <algorithm>
#include <utility>

#include "link/link.hpp"

namespace r2ccl {
namespace {

constexpr double noise_ns = 200'000;  // noise of round trips on a busy host
// A rail becomes slow below slow_share of the fastest rail's rate and recovers above fair_share.
constexpr double slow_share = 1.0 / 3;
constexpr double fair_share = 2.0 / 3;
constexpr TimeNs lasting_ns = 1000 * ns_per_ms;  // required duration of a change of `slow`
constexpr TimeNs watched_ns = 20 * ns_per_ms;    // limit per tick: own pauses do not count

}  // namespace

void Link::choose_best() {
  // Choose the rail with the lowest expected time for a small message.  Keep the current rail
  // unless another rail is clearly better, so that noise does not move traffic.  Without a data
  // rail UP, use the control rail; without any rail UP, use a SUSPECT rail.
  for (const RailState wanted : {RailState::up, RailState::suspect}) {
    for (const bool fallback : {false, true}) {
      RailId lowest = any_rail;
      for (RailId id = 0; id < rails_.size(); ++id) {
        const Rail& rail = rails_[id];
        if (rail.state != wanted || rail.carries_data() == fallback || !may_carry_data(rail))
          continue;
        if (lowest == any_rail || small_time(rail) < small_time(rails_[lowest])) lowest = id;
      }
      if (lowest == any_rail) continue;
      const bool keep = best_ != any_rail && rails_[best_].state == wanted &&
                        rails_[best_].carries_data() != fallback &&
                        near_enough(rails_[best_], rails_[lowest]);
      if (!keep) best_ = lowest;
      return;
    }
  }
  best_ = any_rail;
}

double Link::small_time(const Rail& rail) const {
  return rail.path.time_for(options_.small_message_bytes, rail.health.meter.believed());
}

bool Link::near_enough(const Rail& rail, const Rail& lowest) const {
  return small_time(rail) <= 2 * small_time(lowest) + noise_ns;
}

// Adopts the peer's rail for small messages, if both rails are similarly fast.  Only the accepting
// end follows.  On a shared rail, the packets of each direction carry the path acks of the other
// direction.  On two rails, every message costs its path an additional bare acknowledgement.
void Link::follow(RailId id) {
  if (id == best_ || options_.connects || best_ == any_rail) return;
  const Rail& rail = rails_[id];
  const Rail& best = rails_[best_];
  if (rail.state == RailState::up && best.state == RailState::up && rail.carries_data() &&
      best.carries_data() && near_enough(rail, best))
    best_ = id;
}

void Link::measure_rates(TimeNs observed) {
  bool measured = false;
  double fastest = 0;
  for (Rail& rail : rails_) {
    if (!rail.carries_data() || !usable(rail)) continue;
    measured |=
        rail.health.meter.observe(observed, rail.path.sent, rail.path.acked, rail.path.held_back);
    fastest = std::max(fastest, rail.health.meter.at_least());
  }
  for (RailId id = 0; id < rails_.size(); ++id) {
    Rail& rail = rails_[id];
    const double rate = rail.health.meter.measured();
    if (!rail.carries_data() || !usable(rail) || rate <= 0) continue;
    const bool slow = rate < fastest * (rail.health.slow ? fair_share : slow_share);
    rail.health.differs =
        slow == rail.health.slow ? 0 : rail.health.differs + std::min(observed, watched_ns);
    if (rail.health.differs < lasting_ns) continue;
    rail.health.slow = slow;
    rail.health.differs = 0;
    if (observer_ != nullptr) observer_->on_slow(id, slow, rate);
  }
  if (measured) choose_best();
}

void Link::forget_rate(RailId id) {
  Rail& rail = rails_[id];
  rail.health.meter = {};
  rail.health.differs = 0;
  if (std::exchange(rail.health.slow, false) && observer_ != nullptr)
    observer_->on_slow(id, false, 0);
}

}  // namespace r2ccl
