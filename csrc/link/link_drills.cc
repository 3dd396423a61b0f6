// Drills: announced to the peer on every usable rail until confirmed, so that both ends tell the
// effects of a drill from those of a real fault.
#include <algorithm>

#include "link/link.hpp"
#include "link/mutants.hpp"

namespace r2ccl {
namespace {

constexpr TimeNs repeat_min_ns = 5 * ns_per_ms;
constexpr TimeNs repeat_max_ns = 200 * ns_per_ms;

}  // namespace

void Link::begin_drill(RailId id, std::uint8_t kind, TimeNs duration, TimeNs now) {
  RailDrills& drills = rails_[id].drills;
  duration = std::clamp<TimeNs>(duration, 0, longest_drill_ns);
  drills.own.begin(kind, duration, now);
  drills.until = now + duration;
  announce_drill(id, now);
}

void Link::end_drill(RailId id, TimeNs now) {
  RailDrills& drills = rails_[id].drills;
  if (drills.own.ended) return;
  drills.own.end(rails_[id].state == RailState::up, now);
  announce_drill(id, now);
}

bool Link::drill_known(RailId id) const {
  const RailDrills& drills = rails_[id].drills;
  return drills.known == drills.told || peer_closed_ || peer_gone_;
}

bool Link::in_drill(RailId id, TimeNs now) const { return drill(id, now) != no_drill; }

std::uint8_t Link::drill(RailId id, TimeNs now) const {
  const Rail& rail = rails_[id];
  for (const Drill* one : {&rail.drills.own, &rail.drills.peers})
    if (one->active(now)) return one->kind;
  return rail.ended_by_drill() ? unknown_drill : no_drill;
}

void Link::announce_drill(RailId id, TimeNs now) {
  RailDrills& drills = rails_[id].drills;
  ++drills.told;
  drills.interval = repeat_min_ns;
  drills.repeat_at = now + drills.interval;
  each_usable([&](RailId, Rail& other) { other.control.drills |= std::uint64_t{1} << id; });
}

void Link::repeat_drills(TimeNs now) {
  for (RailId id = 0; id < rails_.size(); ++id) {
    RailDrills& drills = rails_[id].drills;
    if (drills.known == drills.told || now < drills.repeat_at) continue;
    if (planted(Mutant::drill_announced_once)) continue;
    drills.interval = std::min(2 * drills.interval, repeat_max_ns);
    drills.repeat_at = now + drills.interval;
    each_usable([&](RailId, Rail& other) { other.control.drills |= std::uint64_t{1} << id; });
  }
}

void Link::fill_drill(RailId about, FrameHeader& header, TimeNs now) const {
  const RailDrills& drills = rails_[about].drills;
  header.type = FrameType::drill;
  header.number = about;
  header.epoch = drills.told;
  header.slot = drills.own.kind;
  // `now` may be earlier than the begin, by the work between two readings of the clock.
  const TimeNs left =
      drills.own.ended ? 0 : std::clamp<TimeNs>(drills.until - now, 1, longest_drill_ns);
  header.delivered = static_cast<std::uint64_t>(left);
}

// Takes the peer's announcement, or its confirmation of ours.  Returns false on a violation of the
// protocol.
bool Link::on_drill(RailId via, const FrameHeader& header, TimeNs now) {
  if (header.number >= rails_.size() || header.epoch == 0) return false;
  const auto about = static_cast<RailId>(header.number);
  RailDrills& drills = rails_[about].drills;
  if (header.type == FrameType::drill_ack) {
    if (header.epoch > drills.told) return false;
    drills.known = std::max(drills.known, header.epoch);
    return true;
  }
  if (header.slot == no_drill || header.slot > unknown_drill ||
      header.delivered > static_cast<std::uint64_t>(longest_drill_ns))
    return false;
  rails_[via].control.drill_acks |= std::uint64_t{1} << about;
  // All rails carry the announcement, so an older number may arrive after a newer one.
  if (header.epoch <= drills.received) return true;
  drills.received = header.epoch;
  const auto left = static_cast<TimeNs>(header.delivered);
  const bool ends = left == 0;
  drills.peers.begin(static_cast<std::uint8_t>(header.slot), left, now);
  if (ends) drills.peers.end(rails_[about].state == RailState::up, now);
  if (observer_ != nullptr) observer_->on_drill(about, drills.peers.kind, ends);
  return true;
}

}  // namespace r2ccl
