// The path between two ports of the simulated world, and the items in flight.  Faults act here.
// Items held up by a fault arrive after the heal, as in the worst case of a real network.
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

// The two ends of a pair: the lower rank accepts connections, the higher rank opens connections.
using Side = std::uint8_t;
inline constexpr Side acceptor_side = 0;
inline constexpr Side connector_side = 1;
inline constexpr std::array both_sides{acceptor_side, connector_side};
[[nodiscard]] constexpr Side other(Side side) { return static_cast<Side>(1 - side); }

struct Delays {
  TimeNs latency_ns = 20'000;
  TimeNs jitter_ns = 10'000;  // upper bound, added to latency_ns
  TimeNs ns_per_byte = 10;
  TimeNs retransmit_ns = 1 * ns_per_ms;  // from the heal until held-up items move
  TimeNs poll_ns = 0;                    // upper bound of the polling delay of a completion
};

// Owner of an end of a connection.  The owner is notified of arrivals, of new room to write and of
// failures.
class EventSink {
 public:
  virtual ~EventSink() = default;
  virtual void on_event() = 0;
};

// Effects of a port on the packets sent by its side.
struct Port {
  bool carrier = true;
  bool black_hole = false;
  bool refuses = false;  // the own host does not send: a filter of outgoing packets, a full queue
  bool boxed = false;    // a middlebox acknowledges the bytes of this side and holds them
  TimeNs ack_ns = 0;     // delay of acknowledgements by the host of this side
  std::size_t largest = std::numeric_limits<std::size_t>::max();  // larger packets vanish
  TimeNs slowdown = 1;                                            // factor on the time per byte
  TimeNs extra_latency_ns = 0;
  std::uint32_t flips = 0;         // the next `flips` packets with data get a bit flipped
  std::uint32_t phantoms = 0;      // the next `phantoms` messages are acknowledged and lost
  std::uint32_t lost_notices = 0;  // the same for messages without data
  std::uint32_t duplicates = 0;    // the next `duplicates` completions are found twice
  TimeNs landing_ns = 0;           // upper bound of the delay from the peer's port to memory

  friend bool operator==(const Port&, const Port&) = default;
};

// A NIC shared by the connections of a rank to all peers on one rail.
struct Nic {
  TimeNs ns_per_byte = 0;
  TimeNs sends_until = 0;
  TimeNs receives_until = 0;
  std::uint64_t sent_bytes = 0;
};

struct Path {
  std::array<Port, 2> ports{};
  std::array<Nic*, 2> nics{};  // null: the path has a bandwidth of its own
  TimeNs disturbed_at = 0;     // last time a fault began, acted or ended
  TimeNs acks_late_at = 0;     // last time a delay of acknowledgements began or ended

  // Returns true while a fault with a duration is active, unlike a fault of single packets.  Late
  // acknowledgements do not count: they explain a suspicion, but no loss of the rail.
  [[nodiscard]] bool bad() const {
    return std::any_of(ports.begin(), ports.end(), [](const Port& port) {
      return !port.carrier || port.black_hole || port.refuses || port.boxed || port.slowdown > 1 ||
             port.extra_latency_ns > 0 || port.landing_ns > 0 ||
             port.largest < std::numeric_limits<std::size_t>::max();
    });
  }
  [[nodiscard]] bool acks_late() const { return ports[0].ack_ns > 0 || ports[1].ack_ns > 0; }
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

// A single direction of a path.  Items arrive in order, each when due and when the path lets the
// item through.
template <typename Item>
class DelayLine {
 public:
  // `arrive` returns 0 once the item is accepted, or the delay until the item arrives again.
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
  // Continues after a heal.  Held-up items move no earlier than `earliest`.
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
