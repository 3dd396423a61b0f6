// The network interfaces of this network namespace, as they are now.
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
  std::int64_t speed_mbps = -1;  // -1: unknown, as of most virtual interfaces and without carrier
  std::vector<IpAddress> addresses;
};

// By index.
[[nodiscard]] Result<std::vector<Interface>> list_interfaces();

// The interface that carries the address, null if there is none.  The loopback interface carries
// all of 127.0.0.0/8.
[[nodiscard]] const Interface* find_interface(const std::vector<Interface>& interfaces,
                                              const IpAddress& address);

// The same over the present interfaces: an index, or an error that names the address and what there
// is.
[[nodiscard]] Result<int> ifindex_of(const IpAddress& address);

}  // namespace r2ccl
