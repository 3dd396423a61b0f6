// What goes into a link and what comes out of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/errors.hpp"
#include "base/units.hpp"
#include "link/frame.hpp"
#include "link/rail_state.hpp"
#include "link/shape.hpp"
#include "link/verdict.hpp"

namespace r2ccl {

class OutStream;

// Memory that rails reach by themselves.
class StreamMemory {
 public:
  virtual ~StreamMemory() = default;
  virtual std::byte* allocate(std::size_t bytes) = 0;  // null: there is no more
  virtual void release(std::byte* memory) = 0;
  // Callers' memory that every rail may be told to write.
  [[nodiscard]] virtual bool is_registered(std::span<const std::byte> memory) const = 0;
  // The last resort: a rail that cannot be fenced is not to write it any more.
  virtual void revoke(std::span<const std::byte> memory) = 0;
};

struct LinkOptions {
  StreamShape shape;
  StreamMemory* memory = nullptr;  // of a link with rails of one-sided writes; outlives the link
  std::uint32_t small_message_bytes = 32U << 10;
  TimeNs ack_deadline_floor_ns = 20 * ns_per_ms;
  double ack_deadline_factor = 8.0;
  TimeNs dead_deadline_ns = 500 * ns_per_ms;
  TimeNs probe_interval_ns = 200 * ns_per_ms;
  TimeNs probation_timeout_ns = 3000 * ns_per_ms;
  TimeNs rejoin_backoff_min_ns = 50 * ns_per_ms;
  TimeNs rejoin_backoff_max_ns = 5000 * ns_per_ms;
  double flap_half_life_s = 30.0;
  bool fallback = true;  // control rails carry data when nothing else is left
  bool connects = true;  // this end opens connections; the other one, of the lower id, accepts
};

// One step of the state machine, as the trace and the journal see it.
enum class LinkStep : std::uint8_t {
  frame_sent,
  frame_received,
  path_acked,
  rail_moved,
  replay_queued,
  hedge_queued,
  rail_closed,
};

// A frame for a rail to carry.  The payload is read until the rail reports it written.
struct OutFrame {
  FrameHeader header;
  const std::byte* payload = nullptr;
  bool zero_copy = false;            // the payload is a caller's memory
  std::byte* ahead = nullptr;        // room for the header right before the payload; null: none
  std::uint64_t remote_address = 0;  // data, over a rail of one-sided writes: where it goes
  std::uint32_t remote_key = 0;
  OutStream* stream = nullptr;  // data frames; for the link's own use while the frame is made
};

class LinkObserver {
 public:
  virtual ~LinkObserver() = default;
  virtual void on_step(LinkStep /*step*/, RailId /*rail*/) {}
  virtual void on_frame_sent(RailId /*rail*/, const OutFrame& /*frame*/) {}
  virtual void on_rail_moved(RailId rail, RailState from, RailState to, RailCause cause) = 0;
  virtual void on_replay(RailId rail, std::uint32_t chunks, bool hedge) = 0;
  // Where the fault is that its epoch ended by.
  virtual void on_located(RailId /*rail*/, Verdict /*verdict*/) {}
  // It takes far fewer bytes per second than another rail of the link; or does so no more, with 0
  // bytes per second if it went down.
  virtual void on_slow(RailId /*rail*/, bool /*slow*/, double /*bytes_per_s*/) {}
};

struct LinkAction {
  enum class Kind : std::uint8_t { close, connect };
  Kind kind;
  RailId rail;
  Epoch epoch;    // close: the epoch that ended
  TimeNs at = 0;  // connect: not before this time
};

struct AbortNotice {
  std::uint64_t communicator;
  ErrorCode code;
  std::string text;
};

// Where the peer's end of a rail is now, and the rail that said so.
struct AddressNotice {
  RailId rail;
  RailId via;
  Endpoint at;
};

struct RailCounters {
  std::uint64_t tx_bytes = 0;
  std::uint64_t rx_bytes = 0;
  std::uint64_t data_tx_bytes = 0;
  std::uint64_t replayed_chunks = 0;  // chunks taken over from this rail
  std::uint64_t hedged_chunks = 0;    // of these, while the rail was only suspected
  std::uint64_t epochs = 0;
  TimeNs last_tx_ns = 0;
};

}  // namespace r2ccl
