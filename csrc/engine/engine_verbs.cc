// Engine: connected queue pairs, device events and registered memory of verbs rails.
#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "base/clock.hpp"
#include "engine/engine.hpp"
#include "rails/verbs/verbs_rail.hpp"

namespace r2ccl {

void Engine::on_verbs_connected(EstablishedRail rail, std::unique_ptr<VerbsSession> session) {
  Peer* peer = find(rail.peer);
  const TimeNs now = now_ns();
  if (peer == nullptr || rail.rail >= peer->rails.size())
    return verbs_connections_->close(std::move(session), now);
  RailEnd& end = peer->rails[rail.rail];
  const int socket = rail.socket.get();
  if (end.blocked() || came_too_late(end, socket)) {
    verbs_connections_->close(std::move(session), now);
    peer->connect_failed(rail.rail, rail.epoch, {}, now);
    return;
  }
  if (!peer->begin_epoch(rail.rail, rail.epoch, now))
    return verbs_connections_->close(std::move(session), now);
  note_addresses(*peer, rail.rail, socket);
  peer->link.set_injected(rail.rail, takes_down(end.fault));
  const auto note = [this, name = end.name + " to " + peer->label](const std::string& why) {
    log_.add(LogLevel::warning, name + ": " + why);
  };
  peer->carry(rail.rail,
              std::make_unique<VerbsRail>(peer->link, rail.rail, std::move(session),
                                          std::move(rail.socket), note),
              now);
}

// Gives up a connection attempt in progress before the next attempt.  The epoch of the attempt
// counts as fenced, so that neither end takes the epoch for open.
void Engine::withdraw_exchange(Peer& peer, RailId rail) {
  if (const Epoch epoch = verbs_connections_->withdraw(peer.process, rail, now_ns()); epoch != 0)
    peer.link.never_opened(rail, epoch);
}

// Waits until the last frames are acknowledged, then fences all verbs rails, so that devices
// release memory before the memory is freed.  Each step waits at most 500 ms, since a device may
// not answer.
void Engine::fence_verbs() {
  const auto until = [this](auto through) {
    const TimeNs limit = now_ns() + 500 * ns_per_ms;
    for (bool waiting = true; waiting && now_ns() < limit;) {
      waiting = false;
      for (auto& [process, peer] : peers_)
        for (RailId id = 0; id < peer->rails.size(); ++id)
          if (peer->link.kind(id) == RailKind::verbs && peer->ends[id].rail)
            waiting |= !through(*peer, id);
      if (waiting) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  };
  until([](Peer& peer, RailId id) {
    if (!peer.link.connected(id)) return true;
    (void)peer.ends[id].rail->pump_in(now_ns());
    if (peer.link.connected(id)) (void)peer.ends[id].rail->pump_out(now_ns());
    if (peer.link.connected(id)) peer.ends[id].rail->report_path(now_ns());
    return !peer.link.awaits_path_ack(id);
  });
  until([](Peer& peer, RailId id) { return peer.ends[id].rail->fence(now_ns()); });
}

namespace {

// Returns true if the port still has the MTU, LID and GID given to the rail's peer.
bool answers_to(const VerbsPort& port, const VerbsAddress& address) {
  return port.mtu == address.mtu && (port.ethernet || port.lid == address.lid) &&
         std::ranges::any_of(port.gids,
                             [&](const VerbsGidEntry& entry) { return entry.gid == address.gid; });
}

}  // namespace

void Engine::on_verbs_port(const std::string& device, std::uint8_t port, Result<VerbsPort> is,
                           TimeNs now) {
  for (auto& [process, peer] : peers_) {
    for (RailId id = 0; id < peer->rails.size(); ++id) {
      const RailEnd& end = peer->rails[id];
      if (end.kind != RailKind::verbs || end.verbs.device != device || end.verbs.port != port)
        continue;
      const auto* rail = dynamic_cast<const VerbsRail*>(peer->ends[id].rail.get());
      if (rail != nullptr && !(is.ok() && answers_to(is.value(), rail->address())))
        peer->link.rail_failed(id, peer->link.epoch(id),
                               is.ok() ? RailCause::address_loss : RailCause::device_loss, now);
    }
    peer->act(now);
    peer->send(now);
  }
}

void Engine::on_verbs_event(const std::string& device, const VerbsEvent& event, TimeNs now) {
  using Kind = VerbsEvent::Kind;
  log_.add(LogLevel::debug, "RDMA device " + device + ": " + std::string(event.text));
  if (event.kind == Kind::gid_changed || event.kind == Kind::port_changed)
    return verbs_devices_.query_port(device, event.port);
  for (auto& [process, peer] : peers_) {
    for (RailId id = 0; id < peer->rails.size(); ++id) {
      const RailEnd& end = peer->rails[id];
      if (end.kind != RailKind::verbs || end.verbs.device != device) continue;
      const auto* rail = dynamic_cast<const VerbsRail*>(peer->ends[id].rail.get());
      const bool its_port = event.port == end.verbs.port;
      const bool its_pair = rail != nullptr && rail->number() == event.queue_pair;
      RailCause cause = RailCause::none;
      switch (event.kind) {
        case Kind::port_error:
          if (its_port) cause = RailCause::carrier_loss;
          break;
        case Kind::port_active:
          if (its_port) peer->link.connect_soon(id, now);
          break;
        case Kind::device_fatal: cause = RailCause::device_loss; break;
        case Kind::queue_pair_fatal:
        case Kind::completion_queue_error:
          if (its_pair) cause = RailCause::device_loss;
          break;
        case Kind::gid_changed:
        case Kind::port_changed:
        case Kind::other: break;
      }
      if (cause != RailCause::none) peer->link.rail_failed(id, peer->link.epoch(id), cause, now);
    }
    peer->act(now);
    peer->send(now);
  }
}

Status Engine::open_verbs(const VerbsPortName& port) {
  R2CCL_TRY(check_origin());
  const Lock guard(*this);
  R2CCL_TRY(verbs_devices_.open(port.device));
  R2CCL_TRY(verbs_devices_.find(port.device)->port(port.port).take_status());
  VerbsSession trial(port.device, verbs_devices_.pool(),
                     static_cast<std::uint32_t>(config_.chunk_bytes));
  R2CCL_TRY(trial.prepare());  // every epoch needs the same memory
  auto pair = verbs_devices_.find(port.device)
                  ->create_queue_pair(port.port, static_cast<std::uint16_t>(config_.pkey_index),
                                      VerbsSession::depth());
  if (pair.ok()) return {};
  return {ErrorCode::internal, pair.take_status().message() +
                                   "; pkey_index (R2CCL_PKEY_INDEX) is " +
                                   std::to_string(config_.pkey_index)};
}

Status Engine::register_buffer(std::span<std::byte> buffer) {
  R2CCL_TRY(check_origin());
  const Lock guard(*this);
  return verbs_devices_.pool().register_buffer(buffer);
}

Status Engine::register_dma_buf(std::span<std::byte> addresses, FileDescriptor dma_buf) {
  R2CCL_TRY(check_origin());
  const Lock guard(*this);
  return verbs_devices_.pool().register_dma_buf(addresses, std::move(dma_buf));
}

Status Engine::deregister_buffer(const std::byte* buffer) {
  R2CCL_TRY(check_origin());
  const Lock guard(*this);
  if (verbs_devices_.pool().deregister_buffer(buffer)) return {};
  return {ErrorCode::invalid_argument, "buffer: is not registered"};
}

Status Engine::check_reach(std::span<const std::uint32_t> processes) {
  R2CCL_TRY(check_origin());
  const auto refused = [](std::string why) {
    return Status(ErrorCode::invalid_argument, std::move(why));
  };
  if (config_.checksum) return refused("checksums are on (R2CCL_CHECKSUM): the CPU computes them");
  const Lock guard(*this);
  for (const std::uint32_t process : processes) {
    if (process == process_) continue;
    const Peer* const peer = find(process);
    if (peer == nullptr) return refused("process " + std::to_string(process) + " is no peer");
    const auto over = [&](RailKind kind) {
      return std::ranges::any_of(peer->rails,
                                 [kind](const RailEnd& end) { return end.kind == kind; });
    };
    if (over(RailKind::shm))
      return refused(peer->label + " is on this node: its rail is shared memory");
    if (!over(RailKind::verbs)) return refused("no rail to " + peer->label + " is RDMA");
  }
  return {};
}

}  // namespace r2ccl
