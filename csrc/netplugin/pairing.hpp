// Pairs of the NICs of two nodes: each pair is a rail.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "drivers/ip_address.hpp"

namespace r2ccl::net {

struct Place {  // an address with a port
  IpAddress address;
  std::uint16_t port = 0;
};

// The listener of a NIC for rails.
struct RailListener {
  Place place;
  std::uint8_t prefix = 0;   // length of the address's network in bits; 0: unknown
  std::uint32_t mbit_s = 0;  // 0: unknown
};

// Returns pairs of indices, in rail order.  As many NICs as possible get a partner of their own: in
// a common network before a route, of equal speed before another speed, in the order of NICs.  Each
// NIC left over joins a NIC of the other end that has the fewest rails.  `lower` belongs to the
// process with the lower number, so that both ends compute the same pairs.
std::vector<std::pair<std::size_t, std::size_t>> pair_nics(std::span<const RailListener> lower,
                                                           std::span<const RailListener> higher);

// Returns true if the NIC is slower than an eighth of the fastest NIC of its node.
bool is_reserve(std::span<const RailListener> nics, std::size_t nic);

}  // namespace r2ccl::net
