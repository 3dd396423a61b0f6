#include "connect/listeners.hpp"

#include <net/if.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <utility>

#include "base/limits.hpp"

namespace r2ccl {
namespace {

std::optional<std::uint16_t> parse_port(std::string_view text) {
  std::uint16_t port = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), port);
  if (error != std::errc() || end != text.data() + text.size() || port == 0) return std::nullopt;
  return port;
}

std::string text_of(const PortWindow& ports) {
  return std::to_string(ports.first) + "-" + std::to_string(ports.last);
}

}  // namespace

std::optional<PortWindow> PortWindow::parse(std::string_view text) {
  if (text.empty()) return PortWindow{};
  const std::size_t dash = text.find('-');
  const auto first = parse_port(text.substr(0, dash));
  const auto last = dash == std::string_view::npos ? first : parse_port(text.substr(dash + 1));
  if (!first || !last || *first > *last) return std::nullopt;
  return PortWindow{*first, *last};
}

void bind_to_device(int fd, const std::string& device) {
  if (!device.empty())
    ::setsockopt(fd, SOL_SOCKET, SO_BINDTODEVICE, device.c_str(),
                 static_cast<socklen_t>(device.size()));
}

SocketAddress scoped_to(const SocketAddress& address, const std::string& device) {
  SocketAddress scoped = address;
  if (address.family() != AF_INET6 || device.empty()) return scoped;
  auto* v6 = reinterpret_cast<sockaddr_in6*>(&scoped.storage);
  if (IN6_IS_ADDR_LINKLOCAL(&v6->sin6_addr)) v6->sin6_scope_id = ::if_nametoindex(device.c_str());
  return scoped;
}

Status Listeners::open(Listener& listener, int& error) {
  const auto failed = [&error](const std::string& what) {
    error = errno;
    return Status(ErrorCode::invalid_argument, what + ": " + std::strerror(error));
  };
  listener.socket = FileDescriptor::made_by([&listener] {
    return ::socket(listener.address.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  });
  const int fd = listener.socket.get();
  if (!listener.socket.valid()) return failed("socket");
  bind_to_device(fd, listener.device);
  listener.ifindex = listener.device.empty() ? 0 : ::if_nametoindex(listener.device.c_str());
  // Two processes that wait for an address of the same port must not keep the same number, which
  // SO_REUSEADDR would allow to sockets that do not listen.
  const bool again = listener.address.port() != 0 && !listener.waits();
  const int on = 1;
  // SO_REUSEADDR must not be set before the kernel chooses a port: the kernel might choose a port
  // on which another process is about to listen.  After bind(), the flag is set for the accepted
  // connections.  Without the flag, their remains (TIME_WAIT) would block the bind in
  // device_changed().
  if (again) ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  const SocketAddress address = scoped_to(listener.address, listener.device);
  const bool bound = ::bind(fd, address.get(), address.size) == 0;
  if (bound && !again) ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  // Without an address so far, the socket only keeps the port number.
  if (bound && listener.waits()) return {};
  if (bound && ::listen(fd, listen_backlog) == 0) return {};
  Status status = failed("cannot listen on " + listener.address.text());
  listener.socket.reset();
  return status;
}

Result<std::uint16_t> Listeners::listen(const SocketAddress& address, const std::string& device) {
  Listener listener;
  listener.address = address;
  listener.given = IpAddress::from_sockaddr(address.get()).value_or(IpAddress());
  listener.device = device;
  int error = 0;
  if (ports_.any() || address.family() == AF_UNIX)
    R2CCL_TRY(open(listener, error));
  else
    R2CCL_TRY(open_in_window(listener));
  listener.address.size = sizeof(listener.address.storage);
  ::getsockname(listener.socket.get(), listener.address.get(), &listener.address.size);
  const std::uint16_t port = listener.address.port();
  listeners_.push_back(std::move(listener));
  return port;
}

// The port of another process may be free again at any time, so every port is tried.  A process
// that has bound a port but does not listen yet shows only in listen(), because SO_REUSEADDR is
// set.
Status Listeners::open_in_window(Listener& listener) const {
  for (int port = ports_.first; port <= ports_.last; ++port) {
    listener.address = SocketAddress::ip(listener.given, static_cast<std::uint16_t>(port));
    int error = 0;
    Status status = open(listener, error);
    if (status.ok() || error != EADDRINUSE) return status;
  }
  const std::string where =
      listener.given.to_string() + (listener.device.empty() ? "" : " (" + listener.device + ")");
  return {ErrorCode::invalid_argument,
          "ports (R2CCL_PORTS) is '" + text_of(ports_) + "': all " +
              std::to_string(ports_.count()) + " ports are in use at " + where +
              "; must have a free port at each address for each process of this host (`r2serve "
              "doctor` counts the ports)"};
}

IpAddress Listeners::choose(const Listener& listener, const std::vector<IpAddress>& present) const {
  const auto there = [&](const IpAddress& address) {
    return std::find(present.begin(), present.end(), address) != present.end();
  };
  const auto current = IpAddress::from_sockaddr(listener.address.get()).value_or(IpAddress());
  if (there(listener.given)) return listener.given;
  if (there(current)) return current;
  const bool any_scope = std::none_of(present.begin(), present.end(), [&](const IpAddress& other) {
    return other.family == listener.given.family && other.scope() == AddressScope::global;
  });
  for (const IpAddress& candidate : present) {
    // A port without an address so far prefers a global address.
    if (listener.given.is_unspecified() && !any_scope && candidate.scope() != AddressScope::global)
      continue;
    const bool taken =
        std::any_of(listeners_.begin(), listeners_.end(), [&](const Listener& other) {
          return other.device == listener.device &&
                 (other.given == candidate ||
                  IpAddress::from_sockaddr(other.address.get()) == candidate);
        });
    if (!taken && listener.given.replaceable_by(candidate)) return candidate;
  }
  return {};
}

std::vector<Listeners::AddressChange> Listeners::device_changed(
    const std::string& device, const std::vector<IpAddress>& present,
    std::vector<std::string>& errors) {
  std::vector<AddressChange> changes;
  if (device.empty()) return changes;
  for (Listener& listener : listeners_) {
    if (listener.device != device || listener.given.family == AF_UNSPEC) continue;
    const IpAddress wanted = choose(listener, present);
    if (wanted.family == AF_UNSPEC) continue;
    const SocketAddress address = SocketAddress::ip(wanted, listener.address.port());
    const bool moves = IpAddress::from_sockaddr(listener.address.get()) != wanted;
    if (!moves && listener.socket.valid() && listener.ifindex == ::if_nametoindex(device.c_str()))
      continue;
    // The old socket stays open until the new socket listens, because the old address may still be
    // present.
    Listener fresh{.socket = {}, .address = address, .given = listener.given, .device = device};
    int error = 0;
    const Status status = open(fresh, error);
    if (status.ok()) {
      listener = std::move(fresh);
      if (moves) changes.push_back({listener.given, listener.address});
    } else if (!std::exchange(listener.failed, true)) {
      errors.push_back(device + ": " + status.message());
    }
  }
  return changes;
}

std::vector<std::string> Listeners::broken() const {
  std::vector<std::string> devices;
  for (const Listener& listener : listeners_)
    if (listener.failed) devices.push_back(listener.device);
  return devices;
}

const SocketAddress* Listeners::at(const std::string& device, const IpAddress& given) const {
  for (const Listener& listener : listeners_)
    if (listener.device == device && listener.given == given) return &listener.address;
  return nullptr;
}

bool Listeners::has(const SocketAddress& remote) const {
  const auto ip = IpAddress::from_sockaddr(remote.get());
  if (!ip || ip->is_loopback() || ip->is_unspecified()) return false;
  return std::any_of(listeners_.begin(), listeners_.end(), [&ip](const Listener& listener) {
    return IpAddress::from_sockaddr(listener.address.get()) == ip;
  });
}

void Listeners::add_poll_fds(std::vector<pollfd>& fds) const {
  each_socket([&](int fd) { fds.push_back({fd, POLLIN, 0}); });
}

}  // namespace r2ccl
