// A rail of one-sided writes in the simulated world, as verbs: a message's payload is put straight
// into the receiver's slot by its port, whatever the receiver's software thinks, and a completion
// tells of it later.  Late writes of an epoch that has ended land until its fence is complete.
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

// The two queue pairs of one epoch and what is on its way between them.
class QueuePairs {
 public:
  struct Packet {
    FrameHeader header{};
    const std::byte* source = nullptr;  // read when the port gets to it
    std::byte* target = nullptr;        // of data: in a slot of the peer, or in its caller's memory
    std::uint32_t key = 0;              // that the peer gave for it
    bool zero_copy = false;             // the source is a caller's memory
    std::vector<std::byte> payload;
    std::uint64_t position = 0;  // of the epoch's byte stream, after the frame
  };

  QueuePairs(Epoch of, EventQueue& events, Random& random, const Delays& delays, Path& path);
  QueuePairs(const QueuePairs&) = delete;
  QueuePairs& operator=(const QueuePairs&) = delete;

  void attach(Side side, QueuePair& pair) { ends_[side] = &pair; }
  void post(Side side, Packet packet);
  void flush(Side side);  // what the port has not read yet will never be sent
  void leave(Side side);  // nothing lands here any more
  void found(Side side, std::uint64_t position);  // by the software of this side
  void retry();
  void silence() { silent_ = true; }  // no error of it ever gets through
  [[nodiscard]] std::size_t unread(Side side) const { return lanes_[side].queue.size(); }
  [[nodiscard]] const std::deque<Packet>& queue(Side side) const { return lanes_[side].queue; }
  const Epoch epoch;
  // A port reads a caller's memory, or is to write where nothing may be written.
  std::function<void(Side, const FrameHeader&)> on_zero_copy_read;
  std::function<void(const FrameHeader&)> on_stray_write;
  // A chunk of another message may still be written to this slot.
  [[nodiscard]] bool carries_other_message(Side from, const FrameHeader& header) const;

 private:
  struct Lane {
    std::deque<Packet> queue;  // posted, not read by the port
    bool reading = false;
    std::uint64_t arrived = 0;   // position that the peer's port has acknowledged
    std::uint64_t found = 0;     // and that the peer's software knows of
    std::deque<Packet> landing;  // acknowledged, not in memory
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
  std::array<Lane, 2> lanes_;  // by the side that sends
  std::array<DelayLine<Packet>, 2> delay_lines_;
  std::array<QueuePair*, 2> ends_{};
  std::array<bool, 2> left_{};
  bool silent_ = false;
};

class QueuePair final : public Rail {
 public:
  // `fence_ns`: how long the fence takes once it was asked for; below 0: for ever.
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

  // ---- for the pairs ----
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
    std::vector<std::byte> payload;  // of messages that are not data
    std::uint64_t position;
    TimeNs visible_at;
  };

  bool take(const Completion& completion, TimeNs now);
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
  std::uint64_t found_ = 0;  // by the peer
  bool reported_ = true;
  TimeNs fence_asked_ = 0;
  bool broken_ = false;
  bool muted_ = false;
};

}  // namespace r2ccl::sim
