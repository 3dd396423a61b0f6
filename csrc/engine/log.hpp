// Log lines of the core: kept in a bounded queue until someone (Python's logging) takes them, so
// that no lock of the core is ever held while a log is written.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

namespace r2ccl {

enum class LogLevel : std::uint8_t { debug, info, warning, error };

struct LogLine {
  LogLevel level;
  std::string text;
};

class LogQueue {
 public:
  void add(LogLevel level, std::string text);
  // Waits up to timeout_ms for lines and takes them all.  Nothing: closed, and no line is left.
  [[nodiscard]] std::optional<std::deque<LogLine>> take(int timeout_ms);
  void close();  // ends every wait

 private:
  std::mutex mutex_;
  std::condition_variable added_;
  std::deque<LogLine> lines_;
  std::uint64_t dropped_ = 0;
  bool closed_ = false;
};

}  // namespace r2ccl
