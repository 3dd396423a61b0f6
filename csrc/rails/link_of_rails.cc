#include "rails/link_of_rails.hpp"

#include <cassert>
#include <utility>

#include "link/mutants.hpp"

namespace r2ccl {
namespace {

// Passes over all rails in a single send().
constexpr int send_rounds = 8;
// Passes over all rails after a probe: probes may arrive in each.
constexpr int probe_passes = 3;
// Reads of a rail in such a pass: as many as empty the largest socket buffer of usual systems.
constexpr int drain_reads = 32;

}  // namespace

bool LinkOfRails::receive(TimeNs now, bool all_rails) {
  bool arrived = false;
  const RailId inbound = link.inbound_rail() != any_rail ? link.inbound_rail() : link.best_rail();
  for (RailId id = 0; id < ends.size(); ++id)
    if (ends[id].rail && (all_rails || id == inbound)) arrived |= ends[id].rail->pump_in(now);
  // The peer judges its rails by the answer to a probe or an ack request: bytes that arrived on any
  // rail before are read and acknowledged before the answer leaves.
  for (int pass = 0; pass < probe_passes && link.take_probed(); ++pass) {
    for (RailId id = 0; id < ends.size(); ++id) {
      if (!ends[id].rail) continue;
      for (int read = 0; read < drain_reads && link.connected(id); ++read) {
        if (!ends[id].rail->pump_in(now)) break;
        arrived = true;
      }
      if (link.connected(id)) ends[id].rail->acknowledge(now);
    }
  }
  if (!link.actions().empty()) act(now);
  return arrived;
}

void LinkOfRails::send(TimeNs now) {
  const RailId best = link.best_rail();
  bool moved = true;
  for (int round = 0; moved && round < send_rounds; ++round) {
    moved = false;
    if (best != any_rail && ends[best].rail && link.connected(best)) moved = pump_out(best, now);
    for (RailId id = 0; id < ends.size(); ++id) {
      Rail* rail = ends[id].rail.get();
      if (rail == nullptr || id == best || !link.connected(id)) continue;
      if (rail->wants_write() || link.has_frames(id)) moved |= pump_out(id, now);
    }
  }
  if (!link.actions().empty()) act(now);
}

void LinkOfRails::limit(RailId rail, double bytes_per_s) {
  ends[rail].limit = bytes_per_s;
  ends[rail].next_out = 0;
}

bool LinkOfRails::pump_out(RailId id, TimeNs now) {
  End& end = ends[id];
  if (end.limit == 0) return end.rail->pump_out(now);
  if (now < end.next_out) return false;
  const std::uint64_t before = link.counters(id).tx_bytes;
  const bool moved = end.rail->pump_out(now);
  const auto bytes = static_cast<double>(link.counters(id).tx_bytes - before);
  end.next_out = now + static_cast<TimeNs>(bytes * 1e9 / end.limit);
  return moved;
}

void LinkOfRails::act(TimeNs now) {
  auto& actions = link.actions();
  for (std::size_t i = 0; i < actions.size(); ++i) {  // an action may append more actions
    const LinkAction action = actions[i];
    End& end = ends[action.rail];
    if (action.kind == LinkAction::Kind::connect) {
      end.connect_at = action.at;
    } else if (end.rail) {
      assert(!end.fencing);
      end.closed_by_peer = end.rail->closed_by_peer();
      end.fencing = std::move(end.rail);
      fence(now);
    } else {
      link.rail_closed(action.rail, action.epoch, now);
    }
  }
  actions.clear();
}

void LinkOfRails::fence(TimeNs now) {
  for (RailId id = 0; id < ends.size(); ++id) {
    if (!ends[id].fencing) continue;
    if (!ends[id].fencing->fence(now)) {
      if (planted(Mutant::fence_reported_at_once)) link.rail_closed(id, link.epoch(id), now);
      continue;
    }
    ends[id].fencing.reset();
    link.rail_closed(id, link.epoch(id), now);
  }
}

void LinkOfRails::tick(TimeNs now, bool refresh_paths) {
  for (RailId id = 0; id < ends.size(); ++id) {
    Rail* rail = ends[id].rail.get();
    if (rail == nullptr) continue;
    rail->acknowledge(now);
    if (refresh_paths || link.awaits_path_ack(id)) rail->report_path(now);
  }
  fence(now);
  link.tick(now);
  act(now);
  send(now);
}

bool LinkOfRails::detach(const DetachScope& scope, TimeNs now) {
  bool detached = true;
  for (const End& end : ends)
    if (end.rail) detached = end.rail->detach(scope, now) && detached;
  act(now);
  fence(now);
  for (const End& end : ends)
    if (end.fencing) detached = end.fencing->detached(scope) && detached;
  return detached;
}

std::optional<Epoch> LinkOfRails::offer(RailId id, Epoch fenced, bool fresh, TimeNs now) {
  if (fresh) {
    link.peer_fenced(id, fenced, now);
    act(now);
  }
  return link.epoch_to_offer(id, fenced);
}

bool LinkOfRails::begin_epoch(RailId id, Epoch epoch, TimeNs now) {
  // A peer opens a new epoch only after it has fenced every older epoch.
  link.peer_fenced(id, link.epoch(id), now);
  act(now);
  if (link.rail_established(id, epoch, now)) return true;
  connect_failed(id, epoch, {}, now);
  return false;
}

void LinkOfRails::carry(RailId id, std::unique_ptr<Rail> by, TimeNs now) {
  ends[id].connect_at = 0;
  ends[id].closed_by_peer = false;
  ends[id].rail = std::move(by);
  send(now);
}

void LinkOfRails::connect_failed(RailId id, Epoch answered, std::optional<Epoch> refused,
                                 TimeNs now) {
  if (refused.has_value()) link.connect_refused(id, *refused, now);
  if (answered != 0) link.never_opened(id, answered);
  link.connect_failed(id, now);
  act(now);
}

}  // namespace r2ccl
