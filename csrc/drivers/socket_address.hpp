// Numeric IPv4 and IPv6 addresses and abstract unix socket names as sockaddr.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <string>

#include "base/errors.hpp"
#include "drivers/ip_address.hpp"

namespace r2ccl {

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;

  // Parses "10.0.0.1" or "fd00::1"; host names are not resolved.
  static Result<SocketAddress> ip(const std::string& address, std::uint16_t port);
  static SocketAddress ip(const IpAddress& address, std::uint16_t port);
  // Makes an abstract unix socket name: valid in the whole network namespace, without a file.
  static Result<SocketAddress> abstract_unix(const std::string& name);

  [[nodiscard]] int family() const { return storage.ss_family; }
  [[nodiscard]] const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  [[nodiscard]] sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
  [[nodiscard]] std::uint16_t port() const;  // 0 for unix sockets
  [[nodiscard]] std::string text() const;    // "10.0.0.1:4711", "[fd00::1]:4711" or "unix"
};

}  // namespace r2ccl
