// Engine: peers, and the wait for their first rails.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "base/clock.hpp"
#include "base/interrupt.hpp"
#include "drivers/interfaces.hpp"
#include "engine/engine.hpp"

namespace r2ccl {

Status Engine::add_peer(const PeerDescription& description) {
  R2CCL_TRY(check_origin());
  if (description.process == process_)
    return {ErrorCode::invalid_argument, "peer process: must differ from the own process number"};
  if (description.rails.empty() || description.rails.size() > max_rails_per_link)
    return {ErrorCode::invalid_argument,
            "rails to " + description.label + ": " + std::to_string(description.rails.size()) +
                "; a link has 1 to " + std::to_string(max_rails_per_link)};
  const bool connects = description.process < process_;
  const Lock guard(*this);
  if (closed_) return {ErrorCode::aborted, "the engine is closed"};
  if (peers_.contains(description.process)) return {};

  LinkOptions options(config_);
  options.connects = connects;
  options.posted = description.posted;
  for (const RailDescription& rail : description.rails) {
    if (rail.kind != RailKind::verbs) continue;
    // A device that is gone for now must not block the peer's other rails.
    if (!verbs_devices_.knows(rail.verbs.device)) R2CCL_TRY(verbs_devices_.open(rail.verbs.device));
    options.memory = &verbs_devices_.pool();
  }
  R2CCL_TRY(set_order(description, options));
  auto peer = std::make_unique<Peer>(description, options, journal_, log_,
                                     (std::uint64_t{process_} << 32U) ^ description.process);
  peer->key = derive_pair_key(description.secret, job_number, process_, description.process);
  peer->connects = connects;
  peer->host = host_;
  for (std::size_t i = 0; i < description.rails.size(); ++i) {
    const RailDescription& rail = description.rails[i];
    RailEnd& end = peer->rails[i];
    if (rail.kind == RailKind::shm) {
      auto remote = SocketAddress::abstract_unix(rail.remote_address);
      if (!remote.ok()) return remote.take_status();
      end.route.remote = remote.value();
      continue;
    }
    auto local = SocketAddress::ip(rail.local_address, 0);
    if (!local.ok()) return local.take_status();
    auto remote = SocketAddress::ip(rail.remote_address, rail.remote_port);
    if (!remote.ok()) return remote.take_status();
    end.route.local = local.value();
    end.route.remote = remote.value();
    end.given = IpAddress::from_sockaddr(local.value().get()).value_or(IpAddress());
    end.remote_given = IpAddress::from_sockaddr(remote.value().get()).value_or(IpAddress());
    end.own_address = connections_->listeners.has(remote.value());
    if (!rail.device.empty()) {
      monitor_->watch(rail.device);  // by name: the device may be removed and return
      announce_if_moved(*peer, static_cast<RailId>(i));
    } else if (!end.given.is_loopback()) {
      auto index = ifindex_of(end.given);
      if (index.ok()) {
        end.ifindex = index.value();
        monitor_->watch(end.ifindex);
      }
    }
  }
  if (!connects) {
    connections_->expect_peer(peer->rails.size());
    for (const RailEnd& end : peer->rails)
      connections_->expect_from(
          IpAddress::from_sockaddr(end.route.remote.get()).value_or(IpAddress()));
  }
  peers_.emplace(description.process, std::move(peer));
  return {};
}

// Numbers the units, and sets the reserves, units and distances of the link's rails.
Status Engine::set_order(const PeerDescription& description, LinkOptions& options) {
  for (std::size_t i = 0; i < description.rails.size(); ++i) {
    const RailDescription& rail = description.rails[i];
    if (rail.reserve) options.reserves |= std::uint64_t{1} << i;
    options.distances[i] = rail.distance;
    if (rail.unit.empty()) continue;
    const auto next = static_cast<std::uint8_t>(units_.size() + 1);
    if (next == 0 && !units_.contains(rail.unit))
      return {ErrorCode::invalid_argument, "unit of " + rail.name + ": '" + rail.unit +
                                               "' is the 256th; a process has at most 255 units"};
    options.units[i] = units_.try_emplace(rail.unit, next).first->second;
  }
  return {};
}

bool Engine::has_peer(std::uint32_t process) {
  const Lock guard(*this);
  return peers_.contains(process);
}

Peer* Engine::find(std::uint32_t process) {
  const auto found = peers_.find(process);
  return found == peers_.end() ? nullptr : found->second.get();
}

void Engine::start(Peer& peer, TimeNs now) {
  if (std::exchange(peer.started, true)) return;
  peer.started_at = now;
  peer.link.start(now);
  peer.act(now);
  const std::uint64_t one = 1;
  (void)!::write(wake_.get(), &one, sizeof(one));
}

Status Engine::begin_connect(std::uint32_t process) {
  R2CCL_TRY(check_origin());
  const Lock guard(*this);
  Peer* peer = find(process);
  if (peer == nullptr)
    return {ErrorCode::invalid_argument, "process " + std::to_string(process) + " is no peer"};
  start(*peer, now_ns());
  return {};
}

Result<bool> Engine::connected(std::uint32_t process) {
  R2CCL_TRY(check_origin());
  const Lock guard(*this);
  Peer* peer = find(process);
  if (peer == nullptr)
    return Status(ErrorCode::invalid_argument,
                  "process " + std::to_string(process) + " is no peer");
  if (closed_) return Status(ErrorCode::aborted, "the engine is closed");
  if (peer->link.peer_closed()) return Status(ErrorCode::peer_closed, peer->label + " has ended");
  if (peer->link.peer_gone())
    return Status(ErrorCode::peer_lost, "the process of " + peer->label + " has ended");
  if (!peer->refusal.empty())
    return Status(ErrorCode::invalid_argument, peer->label + ": " + peer->refusal);
  const TimeNs now = now_ns();
  if (peer->may_begin(now)) peer->begun = true;
  const auto timeout = static_cast<TimeNs>(config_.connect_timeout_s * 1e9);
  if (!peer->begun && peer->started && now - peer->started_at >= timeout)
    return Status(ErrorCode::timeout,
                  "no rail came up within connect_timeout_s (R2CCL_CONNECT_TIMEOUT_S = " +
                      std::to_string(config_.connect_timeout_s) + ") to " + peer->label + ": " +
                      peer->describe_rails());
  return peer->begun;
}

Status Engine::connect(const std::vector<std::uint32_t>& peers, double timeout_s,
                       const std::string& option) {
  R2CCL_TRY(check_origin());
  {
    const Lock guard(*this);
    const TimeNs now = now_ns();
    for (const std::uint32_t process : peers)
      if (Peer* peer = find(process); peer != nullptr) start(*peer, now);
  }
  const TimeNs deadline = now_ns() + static_cast<TimeNs>(timeout_s * 1e9);
  const auto connect_timeout = static_cast<TimeNs>(config_.connect_timeout_s * 1e9);
  TimeNs asked = now_ns();
  for (;;) {
    if (now_ns() - asked >= interrupt_interval_ns) {
      if (interrupted()) return {ErrorCode::aborted, "interrupted by a signal while rails connect"};
      asked = now_ns();
    }
    std::string missing;
    const TimeNs now = now_ns();
    const bool late = now > deadline;
    {
      const Lock guard(*this);
      for (const std::uint32_t process : peers) {
        const Peer* peer = find(process);
        const bool patient =
            !late && peer != nullptr && now < peer->started_at + peer->patience(connect_timeout);
        if (peer != nullptr && (peer->may_begin(now) || (!patient && !peer->link.has_no_rail())))
          continue;
        if (peer != nullptr && peer->link.peer_gone())
          return {ErrorCode::peer_lost, "the process of " + peer->label + " has ended"};
        if (peer != nullptr && !peer->refusal.empty())
          return {ErrorCode::invalid_argument, peer->label + ": " + peer->refusal};
        if (!missing.empty()) missing += "; ";
        missing += peer == nullptr ? "process " + std::to_string(process)
                                   : peer->label + ": " + peer->describe_start();
      }
    }
    if (missing.empty()) return {};
    if (late) {
      std::string text = "no rail came up within " + option + " = ";
      text += std::to_string(timeout_s) + " s to ";
      return {ErrorCode::timeout, text + missing};
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace r2ccl
