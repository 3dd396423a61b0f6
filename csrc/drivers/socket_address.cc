#include "drivers/socket_address.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/un.h>

#include <array>
#include <cstddef>
#include <cstring>

namespace r2ccl {

Result<SocketAddress> SocketAddress::ip(const std::string& address, std::uint16_t port) {
  const auto parsed = IpAddress::parse(address);
  if (parsed.has_value()) return ip(*parsed, port);
  return Status(ErrorCode::invalid_argument,
                "not a numeric IPv4 or IPv6 address: '" + address + "'");
}

SocketAddress SocketAddress::ip(const IpAddress& address, std::uint16_t port) {
  SocketAddress result;
  if (address.family == AF_INET) {
    auto* v4 = reinterpret_cast<sockaddr_in*>(&result.storage);
    std::memcpy(&v4->sin_addr, address.bytes.data(), sizeof(v4->sin_addr));
    v4->sin_family = AF_INET;
    v4->sin_port = htons(port);
    result.size = sizeof(sockaddr_in);
  } else if (address.family == AF_INET6) {
    auto* v6 = reinterpret_cast<sockaddr_in6*>(&result.storage);
    std::memcpy(&v6->sin6_addr, address.bytes.data(), sizeof(v6->sin6_addr));
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons(port);
    result.size = sizeof(sockaddr_in6);
  }
  return result;
}

Result<SocketAddress> SocketAddress::abstract_unix(const std::string& name) {
  SocketAddress result;
  auto* local = reinterpret_cast<sockaddr_un*>(&result.storage);
  if (name.size() + 1 > sizeof(local->sun_path))
    return Status(ErrorCode::invalid_argument, "unix socket name too long: '" + name + "'");
  local->sun_family = AF_UNIX;
  // a leading NUL selects the abstract namespace
  std::memcpy(local->sun_path + 1, name.data(), name.size());
  result.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return result;
}

std::uint16_t SocketAddress::port() const {
  if (family() == AF_INET) return ntohs(reinterpret_cast<const sockaddr_in*>(&storage)->sin_port);
  if (family() == AF_INET6)
    return ntohs(reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_port);
  return 0;
}

std::string SocketAddress::text() const {
  std::array<char, INET6_ADDRSTRLEN> buffer{};
  if (family() == AF_INET) {
    ::inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(&storage)->sin_addr, buffer.data(),
                buffer.size());
    return std::string(buffer.data()) + ":" + std::to_string(port());
  }
  if (family() == AF_INET6) {
    ::inet_ntop(AF_INET6, &reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_addr,
                buffer.data(), buffer.size());
    return "[" + std::string(buffer.data()) + "]:" + std::to_string(port());
  }
  return "unix";
}

}  // namespace r2ccl
