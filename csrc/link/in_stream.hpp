// The receiving half of a stream (link, communicator, direction).  InStream places chunks in slots
// or in a target, counts each chunk once, and tracks due delivery acks and credit.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/units.hpp"
#include "link/frame.hpp"
#include "link/shape.hpp"
#include "link/stream_block.hpp"

namespace r2ccl {

class OutStream;

// A message being received, or received and not consumed yet.
struct InMessage {
  std::uint64_t number = 0;
  std::uint64_t chunk_bits = 0;  // bit c: chunk c has arrived
  CallTag tag;
  std::uint32_t bytes = 0;
  std::uint32_t received = 0;
  bool in_use = false;
  bool complete = false;
  bool ack_now = false;
  bool replayed = false;        // a replay carried a chunk
  std::byte* target = nullptr;  // destination of the message; null: its slot
};

// Memory of a caller that receives messages directly, instead of slots.  Over verbs rails only the
// first attempt of a chunk is written to the target; every later attempt goes to the slot.
struct Target {
  // A chunk received as a replay, while its first attempt over `rail` may still reach the target.
  struct PendingWrite {
    RailId rail;
    std::uint64_t number;
    std::uint32_t offset;
    friend bool operator==(const PendingWrite&, const PendingWrite&) = default;
  };
  std::byte* memory = nullptr;  // null: no target
  std::uint64_t bytes = 0;
  std::uint64_t first = 0;    // number of the first message
  std::uint64_t offered = 0;  // bit r: announced to the peer on rail r
  std::vector<PendingWrite> pending_writes;
  TimeNs wanted_since = 0;  // first call of Link::reclaim_target(); 0: none
};

// Returns the byte offset of message `number` in a target of `target_bytes` bytes, with `first` as
// the first message.  Empty: the message is outside the target or has an unexpected size.
[[nodiscard]] std::optional<std::uint64_t> offset_in_target(std::uint64_t first,
                                                            std::uint64_t target_bytes,
                                                            std::uint64_t number,
                                                            std::uint32_t message_bytes,
                                                            std::uint32_t slot_bytes);

class InStream {
 public:
  InStream(const StreamShape& shape, std::uint64_t communicator, StreamMemory* memory);

  enum class Admission : std::uint8_t { accept, discard, reject };
  // Checks a data header; the first header of a message occupies the slot.  accept: the chunk is
  // wanted.  discard: a duplicate or late chunk.  reject: a protocol violation.
  [[nodiscard]] Admission judge(const FrameHeader& header);

  // Returns true if the chunk has not arrived yet.
  [[nodiscard]] bool wants(const FrameHeader& header) const;
  // Returns the destination of a chunk after judge().  Null: the chunk has arrived, or its message
  // was consumed.
  [[nodiscard]] std::byte* chunk_memory(const FrameHeader& header);
  // Returns the location of a chunk placed by an RDMA write, in the slot or the target.
  [[nodiscard]] const std::byte* chunk_placed(const FrameHeader& header);
  // Records a first attempt written to the target.  Returns false if the write was not allowed.
  [[nodiscard]] bool put_into_target(RailId rail, const FrameHeader& header);
  // Returns the likely destination of the next message: room for a header, then the start of a free
  // slot.  The size covers the larger of the last two messages, up to max_likely_bytes, and another
  // header.  Empty: no prediction.
  [[nodiscard]] std::span<std::byte> likely_room();
  // Returns the memory of a receive slot; the address never changes.  Null: no slot has this index.
  [[nodiscard]] std::byte* slot_memory(std::uint16_t slot) { return memory_.slot(slot); }
  [[nodiscard]] const StreamBlock& block() const { return memory_; }
  // Moves the slot memory out; the stream must not be used afterwards.
  [[nodiscard]] StreamBlock take_block() { return std::move(memory_); }
  // Counts a complete chunk.  Returns true if the chunk was wanted and completed its message.
  bool chunk_arrived(const FrameHeader& header);

  // Returns the next message to consume, or null if the message is incomplete.
  [[nodiscard]] const InMessage* front() const;
  [[nodiscard]] const std::byte* front_data() const;  // in the slot or the target
  // Frees the slot of the front message; requires front().
  void consume();

  [[nodiscard]] std::uint64_t communicator() const { return communicator_; }
  [[nodiscard]] std::uint64_t delivered() const { return delivered_; }
  [[nodiscard]] std::uint64_t consumed() const { return consumed_; }

  // Return true if an acknowledgement is due: at some time, or immediately.
  [[nodiscard]] bool owes_ack() const { return acked_ != delivered_ || credited_ != consumed_; }
  [[nodiscard]] bool owes_ack_now() const {
    return owed_now_ || consumed_ - credited_ >= shape_.slots / 2U + 1U;
  }
  void ack_sent();
  void owe_again();  // repeats the last ack, perhaps lost with a rail

  OutStream* reverse = nullptr;  // the sending half of the other direction
  TimeNs owed_since_ns = 0;      // 0: no ack is due
  std::uint64_t requested = 0;   // time of the peer's last ack request; our acks repeat the time
  std::uint64_t offered = 0;     // bit r: the peer may write the slots over verbs rail r
  // Last wait for a message of this stream, or for room for the reverse stream, for the peer.
  std::optional<StreamWait> own_wait;
  std::optional<StreamWait> peers_wait;  // last wait of the peer for room here, as told
  Target target;

 private:
  [[nodiscard]] InMessage& at(std::uint64_t number) {
    return by_slot_[slot_ring_[number % shape_.slots]];
  }
  [[nodiscard]] const InMessage& at(std::uint64_t number) const {
    return by_slot_[slot_ring_[number % shape_.slots]];
  }

  // Returns the message's memory in the target.  Null: outside the target.
  [[nodiscard]] std::byte* target_of(std::uint64_t number, std::uint32_t bytes) const;

  const StreamShape shape_;
  const std::uint64_t communicator_;
  std::vector<InMessage> by_slot_;
  std::vector<std::uint16_t> slot_ring_;
  StreamBlock memory_;
  std::uint64_t delivered_ = 0;
  std::uint64_t consumed_ = 0;
  std::uint64_t acked_ = 0;     // delivered_ in the last ack
  std::uint64_t credited_ = 0;  // consumed_ in the last ack
  bool owed_now_ = false;
  std::array<std::uint32_t, 2> last_bytes_{};  // sizes of the last two messages
};

}  // namespace r2ccl
