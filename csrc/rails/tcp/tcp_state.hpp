// The kernel's counters of a TCP connection.  The counters distinguish three causes of silence: a
// peer that does not read, a path that drops packets, and an own host that drops packets.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace r2ccl {

struct TcpState {
  std::uint64_t unacknowledged = 0;     // bytes written, not yet acknowledged
  std::uint32_t in_flight = 0;          // segments
  std::uint64_t not_sent = 0;           // bytes
  std::uint32_t probes = 0;             // window probes in a row without an answer
  std::uint32_t segment = 0;            // bytes of a full segment
  std::optional<std::uint32_t> window;  // bytes that the peer's end accepts; Linux 5.4 and later

  // Reads the structure `tcp_info` of linux/tcp.h; older kernels return a shorter structure.
  static TcpState of(std::span<const std::byte> tcp_info, std::uint64_t unacknowledged);

  // Returns true if bytes wait only because the peer does not read: the window has no room for the
  // next segment, and the path answers window probes.
  //
  // An empty flight alone is no evidence.  If the own host drops a packet (a filter of outgoing
  // packets, a full queue), the kernel does not count the packet as sent.
  [[nodiscard]] bool peer_limited() const {
    if (unacknowledged == 0 || in_flight > 0 || probes >= 2) return false;
    return !window.has_value() || *window < std::min<std::uint64_t>(segment, not_sent);
  }
};

}  // namespace r2ccl
