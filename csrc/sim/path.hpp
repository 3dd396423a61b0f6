// What lies between two ports of the simulated world, and what is on its way over it.  Faults act
// here: what a fault holds up arrives after the fault has healed, which is the worst that a network
// may do.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <utility>

#include "base/units.hpp"
#include "sim/event_queue.hpp"
#include "sim/random.hpp"

namespace r2ccl::sim {

// The two ends of a pair: the lower rank accepts connections, the higher one opens them.
using Side = std::uint8_t;
inline constexpr Side acceptor_side = 0;
inline constexpr Side connector_side = 1;
inline constexpr std::array both_sides{acceptor_side, connector_side};
[[nodiscard]] constexpr Side other(Side side) { return static_cast<Side>(1 - side); }

struct Delays {
  TimeNs latency_ns = 20'000;
  TimeNs jitter_ns = 10'000;  // up to this on top of the latency
  TimeNs ns_per_byte = 10;
  TimeNs retransmit_ns = 1 * ns_per_ms;  // after a heal, until what was held up moves again
  TimeNs poll_ns = 0;                    // up to this until a completion is found in its queue
};

// Who holds an end: told that something has arrived, that there is room again, or that it broke.
class EventSink {
 public:
  virtual ~EventSink() = default;
  virtual void on_event() = 0;
};

// What a port does to the packets that its side sends.
struct Port {
  bool carrier = true;
  bool black_hole = false;
  std::size_t largest = std::numeric_limits<std::size_t>::max();  // larger ones vanish
  TimeNs slowdown = 1;                                            // times the usual time of a byte
  TimeNs extra_latency_ns = 0;
  std::uint32_t flips = 0;         // so many of the next packets with data get a bit flipped
  std::uint32_t phantoms = 0;      // so many of the next messages are acknowledged, but lost
  std::uint32_t lost_notices = 0;  // the same, of messages that carry no data
  std::uint32_t duplicates = 0;    // so many of the next completions are found twice
  TimeNs landing_ns = 0;           // up to this until what the peer's port took is in memory

  friend bool operator==(const Port&, const Port&) = default;
};

struct Path {
  std::array<Port, 2> ports{};
  TimeNs disturbed_at = 0;  // when a fault last began, acted or ended

  // A fault is on.
  [[nodiscard]] bool bad() const {
    return std::any_of(ports.begin(), ports.end(), [](const Port& port) {
      return !port.carrier || port.black_hole || port.slowdown > 1 || port.extra_latency_ns > 0 ||
             port.landing_ns > 0 || port.largest < std::numeric_limits<std::size_t>::max();
    });
  }
  [[nodiscard]] bool cut() const { return !ports[0].carrier || !ports[1].carrier; }
  [[nodiscard]] bool blocked(Side from) const { return cut() || ports[from].black_hole; }
  [[nodiscard]] bool passes(Side from, std::size_t bytes) const {
    return !blocked(from) && bytes <= ports[from].largest;
  }
  [[nodiscard]] TimeNs latency(Side from, const Delays& delays, Random& random) const {
    return delays.latency_ns + ports[from].extra_latency_ns +
           static_cast<TimeNs>(random.below(static_cast<std::uint64_t>(delays.jitter_ns) + 1));
  }
};

// One direction: items arrive in order, each when it is due and the path lets it through.
template <typename Item>
class DelayLine {
 public:
  // `arrive` returns 0, or how long to wait before the same item arrives again.
  DelayLine(EventQueue& events, const Path& path, Side from, std::function<TimeNs(Item&)> arrive)
      : events_(events), path_(path), from_(from), arrive_(std::move(arrive)) {}
  DelayLine(const DelayLine&) = delete;
  DelayLine& operator=(const DelayLine&) = delete;

  void send(Item item, std::size_t bytes, TimeNs due) {
    if (!items_.empty()) due = std::max(due, items_.back().due);
    bytes_ += bytes;
    items_.push_back({std::move(item), bytes, due});
    schedule();
  }
  // The path has healed; nothing that was held up moves before `earliest`.
  void retry(TimeNs earliest) {
    for (Entry& entry : items_) entry.due = std::max(entry.due, earliest);
    schedule();
  }
  void clear() {
    items_.clear();
    bytes_ = 0;
  }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }
  template <typename Predicate>
  [[nodiscard]] bool any(Predicate predicate) const {
    for (const Entry& entry : items_)
      if (predicate(entry.item)) return true;
    return false;
  }

 private:
  struct Entry {
    Item item;
    std::size_t bytes;
    TimeNs due;
  };

  void schedule() {
    if (scheduled_ || items_.empty()) return;
    scheduled_ = true;
    events_.at(std::max(events_.now(), items_.front().due), [this] { next(); });
  }
  void next() {
    scheduled_ = false;
    if (items_.empty() || !path_.passes(from_, items_.front().bytes)) return;  // retry() continues
    if (items_.front().due > events_.now()) return schedule();
    Entry entry = std::move(items_.front());
    items_.pop_front();
    bytes_ -= entry.bytes;
    const TimeNs wait = arrive_(entry.item);
    if (wait > 0) {
      entry.due = events_.now() + wait;
      bytes_ += entry.bytes;
      items_.push_front(std::move(entry));
    }
    schedule();
  }

  EventQueue& events_;
  const Path& path_;
  const Side from_;
  const std::function<TimeNs(Item&)> arrive_;
  std::deque<Entry> items_;
  std::size_t bytes_ = 0;
  bool scheduled_ = false;
};

}  // namespace r2ccl::sim
