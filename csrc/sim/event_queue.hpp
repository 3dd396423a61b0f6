// The virtual clock and the queue of future events.  Events due at the same time run in the order
// of their creation, so a run depends only on its seed.
#pragma once

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "base/units.hpp"

namespace r2ccl::sim {

class EventQueue {
 public:
  [[nodiscard]] TimeNs now() const { return now_; }

  void at(TimeNs when, std::function<void()> action) {
    assert(when >= now_);
    events_.push_back({when, next_order_++, std::move(action)});
    std::push_heap(events_.begin(), events_.end(), later);
  }
  void after(TimeNs delay, std::function<void()> action) { at(now_ + delay, std::move(action)); }

  // Moves the clock to the next event and runs the event.  Returns false if no event is due by
  // `limit`.
  bool run_next(TimeNs limit) {
    if (events_.empty() || events_.front().when > limit) return false;
    std::pop_heap(events_.begin(), events_.end(), later);
    const Event event = std::move(events_.back());
    events_.pop_back();
    now_ = event.when;
    event.action();
    return true;
  }

 private:
  struct Event {
    TimeNs when;
    std::uint64_t order;
    std::function<void()> action;
  };
  static bool later(const Event& a, const Event& b) {
    return a.when != b.when ? a.when > b.when : a.order > b.order;
  }

  std::vector<Event> events_;      // a heap
  TimeNs now_ = 1000 * ns_per_ms;  // not 0: in many places 0 means "never"
  std::uint64_t next_order_ = 0;
};

}  // namespace r2ccl::sim
