// Communicators of the peer that have no room here, and the notices about them.  A peer decides how
// many there are, so only the most recent are kept.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <unordered_set>

#include "base/errors.hpp"

namespace r2ccl {

class Refusals {
 public:
  struct Notice {
    std::uint64_t communicator;
    ErrorCode code;
    const std::string* text;  // shared by all notices of the code; frames in flight point into it
  };

  explicit Refusals(std::size_t most) : most_(most) {}

  // Returns false if the communicator is among those kept.  Forgets the oldest beyond the limit: it
  // is refused again if its messages go on.
  bool add(std::uint64_t communicator, ErrorCode code, const std::string& why) {
    if (!known_.insert(communicator).second) return false;
    notices_.push_back({communicator, code, &texts_.try_emplace(code, why).first->second});
    ++end_;
    if (notices_.size() > most_) {
      known_.erase(notices_.front().communicator);
      notices_.pop_front();
    }
    return true;
  }
  [[nodiscard]] bool contains(std::uint64_t communicator) const {
    return known_.contains(communicator);
  }
  [[nodiscard]] std::size_t size() const { return notices_.size(); }

  // Notices are numbered from 0; those below first() are forgotten.
  [[nodiscard]] std::uint64_t first() const { return end_ - notices_.size(); }
  [[nodiscard]] std::uint64_t end() const { return end_; }
  [[nodiscard]] const Notice& at(std::uint64_t number) const {
    return notices_[static_cast<std::size_t>(number - first())];
  }

 private:
  const std::size_t most_;
  std::unordered_set<std::uint64_t> known_;
  std::deque<Notice> notices_;  // oldest first
  std::map<ErrorCode, std::string> texts_;
  std::uint64_t end_ = 0;
};

}  // namespace r2ccl
