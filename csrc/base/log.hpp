// Log lines of the core: kept in a bounded queue until someone (Python's logging) takes them, so
// that no lock of the core is ever held while a log is written.
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
  void add(LogLevel level, std::string text);
  // Never waits.  Nothing: closed, and no line is left.
  [[nodiscard]] std::optional<std::deque<LogLine>> take();
  // Readable while take() has something to say.  A reader sleeps on this outside of the core, so
  // that it holds nothing of the core when its interpreter ends.
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
