// Order of use of the rails, choice of the rail for small messages, and the rates of the rails.
#include <algorithm>
#include <array>
#include <utility>

#include "link/link.hpp"
#include "link/mutants.hpp"

namespace r2ccl {
namespace {

constexpr double noise_ns = 200'000;  // noise of round trips on a busy host
// A rail becomes slow below slow_share of the fastest rail's rate and recovers above fair_share.
constexpr double slow_share = 1.0 / 3;
constexpr double fair_share = 2.0 / 3;
constexpr TimeNs lasting_ns = 1000 * ns_per_ms;  // required duration of a change of `slow`
constexpr TimeNs watched_ns = 20 * ns_per_ms;    // limit per tick: own pauses do not count

}  // namespace

RailTier Link::tier_of(RailId id, TimeNs now) const {
  const Rail& rail = rails_[id];
  if (!rail.carries_data()) return RailTier::control;
  const bool endangered = rail.place.unit != 0 &&
                          (now < rail.place.endangered_until ||
                           std::any_of(rails_.begin(), rails_.end(), [&rail](const Rail& other) {
                             return &other != &rail && other.place.unit == rail.place.unit &&
                                    other.state == RailState::suspect;
                           }));
  if (rail.place.reserve) return endangered ? RailTier::reserve_endangered : RailTier::reserve;
  return endangered ? RailTier::data_endangered : RailTier::data;
}

// Returns true if the tier of a rail has changed.
bool Link::update_tiers(TimeNs now) {
  bool changed = false;
  for (RailId id = 0; id < rails_.size(); ++id) {
    const RailTier tier = tier_of(id, now);
    changed = changed || tier != rails_[id].place.tier;
    rails_[id].place.tier = tier;
  }
  return changed;
}

// A rail is lost, perhaps with the port or cable that it shares with the other rails of its unit.
void Link::endanger_unit(RailId id, TimeNs now) {
  const std::uint8_t unit = rails_[id].place.unit;
  if (unit == 0 || planted(Mutant::unit_ignored)) return;
  for (RailId other = 0; other < rails_.size(); ++other)
    if (other != id && rails_[other].place.unit == unit)
      rails_[other].place.endangered_until = now + options_.shared_fate_ns;
}

void Link::end_danger(TimeNs now) {
  bool over = false;
  for (Rail& rail : rails_) {
    if (rail.place.endangered_until == 0 || now < rail.place.endangered_until) continue;
    rail.place.endangered_until = 0;
    over = true;
  }
  if (over && update_tiers(now)) choose_best();
}

// Sets the tier of the rails that carry data: the lowest tier UP, which is that of `lowest`.
void Link::choose_tier(RailId lowest) {
  tier_ = lowest == any_rail ? RailTier::none : rails_[lowest].place.tier;
  // Replays bound to a rail whose turn is over may now go to any rail.
  for (Replay& replay : replays_)
    if (replay.target != any_rail && !carries_now(rails_[replay.target])) replay.target = any_rail;
}

void Link::choose_best() {
  // Choose the rail of the lowest tier with the lowest expected time for a small message, or a
  // nearer rail that is similarly fast.  Without any rail UP, use a SUSPECT rail.
  for (const RailState wanted : {RailState::up, RailState::suspect}) {
    RailId lowest = any_rail;
    for (RailId id = 0; id < rails_.size(); ++id) {
      const Rail& rail = rails_[id];
      if (rail.state != wanted || !may_carry_data(rail)) continue;
      const bool lower = lowest == any_rail || rail.place.tier < rails_[lowest].place.tier ||
                         (rail.place.tier == rails_[lowest].place.tier &&
                          small_time(rail) < small_time(rails_[lowest]));
      if (lower) lowest = id;
    }
    if (wanted == RailState::up) choose_tier(lowest);
    if (lowest == any_rail) continue;
    best_ = nearest(wanted, lowest);
    return;
  }
  best_ = any_rail;
}

// Returns the nearest rail in the state `wanted` that is similarly fast as the fastest, `lowest`.
// Among equally near rails the current rail stays, so that noise does not move traffic.  A rail
// that the peer has chosen stays, too: the ends may see a rail in different states.
RailId Link::nearest(RailState wanted, RailId lowest) const {
  const auto fits = [&](RailId id) {
    const Rail& rail = rails_[id];
    return rail.state == wanted && may_carry_data(rail) &&
           rail.place.tier == rails_[lowest].place.tier && near_enough(rail, rails_[lowest]);
  };
  const bool stays = best_ != any_rail && fits(best_);
  if (stays && best_ == followed_) return best_;
  RailId found = stays ? best_ : lowest;
  for (RailId id = 0; id < rails_.size(); ++id)
    if (rails_[id].place.distance < rails_[found].place.distance && fits(id)) found = id;
  return found;
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
  if (best.state == RailState::up && carries_now(rail) && carries_now(best) &&
      near_enough(rail, best))
    best_ = followed_ = id;
}

void Link::measure_rates(TimeNs observed) {
  bool measured = false;
  std::array<double, 2> fastest{};  // of other rails, and of reserves
  for (Rail& rail : rails_) {
    if (!rail.carries_data() || !usable(rail)) continue;
    measured |=
        rail.health.meter.observe(observed, rail.path.sent, rail.path.acked, rail.path.held_back);
    double& among = fastest[rail.place.reserve ? 1 : 0];
    among = std::max(among, rail.health.meter.at_least());
  }
  for (RailId id = 0; id < rails_.size(); ++id) {
    Rail& rail = rails_[id];
    const double rate = rail.health.meter.measured();
    if (!rail.carries_data() || !usable(rail) || rate <= 0) continue;
    const double among = fastest[rail.place.reserve ? 1 : 0];
    const bool slow = rate < among * (rail.health.slow ? fair_share : slow_share);
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
