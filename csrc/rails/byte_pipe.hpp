// A byte pipe: one connection of a rail, an ordered non-blocking byte stream in both directions.
// TCP sockets and shared-memory rings are byte pipes; FramedRail puts frames on a pipe.
#pragma once

#include <sys/socket.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/units.hpp"

namespace r2ccl {

enum class Io : std::uint8_t { ok, again, broken };

// State of the path as the transport reports it.
struct PathReport {
  std::uint64_t unacknowledged = 0;  // bytes written, not yet acknowledged by the peer's end
  TimeNs round_trip = 0;             // smoothed estimate of the transport; 0 = unknown
  TimeNs base_round_trip = 0;        // recent minimum: the path without scheduling delays
  std::uint64_t held_back = 0;       // bytes whose acknowledgement the peer's end may delay
  bool peer_limited = false;         // nothing moves because the peer does not read
  bool advanced = false;             // several segments reached the peer, perhaps beyond a gap
};

class BytePipe {
 public:
  virtual ~BytePipe() = default;

  // Write or read as many bytes as possible without blocking.  `ok` sets `bytes`; `again` and
  // `broken` leave `bytes` unchanged.
  virtual Io write(std::span<const iovec> parts, std::size_t& bytes) = 0;
  virtual Io read(std::span<const iovec> parts, std::size_t& bytes) = 0;

  // Returns the transport's counters and round-trip times.
  virtual PathReport path() = 0;

  // Sends a delayed acknowledgement of read bytes immediately, if the transport delays
  // acknowledgements.
  virtual void acknowledge() {}

  // Discards unsent bytes; the caller closes the pipe next.
  virtual void abandon() {}

  // Returns true once a read has found that the peer's end closed the connection in order: all its
  // bytes were read before, and no reset came.
  [[nodiscard]] virtual bool closed_by_peer() const { return false; }

  // Breaks the connection like a failure of the path.
  void sever() { ::shutdown(fd(), SHUT_RDWR); }

  [[nodiscard]] virtual int fd() const = 0;
  // Returns the events of fd() to poll before sleeping: arrival of bytes, and with `for_write` also
  // room for writing.  Returns 0 if bytes or room are already there: the caller must not sleep.
  [[nodiscard]] virtual short arm(bool for_write) = 0;
};

}  // namespace r2ccl
