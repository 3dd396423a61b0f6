#include "connect/drop_log.hpp"

#include "base/limits.hpp"

namespace r2ccl {

void DropLog::add(const std::string& remote, const std::string& why, TimeNs now) {
  progress(now);
  ++dropped_;
  last_ = remote;
  const bool room = reasons_.size() < most_drop_reasons || reasons_.contains(why);
  ++reasons_[room ? why : "other reasons"];
  progress(now);
}

void DropLog::progress(TimeNs now) {
  if (dropped_ == 0 || now < quiet_until_) return;
  std::string text;
  for (const auto& [why, count] : reasons_) {
    if (!text.empty()) text += ", ";
    text += why;
    if (dropped_ > 1) text += " (" + std::to_string(count) + ")";
  }
  log_.add(level_, dropped_ == 1 ? "dropped a connection from " + last_ + ": " + text
                                 : "dropped " + std::to_string(dropped_) +
                                       " connections, the last from " + last_ + ": " + text);
  dropped_ = 0;
  reasons_.clear();
  quiet_until_ = now + drop_log_ns;
}

}  // namespace r2ccl
