// The sending half of a stream (link, communicator, direction).  OutStream cuts posted bytes into
// messages and tracks which slots of the receiver may be written again.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/types.hpp"
#include "base/units.hpp"
#include "link/frame.hpp"
#include "link/ring.hpp"
#include "link/shape.hpp"
#include "link/stream_block.hpp"

namespace r2ccl {

class InStream;

// A message in a slot of the receiver, until the slot may be reused.
struct OutMessage {
  std::uint64_t number = 0;
  std::uint64_t end_position = 0;   // stream position after the last byte
  const std::byte* data = nullptr;  // staging or the caller's buffer; null once delivered
  CallTag tag;
  std::uint32_t bytes = 0;
  std::uint32_t unresolved = 0;  // attempts with possible access to source or slot
  TimeNs resolved_at = 0;        // latest path ack of an attempt since the last attempt
  std::uint32_t unwritten = 0;   // attempts not handed to the transport in full
  std::uint16_t slot = 0;
  std::uint16_t chunks = 0;
  std::uint16_t next_chunk = 0;  // the first chunk never posted
  bool staged = false;
  bool ack_now = false;
  bool in_use = false;              // no credit for the slot, or unresolved attempts
  std::uint8_t copies = 1;          // rails to send the message to at once; every_rail: all
  std::uint64_t replay_queued = 0;  // bit c: chunk c waits in the link's replay queue
  std::uint64_t carriers = 0;       // copied message: bit r: rail r, not DOWN since, carries a copy
  // Per chunk: the rail of the last attempt; the number of attempts (at most 255); and 1 + the rail
  // of the first attempt, if written to the receiver's target, else 0.
  std::array<std::uint8_t, max_chunks_per_message> last_rail{};
  std::array<std::uint8_t, max_chunks_per_message> attempts{};
  std::array<std::uint8_t, max_chunks_per_message> target_rail{};
};

class OutStream {
 public:
  OutStream(const StreamShape& shape, std::uint64_t communicator, StreamMemory* memory);

  // Appends bytes, to be cut into messages of slot_bytes.  Zero bytes make a single empty message.
  // Bytes of sends up to staging_bytes are copied once their message opens; rails read longer sends
  // from `data`.  `copies`: rails to send the message to at once; only messages in a single staged
  // chunk are copied.
  void post(const std::byte* data, std::uint64_t bytes, const CallTag& tag,
            std::uint8_t copies = 1);

  // Cuts posted bytes into messages while credit and a free slot are available.  Returns the number
  // of opened messages.
  std::size_t open_messages();

  // Applies cumulative acknowledgements of the receiver.  Returns false for impossible values.
  [[nodiscard]] bool acknowledge(std::uint64_t delivered, std::uint64_t credit, TimeNs now);

  void attempt_posted(OutMessage& message, std::uint16_t chunk, RailId rail);
  // `acknowledged_at`: time of the path ack; 0: a fence has ended the attempt.
  void attempt_resolved(OutMessage& message, RailId rail, TimeNs acknowledged_at);

  // Returns the stream position up to which all bytes are delivered or copied; with resilience off,
  // handed to the transport.  A rail may still read a delivered chunk for another attempt: see
  // Rail::detach().
  [[nodiscard]] std::uint64_t settled_position() const;
  [[nodiscard]] std::uint64_t posted_position() const { return posted_position_; }
  // Returns the stream position after the last zero-copy byte (sent from the caller's memory).
  [[nodiscard]] std::uint64_t zero_copy_position() const { return zero_copy_position_; }

  [[nodiscard]] OutMessage& message(std::uint64_t number) { return by_slot_[slot_of(number)]; }
  [[nodiscard]] const OutMessage& message(std::uint64_t number) const {
    return by_slot_[slot_of(number)];
  }
  [[nodiscard]] OutMessage& in_slot(std::uint16_t slot) { return by_slot_[slot]; }

  // Returns the first message with unposted chunks, or null.
  [[nodiscard]] OutMessage* posting();
  void advance_posting();

  // Returns room for a header directly before a staged message.  Only the first attempt may use the
  // room.  Null: no room.
  [[nodiscard]] std::byte* ahead_of(const OutMessage& message) {
    return message.staged && message.bytes > 0 ? staging_.ahead_of(message.slot) : nullptr;
  }

  [[nodiscard]] const StreamBlock& block() const { return staging_; }
  // Moves the staging memory out; the stream must not be used afterwards.
  [[nodiscard]] StreamBlock take_block() { return std::move(staging_); }
  [[nodiscard]] std::uint64_t communicator() const { return communicator_; }
  [[nodiscard]] std::uint64_t delivered() const { return delivered_; }
  [[nodiscard]] std::uint64_t credit() const { return credit_; }
  [[nodiscard]] std::uint64_t next_number() const { return next_number_; }
  // Returns true if nothing was posted after the first `messages` messages.
  [[nodiscard]] bool posted_only(std::uint64_t messages) const {
    return ops_.empty() && next_number_ == messages;
  }
  [[nodiscard]] bool idle() const { return ops_.empty() && delivered_ == next_number_; }
  // Returns true if a message posted now opens at once.
  [[nodiscard]] bool has_room() const {
    std::uint16_t slot = 0;
    return ops_.empty() && next_number_ < credit_ + shape_.slots && free_slot(next_number_, slot);
  }
  // Returns true if a message posted now must wait for a slot in quarantine.
  [[nodiscard]] bool lacks_slot() const {
    std::uint16_t slot = 0;
    return next_number_ < credit_ + shape_.slots && !free_slot(next_number_, slot);
  }
  // Returns the limit of unresolved copies on each of `rails` rails.  A silent rail keeps the slots
  // of its copies until the fence.  All rails but one may fall silent, and together keep no more
  // than the spare slots.
  [[nodiscard]] std::size_t copies_per_rail(std::size_t rails) const {
    return shape_.spare_slots / std::max<std::size_t>(1, rails - 1);
  }
  [[nodiscard]] bool may_copy_to(RailId rail, std::size_t rails) const {
    return copied_on_[rail] < copies_per_rail(rails);
  }
  [[nodiscard]] const StreamShape& shape() const { return shape_; }
  // Returns true if a delivery ack is missing, or credit for bytes that wait.
  [[nodiscard]] bool wants_ack() const {
    return delivered_ < next_number_ || (!ops_.empty() && credit_ < next_number_);
  }
  // Returns true if bytes before `position` wait until the receiver consumes a message.
  [[nodiscard]] bool waits_for_credit(std::uint64_t position) const {
    return !ops_.empty() && opened_position_ < position && next_number_ >= credit_ + shape_.slots;
  }
  // Returns true if posted bytes wait despite credit, because the slots are in quarantine.
  [[nodiscard]] bool quarantined() const {
    return !ops_.empty() && next_number_ < credit_ + shape_.slots;
  }

  InStream* reverse = nullptr;           // our data frames carry its acks
  TimeNs quarantined_since_ns = 0;       // start of quarantined(); 0: not quarantined
  TimeNs last_ack_ns = 0;                // last progress of acks, or start of the wait
  TimeNs usual_ack_ns = 0;               // recent mean of the wait for a delivery ack
  TimeNs ack_requested_ns = 0;           // time of the last ack request; 0: none
  TimeNs ack_request_after = 0;          // current interval of ack requests
  bool queued = false;                   // in the link's list of streams with unposted chunks
  std::optional<StreamWait> peers_wait;  // last wait for a message of this stream, as told

 private:
  struct Op {
    const std::byte* data;
    std::uint64_t bytes;
    CallTag tag;
    bool staged;
    std::uint8_t copies;
  };

  [[nodiscard]] std::uint16_t slot_of(std::uint64_t number) const {
    return slot_ring_[number % shape_.slots];
  }
  [[nodiscard]] bool free_slot(std::uint64_t number, std::uint16_t& slot) const;
  void release_if_done(OutMessage& message);

  const StreamShape shape_;
  const std::uint64_t communicator_;
  Ring<Op> ops_;
  std::vector<OutMessage> by_slot_;
  std::vector<std::uint16_t> slot_ring_;  // message number mod slots -> slot
  StreamBlock staging_;
  std::array<std::uint16_t, max_rails_per_link> copied_on_{};  // unresolved attempts of copies
  std::uint64_t next_number_ = 0;                              // number of opened messages
  std::uint64_t posting_number_ = 0;                           // first message with unposted chunks
  std::uint64_t delivered_ = 0;
  std::uint64_t credit_ = 0;
  std::uint64_t posted_position_ = 0;
  std::uint64_t zero_copy_position_ = 0;
  std::uint64_t opened_position_ = 0;
};

}  // namespace r2ccl
