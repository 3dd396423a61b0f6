// Engine: ports whose address changes.  A connector binds to the current address of its port.  An
// acceptor listens on the current address and announces the address over the other rails.  Speed
// and MTU of a port need no handling: TCP learns both with each connection.
#include <sys/socket.h>

#include <algorithm>
#include <optional>
#include <span>
#include <utility>

#include "engine/engine.hpp"

namespace r2ccl {
namespace {

Endpoint endpoint_at(const SocketAddress& address) {
  const auto ip = IpAddress::from_sockaddr(address.get()).value_or(IpAddress());
  return {.version = static_cast<std::uint8_t>(ip.family == AF_INET ? 4 : 6),
          .port = address.port(),
          .address = ip.bytes};
}

std::optional<IpAddress> ip_of(const Endpoint& endpoint) {
  const std::size_t bytes = endpoint.version == 4 ? 4 : 16;
  return IpAddress::from_bytes(endpoint.version == 4 ? AF_INET : AF_INET6,
                               std::span(endpoint.address).first(bytes));
}

template <typename GetName>
std::optional<IpAddress> name_of_socket(int socket, GetName get_name) {
  SocketAddress name;
  name.size = sizeof(name.storage);
  if (get_name(socket, name.get(), &name.size) != 0) return std::nullopt;
  return IpAddress::from_sockaddr(name.get());
}

}  // namespace

void Engine::device_changed(const std::string& device, TimeNs now) {
  std::vector<std::string> errors;
  const auto changes =
      connections_->listeners.device_changed(device, monitor_->addresses(device), errors);
  for (std::string& error : errors) log_.add(LogLevel::error, std::move(error));
  for (const Listeners::AddressChange& change : changes) {
    log_.add(LogLevel::info, device + ": listens on " + change.now.text() + " (at start " +
                                 change.given.to_string() + ")");
    for (auto& [process, peer] : peers_) {
      if (process < process_) continue;  // this process connects to that peer
      for (RailId rail = 0; rail < peer->rails.size(); ++rail) {
        const RailEnd& end = peer->rails[rail];
        if (end.route.device == device && end.given == change.given)
          peer->link.announce_address(rail, endpoint_at(change.now));
      }
      peer->send(now);
    }
  }
}

// Announces a port whose address has changed since the peer got the description.
void Engine::announce_if_moved(Peer& peer, RailId rail) {
  const RailEnd& end = peer.rails[rail];
  const SocketAddress* port = connections_->listeners.at(end.route.device, end.given);
  if (port != nullptr && peer.process > process_ && local_address(end) != end.given)
    peer.link.announce_address(rail, endpoint_at(*port));
}

// Applies the addresses announced by a peer.  The pair key proves the peer's identity, so a wrong
// address costs only a failed connection.  Repeated announcements do not cause more frequent
// connection attempts.
void Engine::take_addresses(Peer& peer, TimeNs now) {
  for (const AddressNotice& notice : std::exchange(peer.link.received_addresses(), {})) {
    RailEnd& end = peer.rails[notice.rail];
    const auto before = IpAddress::from_sockaddr(end.route.remote.get());
    const auto ip = ip_of(notice.at);
    if (!ip || !before || !before->replaceable_by(*ip)) {
      peer.link.rail_failed(notice.via, peer.link.epoch(notice.via), RailCause::protocol, now);
      continue;
    }
    const SocketAddress remote = SocketAddress::ip(*ip, notice.at.port);
    if (remote.text() == end.route.remote.text()) continue;
    log_.add(LogLevel::info, end.name + " to " + peer.label + ": now at " + remote.text());
    end.route.remote = remote;
    end.own_address = connections_->listeners.has(remote);
    if (end.redirected_at <= now)  // else the planned connection attempt uses this address
      end.redirected_at =
          std::max(now, end.redirected_at + config_.rejoin_backoff_min_ms * ns_per_ms);
    peer.link.connect_anew(notice.rail, end.redirected_at);
  }
  peer.act(now);
}

IpAddress Engine::local_address(const RailEnd& end) const {
  const SocketAddress* port = connections_->listeners.at(end.route.device, end.given);
  if (port == nullptr) return end.given;
  return IpAddress::from_sockaddr(port->get()).value_or(end.given);
}

// Returns true if the rail's port no longer has this address.
bool Engine::address_is_gone(const RailEnd& end, const IpAddress& local) const {
  if (end.given.family == AF_UNSPEC || end.route.device.empty()) return false;
  // An address of another interface, or of an absent port, was never on the device.
  if (end.unnumbered || local.is_unspecified()) return false;
  const auto present = monitor_->addresses(end.route.device);
  // An empty list is no evidence: the monitor may not have read the addresses yet.
  return !present.empty() && std::find(present.begin(), present.end(), local) == present.end();
}

// Returns true if the local address of a new connection is gone already.
bool Engine::came_too_late(const RailEnd& end, int socket) const {
  const auto local = name_of_socket(socket, ::getsockname);
  return local && address_is_gone(end, *local);
}

// Stores the local and remote address of the connection that will carry the rail.
void Engine::note_addresses(const Peer& peer, RailEnd& end, int socket) const {
  if (end.given.family == AF_UNSPEC) return;
  if (const auto local = name_of_socket(socket, ::getsockname))
    end.route.local = SocketAddress::ip(*local, 0);
  const auto remote = name_of_socket(socket, ::getpeername);
  if (remote && peer.process > process_)  // the connecting end keeps an announced address
    end.route.remote = SocketAddress::ip(*remote, end.route.remote.port());
}

}  // namespace r2ccl
