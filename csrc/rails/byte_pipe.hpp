// One connection of a rail: an ordered, non-blocking byte stream in both directions.  TCP sockets
// and shared-memory rings are byte pipes; FramedRail puts frames on them.
#pragma once

#include <sys/socket.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/units.hpp"

namespace r2ccl {

enum class Io : std::uint8_t { ok, again, broken };

// What the path says about bytes handed to it.
struct PathReport {
  std::uint64_t unacknowledged = 0;  // bytes written that the peer's end has not acknowledged
  TimeNs round_trip = 0;             // the transport's own smoothed estimate; 0: not known
  TimeNs base_round_trip = 0;        // its recent minimum: the path without waiting for processes
  std::uint64_t held_back = 0;       // an acknowledgement of so many bytes may be delayed
  bool peer_limited = false;         // nothing moves because the peer does not read
  bool advanced = false;             // much has arrived since the last report, behind a gap too
};

class BytePipe {
 public:
  virtual ~BytePipe() = default;

  // Writes or reads what is possible at once.  `again`: nothing was.
  virtual Io write(std::span<const iovec> parts, std::size_t& bytes) = 0;
  virtual Io read(std::span<const iovec> parts, std::size_t& bytes) = 0;

  virtual PathReport path() = 0;

  // Acknowledges to the peer's end what has been read, if the transport would wait with that.
  virtual void acknowledge() {}

  // The pipe is about to be closed, and bytes not sent yet have nothing left to do.
  virtual void abandon() {}

  // As if the path had broken the connection.
  void sever() { ::shutdown(fd(), SHUT_RDWR); }

  // The events of fd() to sleep for until bytes arrive, with `for_write` also until there is room;
  // 0: there is something already.
  [[nodiscard]] virtual int fd() const = 0;
  [[nodiscard]] virtual short arm(bool for_write) = 0;
};

}  // namespace r2ccl
