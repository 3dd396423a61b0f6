// Notices of communicators that failed at this end, for every rail of a link and for rails that
// connect later.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>

#include "link/link_types.hpp"

namespace r2ccl {

class Aborts {
 public:
  explicit Aborts(std::size_t most) : most_(most) {}

  // `sent`: no rail has yet to send a notice.  The oldest notices beyond the limit are then
  // forgotten: a rail takes up few frames before it has written them, so no frame in flight points
  // into their texts.
  void add(AbortNotice notice, bool sent) {
    for (; sent && notices_.size() >= most_; ++first_) notices_.pop_front();
    notices_.push_back(std::move(notice));
  }
  [[nodiscard]] std::size_t size() const { return notices_.size(); }

  // Notices are numbered from 0; those below first() are forgotten.
  [[nodiscard]] std::uint64_t first() const { return first_; }
  [[nodiscard]] std::uint64_t end() const { return first_ + notices_.size(); }
  [[nodiscard]] const AbortNotice& at(std::uint64_t number) const {
    return notices_[static_cast<std::size_t>(number - first_)];
  }

 private:
  const std::size_t most_;
  std::deque<AbortNotice> notices_;  // oldest first
  std::uint64_t first_ = 0;
};

}  // namespace r2ccl
