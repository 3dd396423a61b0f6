// An IPv4 or IPv6 address without port and scope.
#pragma once

#include <sys/socket.h>

#include <array>
#include <compare>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace r2ccl {

// How far an address reaches; none: no port has it for itself (unspecified, multicast, broadcast,
// IPv4 in IPv6).
enum class AddressScope { none, loopback, link, global };

struct IpAddress {
  int family = AF_UNSPEC;             // AF_INET or AF_INET6; AF_UNSPEC: none
  std::array<std::byte, 16> bytes{};  // network order; IPv4 uses the first 4

  // Numeric text only ("10.0.0.1", "fd00::1"); empty for anything else.
  [[nodiscard]] static std::optional<IpAddress> parse(std::string_view text);
  // 4 or 16 bytes in network order, as `of_family` says; empty for other families or sizes.
  [[nodiscard]] static std::optional<IpAddress> from_bytes(int of_family,
                                                           std::span<const std::byte> raw);
  [[nodiscard]] static std::optional<IpAddress> from_sockaddr(const sockaddr* address);

  [[nodiscard]] std::string to_string() const;
  [[nodiscard]] bool is_loopback() const;  // 127.0.0.0/8 or ::1
  [[nodiscard]] AddressScope scope() const;
  // A port that had this address may be reached at the other one instead: same family, same scope.
  [[nodiscard]] bool replaceable_by(const IpAddress& other) const;

  friend auto operator<=>(const IpAddress&, const IpAddress&) = default;
};

}  // namespace r2ccl
