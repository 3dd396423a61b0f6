// The receiving half of (link, communicator, direction): slots that messages land in, each chunk
// counted once, and what the sender is owed: delivery acks and credit.
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

struct InMessage {
  std::uint64_t number = 0;
  std::uint64_t chunk_bits = 0;  // bit c: chunk c is here
  CallTag tag;
  std::uint32_t bytes = 0;
  std::uint32_t received = 0;
  bool in_use = false;
  bool complete = false;
  bool replayed = false;  // a chunk of it came as a replay
  bool ack_now = false;
  std::byte* target = nullptr;  // where it lies; null: in its slot
};

// Memory of a caller that messages land in as they are, instead of in slots.  Who writes it by
// one-sided writes does so once a chunk, at the first attempt; every other attempt goes to the
// slot.
struct Target {
  // A chunk that came otherwise, whose first attempt may still be written over the rail.
  struct PendingWrite {
    RailId rail;
    std::uint64_t number;
    std::uint32_t offset;
    friend bool operator==(const PendingWrite&, const PendingWrite&) = default;
  };
  std::byte* memory = nullptr;  // null: there is none
  std::uint64_t bytes = 0;
  std::uint64_t first = 0;    // message that begins it
  std::uint64_t offered = 0;  // bit r: the peer may write it over rail r
  std::vector<PendingWrite> pending_writes;
  TimeNs wanted_since = 0;  // back, by its owner; 0: not yet
};

// Where a message lies in a target of so many bytes that begins with message `first`; empty: not in
// it, or cut otherwise.
[[nodiscard]] std::optional<std::uint64_t> offset_in_target(std::uint64_t first,
                                                            std::uint64_t target_bytes,
                                                            std::uint64_t number,
                                                            std::uint32_t message_bytes,
                                                            std::uint32_t slot_bytes);

class InStream {
 public:
  InStream(const StreamShape& shape, std::uint64_t communicator, StreamMemory* memory);

  enum class Admission : std::uint8_t { accept, discard, reject };
  // Judges a data header.  `accept`: the chunk is wanted and its slot is ready.
  [[nodiscard]] Admission judge(const FrameHeader& header);

  // The chunk has not been counted yet.
  [[nodiscard]] bool wants(const FrameHeader& header) const;
  // Where a chunk's bytes go now, or null if it is here already or its message is gone.
  [[nodiscard]] std::byte* chunk_memory(const FrameHeader& header);
  // Where a one-sided write has put a chunk.
  [[nodiscard]] const std::byte* chunk_placed(const FrameHeader& header);
  // A first attempt of a chunk was put into the target.  False: it was not to.
  [[nodiscard]] bool put_into_target(RailId rail, const FrameHeader& header);
  // Where the next message is likely to land: room for a header, its slot, which is free, as far as
  // the last messages filled theirs, and a little more.  Empty: unknown.
  [[nodiscard]] std::span<std::byte> likely_room();
  // The memory of a receive slot, which stays where it is; null: there is no such slot.
  [[nodiscard]] std::byte* slot_memory(std::uint16_t slot) { return memory_.slot(slot); }
  [[nodiscard]] const StreamBlock& block() const { return memory_; }
  [[nodiscard]] StreamBlock take_block() { return std::move(memory_); }  // and is used no more
  // The chunk is here in full.  True if it was wanted and completed its message.
  bool chunk_arrived(const FrameHeader& header);

  // The next message to consume, or null if it is not here in full.
  [[nodiscard]] const InMessage* front() const;
  [[nodiscard]] const std::byte* front_data() const;  // in the slot or in the target
  void consume();

  [[nodiscard]] std::uint64_t communicator() const { return communicator_; }
  [[nodiscard]] std::uint64_t delivered() const { return delivered_; }
  [[nodiscard]] std::uint64_t consumed() const { return consumed_; }

  // Acknowledgements that no frame has carried yet.
  [[nodiscard]] bool owes_ack() const { return acked_ != delivered_ || credited_ != consumed_; }
  [[nodiscard]] bool owes_ack_now() const {
    return owed_now_ || consumed_ - credited_ >= shape_.slots / 2U + 1U;
  }
  void ack_sent();
  void owe_again();  // the last acks may be lost

  OutStream* reverse = nullptr;
  TimeNs owed_since_ns = 0;   // 0: owes nothing
  std::uint64_t offered = 0;  // bit r: over rail r the peer may write the slots by itself
  Target target;

 private:
  [[nodiscard]] InMessage& at(std::uint64_t number) {
    return by_slot_[slot_ring_[number % shape_.slots]];
  }
  [[nodiscard]] const InMessage& at(std::uint64_t number) const {
    return by_slot_[slot_ring_[number % shape_.slots]];
  }

  // Null: the message does not lie in the target.
  [[nodiscard]] std::byte* target_of(std::uint64_t number, std::uint32_t bytes) const;

  const StreamShape shape_;
  const std::uint64_t communicator_;
  std::vector<InMessage> by_slot_;
  std::vector<std::uint16_t> slot_ring_;
  StreamBlock memory_;
  std::uint64_t delivered_ = 0;
  std::uint64_t consumed_ = 0;
  std::uint64_t acked_ = 0;  // values that the last ack carried
  std::uint64_t credited_ = 0;
  bool owed_now_ = false;
  std::array<std::uint32_t, 2> last_bytes_{};  // of the last messages
};

}  // namespace r2ccl
