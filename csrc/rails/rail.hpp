// A rail: moves frames between a link and a transport during one epoch.
#pragma once

#include <poll.h>

#include <cstdint>
#include <optional>

#include "base/units.hpp"
#include "link/frame.hpp"

namespace r2ccl {

// The frames whose memory a caller wants back: all frames with payload of a communicator or, with
// type `put`, of a connection; or only zero-copy frames of messages before number `before`.
struct DetachScope {
  std::uint64_t communicator = 0;
  std::optional<std::uint64_t> before;
  FrameType type = FrameType::data;

  [[nodiscard]] bool covers(const FrameHeader& header, bool zero_copy) const {
    return header.type == type && header.communicator == communicator &&
           (!before.has_value() || (zero_copy && header.number < *before));
  }
};

class Rail {
 public:
  virtual ~Rail() = default;

  // pump_out() sends a batch of the link's frames; pump_in() receives a portion of the arrived
  // bytes.  Portions are small, so that rails take turns and neither direction starves the other.
  // Both return true if anything moved.  On a broken transport they report the failure to the link,
  // and the caller must call neither function again.
  virtual bool pump_out(TimeNs now) = 0;
  virtual bool pump_in(TimeNs now) = 0;
  // True while the transport has not accepted all frames taken from the link.
  [[nodiscard]] virtual bool wants_write() const = 0;

  // Reports the path's acknowledgements to the link.
  virtual void report_path(TimeNs now) = 0;
  // Sends the peer's end an acknowledgement of arrived bytes, unless it is already sent.
  virtual void acknowledge(TimeNs /*now*/) {}
  // Makes the rail release caller memory: no frame in `scope` may read the memory any more.
  // Returns true once released.  On false, call again later; the rail may be taken down meanwhile.
  [[nodiscard]] virtual bool detach(const DetachScope& scope, TimeNs now) = 0;
  // Returns whether a rail of an ended epoch has released the memory in `scope`.
  [[nodiscard]] virtual bool detached(const DetachScope& /*scope*/) const { return true; }

  // Runs the local fence: the first call starts it.  Returns true once no attempt of this epoch can
  // touch memory of this process any more; the rail may then be destroyed.  On false, call again
  // later.
  virtual bool fence(TimeNs now) = 0;

  // Returns the descriptor to poll before sleeping; empty if there is work already.
  [[nodiscard]] virtual std::optional<pollfd> arm() = 0;

  // Returns true if the peer's end has closed the connection in order, as the kernel of a process
  // that ends does.  A living peer and a packet filter reset.
  [[nodiscard]] virtual bool closed_by_peer() const { return false; }

  // Breaks the transport for a drill, like a real failure.
  virtual void sever() = 0;
  // Starts a black hole for a drill: the rail moves no bytes in either direction until heal().
  // heal() sends the bytes held back, or fails the epoch if the rail has dropped frames.
  virtual void mute() = 0;
  virtual void heal() = 0;
  [[nodiscard]] virtual bool muted() const = 0;
};

}  // namespace r2ccl
