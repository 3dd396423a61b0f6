// Accepts of rail connections, a few at a time.  A flood of connections thus takes a bounded share
// of a CPU, and no lock of the engine is held meanwhile.
#pragma once

#include <limits>
#include <span>
#include <string>
#include <vector>

#include "base/file_descriptor.hpp"
#include "base/log.hpp"
#include "base/units.hpp"
#include "drivers/socket_address.hpp"

namespace r2ccl {

struct Arrival {
  FileDescriptor socket;
  SocketAddress remote;
};

// Belongs to a single thread.
class Acceptor {
 public:
  explicit Acceptor(LogQueue& log) : log_(log) {}

  // Accepts at most accepts_per_tick connections of each listener.  No effect before resumes_at(),
  // which is stranger_tick_ns later while connections arrive in a row.
  [[nodiscard]] std::vector<Arrival> accept(std::span<const int> listeners, TimeNs now);
  // Time of the next accept.
  [[nodiscard]] TimeNs resumes_at() const { return resumes_at_; }

 private:
  [[nodiscard]] bool note_error(TimeNs now);  // true: no descriptor or memory is left

  LogQueue& log_;
  TimeNs resumes_at_ = 0;
  TimeNs last_arrival_ = std::numeric_limits<TimeNs>::min() / 2;
  bool exhausted_ = false;  // no descriptor was left at the last attempt
  TimeNs told_until_ = 0;   // the log has no further line about descriptors before
};

// Returns `what` with the text of errno, and with the limit of descriptors if that is the reason.
[[nodiscard]] std::string error_text(const char* what);

}  // namespace r2ccl
