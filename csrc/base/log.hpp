// Bounded, thread-safe queue of the core's log lines.  Python's logging drains the queue, so no
// lock of the core is held while a line is written.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "base/file_descriptor.hpp"

namespace r2ccl {

enum class LogLevel : std::uint8_t { debug, info, warning, error };

struct LogLine {
  LogLevel level;
  std::string text;
};

class LogQueue {
 public:
  LogQueue();
  // Adds a line.  Beyond 1024 queued lines, lines are dropped; take() reports their number.
  void add(LogLevel level, std::string text);
  // Takes all queued lines without waiting, perhaps none.  Empty optional: the queue is closed and
  // drained.
  [[nodiscard]] std::optional<std::deque<LogLine>> take();
  // File descriptor (eventfd), readable while take() has lines or the queue is closed.  A reader
  // polls outside of the core and therefore holds no lock of the core at interpreter exit.
  [[nodiscard]] int fd() const { return event_.get(); }
  void close();

 private:
  void signal();

  const FileDescriptor event_;
  std::mutex mutex_;
  std::deque<LogLine> lines_;
  std::uint64_t dropped_ = 0;
  bool closed_ = false;
};

}  // namespace r2ccl
