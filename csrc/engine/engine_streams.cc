// Streams of the process: the owner's thread moves records between links and its multiplexers.
#include <unistd.h>

#include "base/clock.hpp"
#include "engine/engine.hpp"

namespace r2ccl {

void Engine::carry_streams(const UseLink& use) {
  const Lock guard(*this);
  if (closed_) return;
  has_stream_owner_ = false;  // own arrivals need no wake-up
  std::uint64_t count = 0;
  (void)!::read(arrivals_.get(), &count, sizeof(count));
  const TimeNs now = now_ns();
  for (auto& [process, peer] : peers_) {
    progress(*peer, now, /*all_rails=*/true);
    use(process, peer->link, now);
    peer->send(now);
  }
  tick_if_due(now);
  has_stream_owner_ = true;
}

bool Engine::arm_streams(std::vector<pollfd>& fds) {
  const Lock guard(*this);
  fds.push_back({arrivals_.get(), POLLIN, 0});
  for (auto& [process, peer] : peers_)
    for (const LinkOfRails::End& end : peer->ends) {
      if (!end.rail || end.rail->muted()) continue;
      const auto events = end.rail->arm();
      if (!events.has_value()) return false;
      fds.push_back(*events);
    }
  return true;
}

}  // namespace r2ccl
