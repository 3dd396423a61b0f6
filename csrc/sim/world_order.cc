// The check of the order of use: reserves, and rails in danger (I8).
#include "sim/world.hpp"

namespace r2ccl::sim {

// Returns true if a rail of the same unit was lost at this end a short time ago.
bool World::in_danger(const LinkEnd& at, RailId rail) {
  const auto& units = options_.link.units;
  for (RailId other = 0; units[rail] != 0 && other < options_.rails.size(); ++other) {
    const auto lost = lost_.find({at.rank, at.peer, other});
    if (other != rail && units[other] == units[rail] && lost != lost_.end() &&
        at.now() - lost->second < options_.link.shared_fate_ns - 2 * options_.tick_ns)
      return true;
  }
  return false;
}

// Checks that no better rail is UP: one that is no reserve, or one that is not in danger.
void World::check_order(const LinkEnd& from, RailId rail) {
  const auto is_reserve = [this](RailId id) { return (options_.link.reserves >> id & 1) != 0; };
  const bool fallback = options_.rails[rail] == RailKind::control;
  for (RailId other = 0; other < options_.rails.size(); ++other) {
    if (other == rail || options_.rails[other] == RailKind::control ||
        from.link.state(other) != RailState::up)
      continue;
    const bool better = fallback || (is_reserve(rail) && !is_reserve(other));
    const bool safer = is_reserve(rail) == is_reserve(other) && in_danger(from, rail) &&
                       !in_danger(from, other) && options_.link.units[other] == 0;
    if (better || safer)
      shadow_.report("I8: rank " + std::to_string(from.rank) + " sends data to rank " +
                     std::to_string(from.peer) + " on rail" + std::to_string(rail) +
                     (better ? " while the better rail" : " while the independent rail") +
                     std::to_string(other) + " is UP");
  }
}

}  // namespace r2ccl::sim
