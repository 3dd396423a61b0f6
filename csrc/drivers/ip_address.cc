#include "drivers/ip_address.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>
#include <cstring>

namespace r2ccl {

std::optional<IpAddress> IpAddress::parse(std::string_view text) {
  const std::string terminated(text);
  IpAddress address;
  for (const int family : {AF_INET, AF_INET6}) {
    address.family = family;
    if (::inet_pton(family, terminated.c_str(), address.bytes.data()) == 1) return address;
  }
  return std::nullopt;
}

std::optional<IpAddress> IpAddress::from_bytes(int of_family, std::span<const std::byte> raw) {
  const std::size_t size = of_family == AF_INET ? 4 : of_family == AF_INET6 ? 16 : 0;
  if (size == 0 || raw.size() != size) return std::nullopt;
  IpAddress address;
  address.family = of_family;
  std::copy(raw.begin(), raw.end(), address.bytes.begin());
  return address;
}

std::optional<IpAddress> IpAddress::from_sockaddr(const sockaddr* address) {
  if (address == nullptr) return std::nullopt;
  if (address->sa_family == AF_INET) {
    sockaddr_in in{};
    std::memcpy(&in, address, sizeof(in));
    return from_bytes(AF_INET, std::as_bytes(std::span(&in.sin_addr, 1)));
  }
  if (address->sa_family == AF_INET6) {
    sockaddr_in6 in{};
    std::memcpy(&in, address, sizeof(in));
    return from_bytes(AF_INET6, std::as_bytes(std::span(&in.sin6_addr, 1)));
  }
  return std::nullopt;
}

std::string IpAddress::to_string() const {
  char text[INET6_ADDRSTRLEN] = "none";
  if (family != AF_UNSPEC) ::inet_ntop(family, bytes.data(), text, sizeof(text));
  return text;
}

bool IpAddress::is_loopback() const {
  if (family == AF_INET) return bytes[0] == std::byte{127};
  return family == AF_INET6 && bytes[15] == std::byte{1} &&
         std::all_of(bytes.begin(), bytes.end() - 1, [](std::byte b) { return b == std::byte{0}; });
}

bool IpAddress::is_unspecified() const {
  return family != AF_UNSPEC &&
         std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; });
}

AddressScope IpAddress::scope() const {
  const auto byte = [this](std::size_t i) { return std::to_integer<unsigned>(bytes[i]); };
  if (is_loopback()) return AddressScope::loopback;
  if (family == AF_INET) {
    if (byte(0) == 0 || byte(0) >= 224) return AddressScope::none;
    return byte(0) == 169 && byte(1) == 254 ? AddressScope::link : AddressScope::global;
  }
  if (family != AF_INET6 || byte(0) == 0 || byte(0) == 0xFF) return AddressScope::none;
  return byte(0) == 0xFE && (byte(1) & 0xC0U) == 0x80 ? AddressScope::link : AddressScope::global;
}

bool IpAddress::replaceable_by(const IpAddress& other) const {
  if (other.family != family) return false;
  const AddressScope wanted = other.scope();
  return wanted != AddressScope::none && (is_unspecified() || wanted == scope());
}

bool IpAddress::shares_network(const IpAddress& other, int bits) const {
  if (other.family != family || bits <= 0) return false;
  const auto whole = static_cast<std::size_t>(bits / 8);
  if (!std::equal(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(whole),
                  other.bytes.begin()))
    return false;
  const int rest = bits % 8;
  if (rest == 0) return true;
  const std::byte mask{static_cast<unsigned char>(0xFF00U >> static_cast<unsigned>(rest))};
  return (bytes[whole] & mask) == (other.bytes[whole] & mask);
}

}  // namespace r2ccl
