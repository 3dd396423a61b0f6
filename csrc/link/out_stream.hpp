// The sending half of (link, communicator, direction): posted bytes, the messages cut from them,
// and for each slot of the receiver whether it may be written again.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/types.hpp"
#include "base/units.hpp"
#include "link/ring.hpp"
#include "link/shape.hpp"
#include "link/stream_block.hpp"

namespace r2ccl {

class InStream;

struct OutMessage {
  std::uint64_t number = 0;
  std::uint64_t end_position = 0;   // stream position after its last byte
  const std::byte* data = nullptr;  // staging or the caller's buffer; null once delivered
  CallTag tag;
  std::uint32_t bytes = 0;
  std::uint32_t unresolved = 0;  // attempts that may still read the source or write the slot
  std::uint32_t unwritten = 0;   // attempts pulled by a rail and not yet handed on in full
  std::uint16_t slot = 0;
  std::uint16_t chunks = 0;
  std::uint16_t next_chunk = 0;  // chunks before it have been posted at least once
  bool staged = false;
  bool ack_now = false;
  bool in_use = false;              // the slot is not credited, or has unresolved attempts
  std::uint64_t replay_queued = 0;  // bit c: chunk c waits in the link's replay queue
  std::array<std::uint8_t, max_chunks_per_message> last_rail{};
  std::array<std::uint8_t, max_chunks_per_message> attempts{};
  // 1 + the rail by which the first attempt went into the receiver's target; 0: it did not.
  std::array<std::uint8_t, max_chunks_per_message> target_rail{};
};

class OutStream {
 public:
  OutStream(const StreamShape& shape, std::uint64_t communicator, StreamMemory* memory);

  // Appends bytes; they are cut into messages of slot_bytes (none: one empty message).
  void post(const std::byte* data, std::uint64_t bytes, const CallTag& tag);

  // Cuts posted bytes into messages while there is credit and a slot that may be written.
  // Returns how many were opened.
  std::size_t open_messages();

  // Cumulative acknowledgements of the receiver.  False: no correct peer sends these numbers.
  [[nodiscard]] bool acknowledge(std::uint64_t delivered, std::uint64_t credit, TimeNs now);

  void attempt_posted(OutMessage& message, std::uint16_t chunk, RailId rail);
  void attempt_resolved(OutMessage& message);

  // Nothing can read the caller's memory of bytes before this stream position.
  [[nodiscard]] std::uint64_t settled_position() const;
  [[nodiscard]] std::uint64_t posted_position() const { return posted_position_; }
  // After the last byte that was posted to be sent from the caller's memory.
  [[nodiscard]] std::uint64_t zero_copy_position() const { return zero_copy_position_; }

  [[nodiscard]] OutMessage& message(std::uint64_t number) { return by_slot_[slot_of(number)]; }
  [[nodiscard]] const OutMessage& message(std::uint64_t number) const {
    return by_slot_[slot_of(number)];
  }
  [[nodiscard]] OutMessage& in_slot(std::uint16_t slot) { return by_slot_[slot]; }

  // The message whose first attempts are not all posted yet, or null.
  [[nodiscard]] OutMessage* posting();
  void advance_posting();

  // Room for the header of a message's first attempt, which no other attempt may use; null: none.
  [[nodiscard]] std::byte* ahead_of(const OutMessage& message) {
    return message.staged && message.bytes > 0 ? staging_.ahead_of(message.slot) : nullptr;
  }

  [[nodiscard]] const StreamBlock& block() const { return staging_; }
  [[nodiscard]] StreamBlock take_block() { return std::move(staging_); }  // and is used no more
  [[nodiscard]] std::uint64_t communicator() const { return communicator_; }
  [[nodiscard]] std::uint64_t delivered() const { return delivered_; }
  [[nodiscard]] std::uint64_t credit() const { return credit_; }
  [[nodiscard]] std::uint64_t next_number() const { return next_number_; }
  [[nodiscard]] bool idle() const { return ops_.empty() && delivered_ == next_number_; }
  [[nodiscard]] bool wants_ack() const {
    return delivered_ < next_number_ || (!ops_.empty() && credit_ < next_number_);
  }
  // Posted bytes wait although the receiver gave credit: every slot is in quarantine.
  [[nodiscard]] bool quarantined() const {
    return !ops_.empty() && next_number_ < credit_ + shape_.slots;
  }

  InStream* reverse = nullptr;      // its acks travel with our data
  TimeNs quarantined_since_ns = 0;  // quarantined() since then; 0: it is not
  TimeNs last_ack_ns = 0;           // when acknowledgements last moved, or were first wanted
  TimeNs ack_request_after = 0;     // current repeat interval of ack requests
  bool queued = false;              // is in the link's list of streams with chunks to post

 private:
  struct Op {
    const std::byte* data;
    std::uint64_t bytes;
    CallTag tag;
    bool staged;
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
  std::uint64_t next_number_ = 0;     // messages opened
  std::uint64_t posting_number_ = 0;  // first message with chunks never posted
  std::uint64_t delivered_ = 0;
  std::uint64_t credit_ = 0;
  std::uint64_t posted_position_ = 0;
  std::uint64_t zero_copy_position_ = 0;
  std::uint64_t opened_position_ = 0;
};

}  // namespace r2ccl
