// Rooms for accepted connections before the proof of a key.  A room that is too full loses the
// oldest connection of the source with the most, so that a flood displaces itself first.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>

#include "base/limits.hpp"
#include "drivers/ip_address.hpp"

namespace r2ccl {

// The part of an accepted connection in the rooms.
enum class Standing : std::uint8_t {
  own,      // begun by this process: in no room
  known,    // from an address that a peer has told
  unknown,  // from another address: a stranger, or a peer behind a NAT
  claimed,  // after a HELLO with a valid MAC, which may be a recording
};

// The addresses of peers, a bounded number.
class KnownSources {
 public:
  void add(const IpAddress& address) {
    if (address.family != AF_UNSPEC && !address.is_unspecified() &&
        addresses_.size() < most_known_sources)
      addresses_.insert(address);
  }
  [[nodiscard]] bool has(const IpAddress& address) const { return addresses_.contains(address); }

 private:
  std::set<IpAddress> addresses_;
};

// The connections of one standing, counted by source.
class WaitingRoom {
 public:
  void enter(const IpAddress& source) {
    ++counts_[source];  // may throw, and then counts nothing
    ++total_;
  }
  void leave(const IpAddress& source) {
    const auto found = counts_.find(source);
    if (found == counts_.end()) return;
    --total_;
    if (--found->second == 0) counts_.erase(found);
  }
  [[nodiscard]] std::size_t total() const { return total_; }
  [[nodiscard]] std::size_t of(const IpAddress& source) const {
    const auto found = counts_.find(source);
    return found == counts_.end() ? 0 : found->second;
  }
  // Returns the largest number of connections of a source.
  [[nodiscard]] std::size_t most_of_a_source() const {
    std::size_t most = 0;
    for (const auto& [source, count] : counts_) most = std::max(most, count);
    return most;
  }

 private:
  std::size_t total_ = 0;
  std::map<IpAddress, std::size_t> counts_;
};

// Returns the address by which a room counts: of IPv6 the first 64 bits, since a host may have all
// addresses of its network.
[[nodiscard]] inline IpAddress source_of(IpAddress address) {
  if (address.family == AF_INET6)
    std::fill(address.bytes.begin() + 8, address.bytes.end(), std::byte{0});
  return address;
}

}  // namespace r2ccl
