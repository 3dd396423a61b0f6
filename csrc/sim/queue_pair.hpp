// A rail of one-sided writes in the simulated world, modelled on verbs.  The port writes a payload
// directly into the receiver's slot, regardless of the receiver's software; a completion follows
// later.  Late writes of an ended epoch land until the fence is complete.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <vector>

#include "link/link.hpp"
#include "rails/rail.hpp"
#include "sim/memory.hpp"
#include "sim/path.hpp"

namespace r2ccl::sim {

class QueuePair;

// Both queue pairs of an epoch, and the packets in flight.
class QueuePairs {
 public:
  struct Packet {
    FrameHeader header{};
    const std::byte* source = nullptr;  // memory, read later by the port
    std::byte* target = nullptr;        // data: a slot of the peer, or memory of the peer's caller
    std::uint32_t key = 0;              // key of `target`, given by the peer
    bool zero_copy = false;             // `source` is memory of a caller
    std::vector<std::byte> payload;
    std::uint64_t position = 0;  // end of the frame in the epoch's byte stream
  };

  QueuePairs(Epoch of, EventQueue& events, Random& random, const Delays& delays, Path& path);
  QueuePairs(const QueuePairs&) = delete;
  QueuePairs& operator=(const QueuePairs&) = delete;

  void attach(Side side, QueuePair& pair) { ends_[side] = &pair; }
  void post(Side side, Packet packet);
  void flush(Side side);                          // drops packets not yet read by the port
  void leave(Side side);                          // closes the end: nothing lands here any more
  void found(Side side, std::uint64_t position);  // by the software of `side`
  void retry();
  void silence() { silent_ = true; }  // drops later errors of these queue pairs
  [[nodiscard]] std::size_t unread(Side side) const { return lanes_[side].queue.size(); }
  [[nodiscard]] const std::deque<Packet>& queue(Side side) const { return lanes_[side].queue; }
  // Returns true if the port of a side may still read the source of a posted message: some bytes
  // were not read, or may be sent again.
  [[nodiscard]] bool may_read(Side side, std::uint64_t connection, std::uint64_t number) const;
  const Epoch epoch;
  // Called when a port reads memory of a caller, and when a write targets memory not in use.
  std::function<void(Side, const FrameHeader&)> on_zero_copy_read;
  std::function<void(const FrameHeader&)> on_stray_write;
  // Returns true if a chunk of another message may still be written to the same slot.
  [[nodiscard]] bool carries_other_message(Side from, const FrameHeader& header) const;

 private:
  struct Lane {
    std::deque<Packet> queue;  // posted, not yet read by the port
    bool reading = false;
    std::uint64_t arrived = 0;   // position acknowledged by the peer's port
    std::uint64_t found = 0;     // position found by the peer's software
    std::deque<Packet> landing;  // acknowledged, not yet in memory
    TimeNs last_landing = 0;
    bool ack_due = false;
    bool ack_lost = false;
  };

  void read_next(Side from);
  TimeNs arrive(Side from, Packet& packet);
  void land_next(Side from);
  void schedule_ack(Side from);
  void acknowledge(Side from);

  EventQueue& events_;
  Random& random_;
  const Delays& delays_;
  Path& path_;
  std::array<Lane, 2> lanes_;  // by sending side
  std::array<DelayLine<Packet>, 2> delay_lines_;
  std::array<QueuePair*, 2> ends_{};
  std::array<bool, 2> left_{};
  bool silent_ = false;
};

class QueuePair final : public Rail {
 public:
  // `fence_ns` is the time from the request for a fence to its completion; negative = never.
  QueuePair(Link& link, RailId rail, const Memory& memory, QueuePairs& pairs, Side side,
            EventSink& owner, EventQueue& events, Random& random, const Delays& delays,
            TimeNs fence_ns);
  ~QueuePair() override { pairs_.leave(side_); }
  QueuePair(const QueuePair&) = delete;
  QueuePair& operator=(const QueuePair&) = delete;

  bool pump_out(TimeNs now) override;
  bool pump_in(TimeNs now) override;
  [[nodiscard]] bool wants_write() const override { return pairs_.unread(side_) > 0; }
  void report_path(TimeNs now) override;
  bool detach(const DetachScope& scope, TimeNs now) override;
  [[nodiscard]] bool detached(const DetachScope& scope) const override;
  bool fence(TimeNs now) override;
  [[nodiscard]] std::optional<pollfd> arm() override { return std::nullopt; }
  void sever() override { on_broken(); }
  void mute() override { muted_ = true; }
  void heal() override { muted_ = false; }
  [[nodiscard]] bool muted() const override { return muted_; }

  // ---- called by QueuePairs ----
  [[nodiscard]] bool has_receives(std::size_t taken) const {
    return fence_asked_ != 0 || completions_.size() + taken < receive_depth;
  }
  void on_landed(const QueuePairs::Packet& packet, Port& port);
  void on_acked(std::uint64_t position, std::uint64_t found);
  void on_broken();

 private:
  static constexpr std::size_t send_depth = 16;
  static constexpr std::size_t receive_depth = 12;

  struct Completion {
    FrameHeader header;
    std::vector<std::byte> payload;  // of messages other than data
    std::uint64_t position;
    TimeNs visible_at;
  };

  bool take(const Completion& completion, TimeNs now);
  [[nodiscard]] bool wants(const FrameHeader& header) const;
  void add_key(FrameHeader& header, std::uint64_t address, std::uint64_t bytes) const;

  Link& link_;
  const RailId rail_;
  const Epoch epoch_;
  const Memory& memory_;
  QueuePairs& pairs_;
  const Side side_;
  EventSink& owner_;
  EventQueue& events_;
  Random& random_;
  const Delays& delays_;
  const TimeNs fence_ns_;
  std::deque<Completion> completions_;
  std::uint64_t posted_ = 0;
  std::uint64_t acked_ = 0;
  std::uint64_t found_ = 0;  // found by the peer
  bool reported_ = true;
  TimeNs fence_asked_ = 0;
  bool broken_ = false;
  bool muted_ = false;
};

}  // namespace r2ccl::sim
