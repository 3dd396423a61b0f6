// One epoch of a rail: moves frames between its link and what carries them.
#pragma once

#include <poll.h>

#include <cstdint>
#include <optional>

#include "base/units.hpp"
#include "link/frame.hpp"

namespace r2ccl {

// Frames of a communicator that carry memory of its callers, of messages before `before`; or all of
// its frames.
struct DetachScope {
  std::uint64_t communicator = 0;
  std::optional<std::uint64_t> before;

  [[nodiscard]] bool covers(const FrameHeader& header, bool zero_copy) const {
    return header.type == FrameType::data && header.communicator == communicator &&
           (!before.has_value() || (zero_copy && header.number < *before));
  }
};

class Rail {
 public:
  virtual ~Rail() = default;

  // Sends one batch of what the link has; receives one portion of what is there.  Portions are
  // small enough that rails take turns and neither direction starves the other.  True: something
  // moved.  On a broken transport the link is told, and neither may be called again.
  virtual bool pump_out(TimeNs now) = 0;
  virtual bool pump_in(TimeNs now) = 0;
  // Frames taken from the link are not handed on in full.
  [[nodiscard]] virtual bool wants_write() const = 0;

  // Tells the link what the path has acknowledged.
  virtual void report_path(TimeNs now) = 0;
  // Lets the peer's end know what arrived here, if nothing has told it yet.
  virtual void acknowledge(TimeNs /*now*/) {}
  // No frame that was taken from the link is to read memory in `scope` any more.  True: none does;
  // else it is to be asked again, after the rail was given up perhaps.
  [[nodiscard]] virtual bool detach(const DetachScope& scope, TimeNs now) = 0;
  // The same of a rail whose epoch has ended.
  [[nodiscard]] virtual bool detached(const DetachScope& /*scope*/) const { return true; }

  // The local fence.  The first call asks for it; true: nothing of this epoch touches memory of
  // this process any more, and the rail may go.  Until then it is asked again.
  virtual bool fence(TimeNs now) = 0;

  // What to poll before sleeping; empty: something can be done at once.
  [[nodiscard]] virtual std::optional<pollfd> arm() = 0;

  // A fault of drills: the transport fails as it may by itself.
  virtual void sever() = 0;
  // Another: a black hole, in which bytes are held back in both directions until heal().
  virtual void mute() = 0;
  virtual void heal() = 0;
  [[nodiscard]] virtual bool muted() const = 0;
};

}  // namespace r2ccl
