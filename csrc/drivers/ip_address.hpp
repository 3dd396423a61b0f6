// An IPv4 or IPv6 address, without port and scope.
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

// Reach of an address.  `none`: no port owns the address (unspecified, multicast, broadcast, IPv4
// in IPv6).
enum class AddressScope { none, loopback, link, global };

struct IpAddress {
  int family = AF_UNSPEC;             // AF_INET or AF_INET6; AF_UNSPEC: none
  std::array<std::byte, 16> bytes{};  // network order; IPv4 uses the first 4

  // Parses numeric text ("10.0.0.1", "fd00::1"); returns nullopt for any other text.
  [[nodiscard]] static std::optional<IpAddress> parse(std::string_view text);
  // Makes an address from 4 (AF_INET) or 16 (AF_INET6) bytes in network order.  Returns nullopt for
  // other families and sizes.
  [[nodiscard]] static std::optional<IpAddress> from_bytes(int of_family,
                                                           std::span<const std::byte> raw);
  // Returns nullopt for null and for families other than AF_INET and AF_INET6.
  [[nodiscard]] static std::optional<IpAddress> from_sockaddr(const sockaddr* address);

  [[nodiscard]] std::string to_string() const;
  [[nodiscard]] bool is_loopback() const;     // 127.0.0.0/8 or ::1
  [[nodiscard]] bool is_unspecified() const;  // 0.0.0.0 or ::: a port without an address so far
  [[nodiscard]] AddressScope scope() const;
  // Returns whether a port may replace this address with `other`: same family, same scope.  Any
  // address of a port may replace an unspecified address.
  [[nodiscard]] bool replaceable_by(const IpAddress& other) const;
  // Returns whether both addresses have the same first `bits` bits; false for 0 bits.
  [[nodiscard]] bool shares_network(const IpAddress& other, int bits) const;

  friend auto operator<=>(const IpAddress&, const IpAddress&) = default;
};

}  // namespace r2ccl
