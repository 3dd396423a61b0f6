// Inputs and outputs of a link: options, frames, actions, notices and the observer.
#pragma once

#include <array>
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

// Allocator of memory accessed by RDMA (verbs rails).
class StreamMemory {
 public:
  virtual ~StreamMemory() = default;
  virtual std::byte* allocate(std::size_t bytes) = 0;  // null on failure
  virtual void release(std::byte* memory) = 0;
  // Returns true if `memory` of a caller is registered with the devices of all verbs rails; GPU
  // memory: with at least one device.
  [[nodiscard]] virtual bool is_registered(std::span<const std::byte> memory) const = 0;
  // Withdraws the registration of `memory`: the last resort if a rail cannot be fenced.
  virtual void revoke(std::span<const std::byte> memory) = 0;
};

// Most doublings of the limit for a handshake or probation; see Link::patience().
inline constexpr std::uint32_t most_patience_doublings = 4;

// Longest wait for a silent process, in link timeouts; see Link::unheard().  A stopped process
// (SIGSTOP) keeps its rails, so that no other timeout ends the wait.
inline constexpr TimeNs unheard_timeouts = 10;

// Slots of the communicator of streams, equal at both ends.
struct StreamsShape {
  std::uint32_t slot_bytes = streams_slot_bytes;
  std::uint16_t slots = streams_slots;
  std::uint16_t spare_slots = streams_spare_slots;
  std::uint32_t ack_later_bytes = 16U << 10;  // larger messages ask for a delivery ack at once
};

struct LinkOptions {
  LinkOptions() : LinkOptions(Config()) {}
  explicit LinkOptions(const Config& config);

  StreamShape shape;
  StreamsShape streams;
  Epoch first_epoch;  // all epochs up to here count as fenced; tests begin close to the wrap
  StreamMemory* memory = nullptr;  // only with verbs rails; outlives the link
  std::uint32_t small_message_bytes;
  TimeNs ack_deadline_floor_ns;
  double ack_deadline_factor;
  TimeNs dead_deadline_ns;
  TimeNs probe_interval_ns;
  TimeNs probation_timeout_ns;
  TimeNs rejoin_backoff_min_ns;
  TimeNs rejoin_backoff_max_ns;
  double flap_half_life_s;
  std::size_t most_communicators = r2ccl::most_communicators;
  bool fallback;  // control rails carry data while no data rail is UP
  // Bit r: data rail r is a reserve, which carries data only while no other data rail is UP.
  std::uint64_t reserves = 0;
  // Rails with an equal unit above 0 share fate: the loss of a rail endangers the others.
  std::array<std::uint8_t, max_rails_per_link> units{};
  // The nearest of similarly fast rails carries small messages.  Equal at both ends.
  std::array<std::uint8_t, max_rails_per_link> distances{};
  TimeNs shared_fate_ns = 5000 * ns_per_ms;  // how long a loss endangers the rails of its unit
  bool posted = false;                       // posted receives; equal at both ends
  std::uint32_t put_bytes = max_put_bytes;   // largest payload of a frame of a posted message
  bool connects = true;  // this end connects; the end with the lower process number accepts

  // Returns the shape of a communicator's streams.
  [[nodiscard]] StreamShape shape_of(std::uint64_t communicator) const;
};

// A step of the state machine, as reported to the observer (trace of the simulator).
enum class LinkStep : std::uint8_t {
  frame_sent,
  frame_received,
  path_acked,
  rail_moved,
  replay_queued,
  hedge_queued,
  rail_closed,
};

// Memory of the peer for RDMA writes: its slots and the target of a call.
struct RemoteSlots {
  std::uint64_t address;
  std::uint32_t key;
  // The target of the peer's caller; target_first is the number of its first message.
  std::uint64_t target_first = 0;
  std::uint64_t target_bytes = 0;
  std::uint64_t target_address = 0;
  std::uint32_t target_key = 0;
};

// A frame to send.  The rail may read the payload until frame_written().
struct OutFrame {
  FrameHeader header;
  const std::byte* payload = nullptr;
  bool zero_copy = false;            // the payload is a caller's memory
  std::byte* ahead = nullptr;        // room for the header directly before the payload; or null
  std::uint64_t remote_address = 0;  // destination of an RDMA write; verbs rails, data only
  std::uint32_t remote_key = 0;
  OutStream* stream = nullptr;  // data frames; internal to Link during next_frame()
};

// Callbacks for events of a link.
class LinkObserver {
 public:
  virtual ~LinkObserver() = default;
  virtual void on_step(LinkStep /*step*/, RailId /*rail*/) {}
  virtual void on_frame_sent(RailId /*rail*/, const OutFrame& /*frame*/) {}
  virtual void on_rail_moved(RailId rail, RailState from, RailState to, RailCause cause) = 0;
  virtual void on_replay(RailId rail, std::uint32_t chunks, bool hedge) = 0;
  // Location of the fault that ended the rail's epoch.
  virtual void on_located(RailId /*rail*/, Verdict /*verdict*/) {}
  // The peer reports that a test or drill caused the fault that ended the rail's epoch.
  virtual void on_injected(RailId /*rail*/) {}
  // The peer announces the begin or the end of a drill of this kind.
  virtual void on_drill(RailId /*rail*/, std::uint8_t /*kind*/, bool /*ends*/) {}
  // The rail became slow (far fewer bytes/s than the fastest rail of the link) or is no longer
  // slow.  A slow rail that goes DOWN is reported as no longer slow, with a rate of 0.
  virtual void on_slow(RailId /*rail*/, bool /*slow*/, double /*bytes_per_s*/) {}
};

// A request to the owner: close the transport of an epoch, or connect a rail.
struct LinkAction {
  enum class Kind : std::uint8_t { close, connect };
  Kind kind;
  RailId rail;
  Epoch epoch;    // close: the ended epoch
  TimeNs at = 0;  // connect: earliest time
};

struct AbortNotice {
  std::uint64_t communicator;
  ErrorCode code;
  std::string text;  // cut to max_abort_bytes when sent
};

// New address of the peer's end of a rail; `via` is the rail of the announcement.
struct AddressNotice {
  RailId rail;
  RailId via;
  Endpoint at;
};

struct RailCounters {
  std::uint64_t tx_bytes = 0;
  std::uint64_t rx_bytes = 0;
  std::uint64_t data_tx_bytes = 0;
  std::uint64_t replayed_chunks = 0;  // chunks of this rail replayed on other rails
  std::uint64_t hedged_chunks = 0;    // replayed chunks posted as hedges
  std::uint64_t withheld_chunks = 0;  // chunks hedged because a hop withheld acknowledged bytes
  std::uint64_t copies = 0;           // copies of messages sent to several rails at once
  std::uint64_t epochs = 0;           // number of established epochs
  TimeNs last_tx_ns = 0;              // send time of the last data frame; 0: none
};

// Queue lengths of a link, summed over all rails.
struct QueueDepths {
  std::size_t streams = 0;
  std::size_t replays = 0;
  std::size_t attempts = 0;
  std::size_t control = 0;
  std::size_t actions = 0;
  std::size_t deferred_frees = 0;
  std::size_t refusals = 0;
  std::size_t aborts = 0;
  std::size_t copies = 0;
  std::size_t posted = 0;  // frames of posted receives
};

}  // namespace r2ccl
