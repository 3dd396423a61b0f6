#include "base/log.hpp"

#include <sys/eventfd.h>

#include "base/limits.hpp"

namespace r2ccl {

LogQueue::LogQueue()
    : event_(FileDescriptor::made_by([] { return ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC); })) {}

void LogQueue::add(LogLevel level, std::string text) {
  const std::lock_guard guard(mutex_);
  if (lines_.size() >= most_log_lines) {
    ++dropped_;
    return;
  }
  lines_.push_back({level, std::move(text)});
  signal();
}

std::optional<std::deque<LogLine>> LogQueue::take() {
  const std::lock_guard guard(mutex_);
  if (closed_ && lines_.empty()) return std::nullopt;
  std::uint64_t count = 0;
  if (!closed_) (void)!::read(event_.get(), &count, sizeof(count));
  if (dropped_ > 0)
    lines_.push_back({LogLevel::warning, std::to_string(dropped_) + " log lines were dropped"});
  dropped_ = 0;
  return std::exchange(lines_, {});
}

void LogQueue::close() {
  const std::lock_guard guard(mutex_);
  closed_ = true;
  signal();
}

void LogQueue::signal() {
  const std::uint64_t one = 1;
  (void)!::write(event_.get(), &one, sizeof(one));
}

}  // namespace r2ccl
