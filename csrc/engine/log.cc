#include "engine/log.hpp"

#include <chrono>

namespace r2ccl {
namespace {

constexpr std::size_t max_lines = 1024;

}  // namespace

void LogQueue::add(LogLevel level, std::string text) {
  const std::lock_guard guard(mutex_);
  if (lines_.size() >= max_lines) {
    ++dropped_;
    return;
  }
  lines_.push_back({level, std::move(text)});
  added_.notify_one();
}

std::optional<std::deque<LogLine>> LogQueue::take(int timeout_ms) {
  std::unique_lock lock(mutex_);
  added_.wait_for(lock, std::chrono::milliseconds(timeout_ms),
                  [this] { return closed_ || !lines_.empty(); });
  if (dropped_ > 0)
    lines_.push_back({LogLevel::warning, std::to_string(dropped_) + " log lines were dropped"});
  dropped_ = 0;
  if (closed_ && lines_.empty()) return std::nullopt;
  return std::exchange(lines_, {});
}

void LogQueue::close() {
  const std::lock_guard guard(mutex_);
  closed_ = true;
  added_.notify_all();
}

}  // namespace r2ccl
