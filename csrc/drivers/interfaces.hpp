// The network interfaces currently present in this network namespace.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/errors.hpp"
#include "drivers/ip_address.hpp"

namespace r2ccl {

struct Interface {
  int index = 0;
  std::string name;
  unsigned flags = 0;  // IFF_*, netdevice(7)
  bool admin_up = false;
  bool carrier_up = false;
  bool is_loopback = false;
  std::int64_t speed_mbps = -1;  // Mbit/s; -1 = unknown (no carrier, most virtual interfaces)
  std::vector<IpAddress> addresses;
  std::vector<std::uint8_t> prefixes;  // length of each address's network in bits
};

// Returns all interfaces, sorted by index.
[[nodiscard]] Result<std::vector<Interface>> list_interfaces();

// Returns the interface that carries the address, or null.  The loopback interface carries all of
// 127.0.0.0/8.
[[nodiscard]] const Interface* find_interface(const std::vector<Interface>& interfaces,
                                              const IpAddress& address);

// Returns the index of the present interface that carries the address.  The error names the address
// and lists the present addresses.
[[nodiscard]] Result<int> ifindex_of(const IpAddress& address);

}  // namespace r2ccl
