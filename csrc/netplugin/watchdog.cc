#include "netplugin/watchdog.hpp"

namespace r2ccl::net {

void Watchdog::failed(const void* connection, const std::string& why, TimeNs now) {
  const std::lock_guard guard(mutex_);
  errors_.try_emplace(connection, Error{now, why});
}

void Watchdog::closed(const void* connection) {
  const std::lock_guard guard(mutex_);
  errors_.erase(connection);
}

std::optional<std::string> Watchdog::ignored(TimeNs now) const {
  if (limit_ == 0) return std::nullopt;
  const std::lock_guard guard(mutex_);
  for (const auto& [connection, error] : errors_)
    if (now - error.since >= limit_) return error.why;
  return std::nullopt;
}

}  // namespace r2ccl::net
