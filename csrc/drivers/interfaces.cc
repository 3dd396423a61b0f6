#include "drivers/interfaces.hpp"

// clang-format off: glibc and Linux define the same names, and agree only in this order.
#include <net/if.h>
// clang-format on

#include <errno.h>
#include <ifaddrs.h>
#include <linux/ethtool.h>
#include <linux/if.h>
#include <linux/if_packet.h>
#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <memory>
#include <string>

#include "base/file_descriptor.hpp"

namespace r2ccl {
namespace {

// Returns the speed of an interface in Mbit/s, or -1.  The ioctl sees the network namespace of the
// process; sysfs shows the namespace of its mount, possibly another.
std::int64_t speed_of(int socket, const std::string& name) {
  ethtool_cmd command{};
  command.cmd = ETHTOOL_GSET;
  ifreq request{};
  name.copy(request.ifr_name, IFNAMSIZ - 1);
  request.ifr_data = reinterpret_cast<char*>(&command);
  if (::ioctl(socket, SIOCETHTOOL, &request) != 0) return -1;
  const std::uint32_t speed = std::uint32_t{command.speed_hi} << 16 | command.speed;
  return speed == 0 || speed == 0xffff || speed == static_cast<std::uint32_t>(SPEED_UNKNOWN)
             ? -1
             : static_cast<std::int64_t>(speed);
}

// Returns the number of bits of a netmask.
std::uint8_t prefix_of(const sockaddr* netmask) {
  const auto mask = IpAddress::from_sockaddr(netmask);
  if (!mask) return 0;
  int bits = 0;
  for (const std::byte byte : mask->bytes) bits += std::popcount(std::to_integer<unsigned>(byte));
  return static_cast<std::uint8_t>(bits);
}

}  // namespace

Result<std::vector<Interface>> list_interfaces() {
  ifaddrs* raw = nullptr;
  if (::getifaddrs(&raw) != 0) {
    return Status(ErrorCode::internal,
                  std::string("cannot list network interfaces: ") + std::strerror(errno));
  }
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> list(raw, &::freeifaddrs);
  const FileDescriptor socket =
      FileDescriptor::made_by([] { return ::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0); });

  std::map<std::string, Interface> by_name;
  for (const ifaddrs* item = list.get(); item != nullptr; item = item->ifa_next) {
    Interface& interface = by_name[item->ifa_name];
    if (item->ifa_addr == nullptr) continue;
    if (item->ifa_addr->sa_family == AF_PACKET) {
      // Every interface has exactly one AF_PACKET entry.
      sockaddr_ll link{};
      std::memcpy(&link, item->ifa_addr, sizeof(link));
      interface.index = link.sll_ifindex;
      interface.name = item->ifa_name;
      interface.flags = item->ifa_flags;
      interface.admin_up = (item->ifa_flags & IFF_UP) != 0;
      interface.carrier_up = (item->ifa_flags & IFF_LOWER_UP) != 0;
      interface.is_loopback = (item->ifa_flags & IFF_LOOPBACK) != 0;
      interface.speed_mbps = speed_of(socket.get(), interface.name);
    } else if (const auto address = IpAddress::from_sockaddr(item->ifa_addr)) {
      interface.addresses.push_back(*address);
      interface.prefixes.push_back(prefix_of(item->ifa_netmask));
    }
  }

  std::vector<Interface> interfaces;
  for (auto& [name, interface] : by_name) {
    // Index 0 marks an address label ("eth0:1"); its addresses belong to the labelled interface.
    if (interface.index != 0) interfaces.push_back(std::move(interface));
  }
  for (const auto& [name, interface] : by_name) {
    const std::string device = name.substr(0, name.find(':'));
    if (device == name) continue;
    for (Interface& owner : interfaces) {
      if (owner.name != device) continue;
      owner.addresses.insert(owner.addresses.end(), interface.addresses.begin(),
                             interface.addresses.end());
      owner.prefixes.insert(owner.prefixes.end(), interface.prefixes.begin(),
                            interface.prefixes.end());
    }
  }
  std::sort(interfaces.begin(), interfaces.end(),
            [](const Interface& a, const Interface& b) { return a.index < b.index; });
  return interfaces;
}

const Interface* find_interface(const std::vector<Interface>& interfaces,
                                const IpAddress& address) {
  for (const Interface& interface : interfaces) {
    if (std::find(interface.addresses.begin(), interface.addresses.end(), address) !=
        interface.addresses.end()) {
      return &interface;
    }
  }
  if (address.family != AF_INET || !address.is_loopback()) return nullptr;
  const auto loopback = std::find_if(interfaces.begin(), interfaces.end(),
                                     [](const Interface& i) { return i.is_loopback; });
  return loopback == interfaces.end() ? nullptr : &*loopback;
}

Result<int> ifindex_of(const IpAddress& address) {
  Result<std::vector<Interface>> interfaces = list_interfaces();
  if (!interfaces.ok()) return interfaces.take_status();
  if (const Interface* found = find_interface(interfaces.value(), address)) return found->index;
  std::string there;
  for (const Interface& interface : interfaces.value()) {
    for (const IpAddress& have : interface.addresses) {
      there += (there.empty() ? "" : ", ") + interface.name + "=" + have.to_string();
    }
  }
  return Status(
      ErrorCode::invalid_argument,
      "no interface carries the address " + address.to_string() + "; present addresses: " + there);
}

}  // namespace r2ccl
