// Engine: ports whose address changes.  A connector binds to the current address of its port.  An
// acceptor listens on the current address and announces the address over the other rails.  Speed
// and MTU of a port need no handling: TCP learns both with each connection.
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <optional>
#include <span>
#include <utility>

#include "engine/engine.hpp"

namespace r2ccl {
namespace {

// Failed attempts in a row after which another pair of ports is tried.
constexpr unsigned misses_of_a_pair = 2;

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

// Returns the MTU of a connection's path by the kernel's knowledge, in bytes; 0: unknown.
int path_mtu(int socket, int family) {
  int mtu = 0;
  socklen_t size = sizeof(mtu);
  const bool known = family == AF_INET
                         ? ::getsockopt(socket, IPPROTO_IP, IP_MTU, &mtu, &size) == 0
                         : ::getsockopt(socket, IPPROTO_IPV6, IPV6_MTU, &mtu, &size) == 0;
  return known ? mtu : 0;
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
  if (peer.process > process_ && local_address(end) != end.given) announce(peer, rail);
}

// Tells the peer the present address of our port.
void Engine::announce(Peer& peer, RailId rail) {
  const RailEnd& end = peer.rails[rail];
  const SocketAddress* port = connections_->listeners.at(end.route.device, end.given);
  // The peer takes the announcement of no address for a violation of the protocol.
  if (port != nullptr && !local_address(end).is_unspecified())
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
    if (remote.text() == end.route.remote.text()) {
      peer.link.connect_soon(notice.rail, now);  // the peer's port works again
      continue;
    }
    log_.add(LogLevel::info, end.name + " to " + peer.label + ": now at " + remote.text());
    end.route.remote = remote;
    connections_->expect_from(*ip);
    end.own_address = connections_->listeners.has(remote);
    if (end.redirected_at <= now)  // else the planned connection attempt uses this address
      end.redirected_at =
          std::max(now, end.redirected_at + config_.rejoin_backoff_min_ms * ns_per_ms);
    peer.link.connect_anew(notice.rail, end.redirected_at);
    show_if_ready(peer, notice.rail);
    pair_anew(peer, now);
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
void Engine::note_addresses(Peer& peer, RailId rail, int socket) const {
  RailEnd& end = peer.rails[rail];
  if (end.given.family == AF_UNSPEC) return;
  if (end.narrow == 0) end.mtu = path_mtu(socket, end.given.family);
  if (const auto local = name_of_socket(socket, ::getsockname))
    end.route.local = SocketAddress::ip(*local, 0);
  const auto remote = name_of_socket(socket, ::getpeername);
  if (remote && peer.process > process_)  // the connecting end keeps an announced address
    end.route.remote = SocketAddress::ip(*remote, peer.remote_port(rail, *remote));
}

// ---- ports that become ready after the start ----

// The accepting end announces its port, with the same address if nothing has changed.  The
// connecting end connects at once, and decides which of its ports joins which port of the peer
// while rails have never been UP: a port without an address at the start was paired by a guess.
void Engine::port_is_ready(Peer& peer, RailId rail, TimeNs now) {
  if (local_address(peer.rails[rail]).is_unspecified()) return;  // a carrier without an address
  peer.port_is_ready(rail, now);
  if (peer.connects) {
    show_if_ready(peer, rail);
    pair_anew(peer, now);
    peer.link.connect_soon(rail, now);
    return;
  }
  if (!peer.rails[rail].route.device.empty() && !peer.link.connected(rail)) announce(peer, rail);
}

void Engine::show_if_ready(Peer& peer, RailId rail) {
  if (peer.rails[rail].dormant && absent_end(peer.rails[rail]).empty()) peer.show(rail);
}

bool Engine::may_pair_anew(const Peer& peer, RailId rail) const {
  return peer.rails[rail].kind == RailKind::tcp && !peer.link.been_up(rail) &&
         !peer.link.connected(rail) && !peer.rails[rail].route.device.empty();
}

// Returns true if the own port of a rail has an address in the network of the peer's port of
// another rail.
bool Engine::fits(const RailEnd& own, const RailEnd& other) const {
  const auto remote = IpAddress::from_sockaddr(other.route.remote.get());
  return remote && !remote->is_unspecified() && monitor_->shares_network(own.route.device, *remote);
}

// Exchanges ports that would join rails in one network each.
void Engine::pair_anew(Peer& peer, TimeNs now) {
  for (RailId one = 0; one < peer.rails.size(); ++one) {
    for (RailId other = 0; other < peer.rails.size(); ++other) {
      const RailEnd& a = peer.rails[one];
      const RailEnd& b = peer.rails[other];
      if (!may_exchange(peer, one, other) || fits(a, a) || fits(b, b) || !fits(a, b)) continue;
      exchange_ports(peer, one, other, LogLevel::info);
      for (const RailId rail : {one, other}) peer.link.connect_anew(rail, now);
    }
  }
}

// Exchanges ports of one network after failed attempts of both rails: addresses do not tell which
// ports share a wire.  The pauses between attempts go on.
void Engine::pair_by_trial(Peer& peer, RailId rail) {
  for (RailId other = 0; other < peer.rails.size(); ++other) {
    const RailEnd& a = peer.rails[rail];
    const RailEnd& b = peer.rails[other];
    const bool tried = a.misses >= misses_of_a_pair && b.misses >= misses_of_a_pair;
    if (!tried || !may_exchange(peer, rail, other) || !fits(a, a) || !fits(b, b) || !fits(a, b) ||
        !fits(b, a))
      continue;
    exchange_ports(peer, rail, other, LogLevel::debug);  // again and again, if neither pair works
    return;
  }
}

// Reserves and units belong to ports, and the link cannot change them.
bool Engine::may_exchange(const Peer& peer, RailId one, RailId other) const {
  const RailEnd& a = peer.rails[one];
  const RailEnd& b = peer.rails[other];
  return one != other && may_pair_anew(peer, one) && may_pair_anew(peer, other) &&
         a.reserve == b.reserve && a.unit == b.unit;
}

void Engine::exchange_ports(Peer& peer, RailId one, RailId other, LogLevel level) {
  peer.swap_ports(one, other);
  for (const RailId rail : {one, other}) {
    RailEnd& end = peer.rails[rail];
    end.misses = 0;
    log_.add(level, end.name + " to " + peer.label + ": now tried from " + end.route.device +
                        " to " + end.route.remote.text());
    show_if_ready(peer, rail);
  }
}

}  // namespace r2ccl
