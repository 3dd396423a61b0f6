// A connection in the simulated world: ordered and reliable both ways, as TCP, until an end closes
// it or the path resets it.  What a fault holds up arrives after the fault has healed, also what
// was sent by an end that has closed meanwhile: the worst that a network may do.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "link/frame.hpp"
#include "link/shape.hpp"
#include "sim/event_queue.hpp"
#include "sim/random.hpp"

namespace r2ccl::sim {

// The two ends of a pair: the lower rank accepts connections, the higher one opens them.
using Side = std::uint8_t;
inline constexpr Side acceptor_side = 0;
inline constexpr Side connector_side = 1;
[[nodiscard]] constexpr Side other(Side side) { return static_cast<Side>(1 - side); }

struct Delays {
  TimeNs latency_ns = 20'000;
  TimeNs jitter_ns = 10'000;  // up to this on top of the latency
  TimeNs ns_per_byte = 10;
  TimeNs retransmit_ns = 1 * ns_per_ms;  // after a heal, until what was held up moves again
};

// What lies between two ports.  Faults act here.
struct Path {
  std::array<bool, 2> carrier{true, true};       // of the port of each side
  std::array<bool, 2> black_hole{false, false};  // for what the side sends

  [[nodiscard]] bool cut() const { return !carrier[0] || !carrier[1]; }
  [[nodiscard]] bool blocked(Side from) const { return cut() || black_hole[from]; }
};

struct HandshakeMessage {
  enum class Type : std::uint8_t { hello, challenge, refuse, auth, ready };
  Type type = Type::hello;
  Epoch epoch = 0;        // challenge: the epoch on offer
  Epoch last_fenced = 0;  // hello, challenge: of the sender
};

// What arrives at once: a message of the handshake, or a piece of a frame.
struct Parcel {
  enum class Kind : std::uint8_t { handshake, header, payload, reset };
  Kind kind = Kind::reset;
  HandshakeMessage handshake;
  FrameHeader header{};  // of the frame that it belongs to
  std::vector<std::byte> payload;
  TimeNs due = 0;

  [[nodiscard]] std::uint64_t frame_bytes() const {
    return kind == Kind::header ? sizeof(FrameHeader) : payload.size();
  }
};

class Connection {
 public:
  // Who holds an end.
  class End {
   public:
    virtual ~End() = default;
    virtual void on_parcel(const Parcel& parcel) = 0;
    // The peer's transport has the first `position` bytes of our frames.
    virtual void on_path_acked(std::uint64_t position) = 0;
    // Reset by the peer or by the path; the end is closed already.
    virtual void on_broken() = 0;
  };

  Connection(EventQueue& events, Random& random, const Delays& delays, const Path& path)
      : events_(events), random_(random), delays_(delays), path_(path) {}
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  void attach(Side side, End& end) { ends_[side] = &end; }
  void send(Side from, Parcel parcel);
  void close(Side side);
  void reset(Side first);  // breaks both ends, `first` at once
  void retry();            // the path has healed

  // When the transmitter of this side will have nothing left to send.
  [[nodiscard]] TimeNs free_at(Side side) const { return lanes_[side].free_at; }
  // A chunk of another message is on its way to this slot, and the peer would still read it.
  [[nodiscard]] bool carries_other_message(Side from, const FrameHeader& header) const;

 private:
  struct Lane {
    std::deque<Parcel> parcels;  // on their way, in order
    TimeNs free_at = 0;
    std::uint64_t arrived = 0;  // bytes of frames
    bool arrival_due = false;
    bool ack_due = false;
    bool ack_lost = false;
  };

  void schedule_arrival(Side from);
  void arrive(Side from);
  void schedule_ack(Side from);
  void acknowledge(Side from);
  void break_end(Side side);
  [[nodiscard]] TimeNs latency();

  EventQueue& events_;
  Random& random_;
  const Delays& delays_;
  const Path& path_;
  std::array<Lane, 2> lanes_;  // by the side that sends
  std::array<End*, 2> ends_{};
};

}  // namespace r2ccl::sim
