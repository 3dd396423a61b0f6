// The NICs of this node that NCCL sees as devices: each has a listener for rails.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/errors.hpp"
#include "drivers/ip_address.hpp"

namespace r2ccl::net {

struct Nic {
  std::string name;
  std::string device;  // interface to bind to; empty: bind by address alone
  IpAddress address;
  std::uint8_t prefix = 0;  // length of the address's network in bits; 0: unknown
  std::string pci_path;     // in /sys; empty: not a PCI device
  int mbit_s = 0;           // 0: unknown
};

// Returns the NICs of R2CCL_RAILS, in PCI order, and those without a PCI address last.  NCCL
// numbers its own NICs in PCI order, and takes the order of a plugin for the same.  `auto` takes
// every usable port with hardware, else every usable virtual port, except `management`: a device or
// an address, R2CCL_MANAGEMENT.
Result<std::vector<Nic>> find_nics(const std::string& rails, const std::string& management);

using NodeIdentity = std::array<std::byte, 16>;
// Returns the identity of the node by R2CCL_NODE; processes of a node have the same.
Result<NodeIdentity> identity_of_node(const std::string& node);

// Fills `out` with random bytes of the kernel.
Status fill_random(std::span<std::byte> out);

}  // namespace r2ccl::net
