#include "connect/listeners.hpp"

#include <net/if.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace r2ccl {
namespace {

constexpr int backlog = 128;

}  // namespace

void bind_to_device(int fd, const std::string& device) {
  if (!device.empty())
    ::setsockopt(fd, SOL_SOCKET, SO_BINDTODEVICE, device.c_str(),
                 static_cast<socklen_t>(device.size()));
}

Status Listeners::open(Listener& listener) {
  const auto failed = [](const std::string& what) {
    return Status(ErrorCode::invalid_argument, what + ": " + std::strerror(errno));
  };
  listener.socket = FileDescriptor::made_by([&listener] {
    return ::socket(listener.address.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  });
  const int fd = listener.socket.get();
  if (!listener.socket.valid()) return failed("socket");
  bind_to_device(fd, listener.device);
  listener.ifindex = listener.device.empty() ? 0 : ::if_nametoindex(listener.device.c_str());
  const bool again = listener.address.port() != 0;
  const int on = 1;
  // SO_REUSEADDR must not be set before the kernel chooses a port: the kernel might choose a port
  // on which another process is about to listen.  After bind(), the flag is set for the accepted
  // connections.  Without the flag, their remains (TIME_WAIT) would block the bind in
  // device_changed().
  if (again) ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  const bool bound = ::bind(fd, listener.address.get(), listener.address.size) == 0;
  if (bound && !again) ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (bound && ::listen(fd, backlog) == 0) return {};
  Status status = failed("cannot listen on " + listener.address.text());
  listener.socket.reset();
  return status;
}

Result<std::uint16_t> Listeners::listen(const SocketAddress& address, const std::string& device) {
  Listener listener;
  listener.address = address;
  listener.given = IpAddress::from_sockaddr(address.get()).value_or(IpAddress());
  listener.device = device;
  R2CCL_TRY(open(listener));
  listener.address.size = sizeof(listener.address.storage);
  ::getsockname(listener.socket.get(), listener.address.get(), &listener.address.size);
  const std::uint16_t port = listener.address.port();
  listeners_.push_back(std::move(listener));
  return port;
}

IpAddress Listeners::choose(const Listener& listener, const std::vector<IpAddress>& present) const {
  const auto there = [&](const IpAddress& address) {
    return std::find(present.begin(), present.end(), address) != present.end();
  };
  const auto current = IpAddress::from_sockaddr(listener.address.get()).value_or(IpAddress());
  if (there(listener.given)) return listener.given;
  if (there(current)) return current;
  for (const IpAddress& candidate : present) {
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
    const Status status = open(fresh);
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

void Listeners::add_poll_fds(std::vector<pollfd>& fds) const {
  each_socket([&](int fd) { fds.push_back({fd, POLLIN, 0}); });
}

}  // namespace r2ccl
