// The world's faults: ports, paths and processes that fail, and heal.
#include <algorithm>

#include "sim/world.hpp"

namespace r2ccl::sim {

void World::retry(PathHistory& over) {
  over.path.disturbed_at = now();
  for (Connection& connection : over.connections) connection.retry();
  for (QueuePairs& pairs : over.pairs) pairs.retry();
}

void World::cut(int rank, RailId rail, TimeNs notice) {
  each_peer(rank, [&](int peer) {
    Path& path = history(rank, peer, rail).path;
    path.ports[side_of(rank, peer)].carrier = false;
    path.disturbed_at = now();
  });
  if (notice > 0) {
    events_.after(notice, [this, rank, rail] {
      each_peer(rank, [&](int peer) {
        if (!path(rank, peer, rail).ports[side_of(rank, peer)].carrier)
          fail_rail(rank, peer, rail, RailCause::carrier_loss);
      });
    });
    return;
  }
  each_peer(rank, [&](int peer) { fail_rail(rank, peer, rail, RailCause::carrier_loss); });
}

void World::restore(int rank, RailId rail) {
  each_peer(rank, [&](int peer) {
    PathHistory& over = history(rank, peer, rail);
    over.path.ports[side_of(rank, peer)].carrier = true;
    retry(over);
    // A stopped rank connects after its pause, at the end of its back-off.
    if (!stopped(rank)) end(rank, peer).connect_soon(rail);
  });
}

void World::disturb(int from, int to, RailId rail, const std::function<void(Port&)>& change) {
  PathHistory& over = history(from, to, rail);
  change(over.path.ports[side_of(from, to)]);
  retry(over);
}

void World::delay_acks(int rank, int peer, RailId rail, TimeNs time) {
  Path& over = history(rank, peer, rail).path;
  over.ports[side_of(rank, peer)].ack_ns = time;
  over.acks_late_at = now();
}

void World::reset(int rank, int peer, RailId rail) {
  PathHistory& over = history(rank, peer, rail);
  over.path.disturbed_at = now();
  if (!over.connections.empty()) over.connections.back().reset(side_of(rank, peer));
}

void World::fail_rail(int rank, int peer, RailId rail, RailCause cause) {
  history(rank, peer, rail).path.disturbed_at = now();
  if (of(rank).dead) return;
  if (stopped(rank))  // a paused rank notices on resuming
    events_.at(of(rank).paused_until, [=, this] { fail_rail(rank, peer, rail, cause); });
  else
    end(rank, peer).fail_rail(rail, cause);
}

void World::drill(int rank, int peer, RailId rail, bool begins) {
  if (of(rank).dead) return;
  if (stopped(rank))
    events_.at(of(rank).paused_until, [=, this] { drill(rank, peer, rail, begins); });
  else
    end(rank, peer).drill(rail, begins);
}

void World::half_open(int rank, int peer, RailId rail) {
  PathHistory& over = history(rank, peer, rail);
  for (Connection& connection : over.connections) connection.silence();
  for (QueuePairs& pairs : over.pairs) pairs.silence();
  fail_rail(rank, peer, rail, RailCause::injected);
}

void World::pause(int rank, TimeNs time) {
  Rank& paused = of(rank);
  paused.paused_until = std::max(paused.paused_until, now() + time);
  paused.disturbed_at = paused.paused_until;
  events_.at(paused.paused_until, [this, rank] {
    if (stopped(rank)) return;
    each_peer(rank, [&](int peer) { end(rank, peer).progress(); });
  });
}

void World::jump_clock(int rank, TimeNs by) { of(rank).clock_offset += by; }

void World::kill(int rank, bool kernel_lives) {
  of(rank).dead = true;
  each_peer(rank, [&](int peer) {
    for (RailId rail = 0; rail < options_.rails.size(); ++rail) {
      Path& over = history(rank, peer, rail).path;
      over.disturbed_at = now();
      if (!kernel_lives) over.ports[side_of(rank, peer)].carrier = false;
    }
    end(rank, peer).die();
  });
}

void World::delay_fences(int rank, std::uint32_t count, TimeNs time) {
  of(rank).slow_fences = count;
  of(rank).slow_fence_ns = time;
}

}  // namespace r2ccl::sim
