#include "link/in_stream.hpp"

#include <algorithm>
#include <cassert>

#include "link/mutants.hpp"

namespace r2ccl {

InStream::InStream(const StreamShape& shape, std::uint64_t communicator, StreamMemory* memory)
    : shape_(shape),
      communicator_(communicator),
      by_slot_(shape.all_slots()),
      slot_ring_(shape.slots),
      memory_(memory, shape.all_slots(), shape.slot_bytes),
      delivered_(shape.first_number),
      consumed_(shape.first_number),
      acked_(shape.first_number),
      credited_(shape.first_number) {}

std::optional<std::uint64_t> offset_in_target(std::uint64_t first, std::uint64_t target_bytes,
                                              std::uint64_t number, std::uint32_t message_bytes,
                                              std::uint32_t slot_bytes) {
  if (number < first || number - first > target_bytes / slot_bytes) return std::nullopt;
  const std::uint64_t offset = (number - first) * slot_bytes;
  if (offset >= target_bytes) return std::nullopt;
  if (message_bytes != std::min<std::uint64_t>(slot_bytes, target_bytes - offset))
    return std::nullopt;
  return offset;
}

std::byte* InStream::target_of(std::uint64_t number, std::uint32_t bytes) const {
  if (target.memory == nullptr) return nullptr;
  const auto offset =
      offset_in_target(target.first, target.bytes, number, bytes, shape_.slot_bytes);
  return offset.has_value() ? target.memory + *offset : nullptr;
}

InStream::Admission InStream::judge(const FrameHeader& header) {
  const bool well_formed =
      header.message_bytes <= shape_.slot_bytes && header.slot < shape_.all_slots() &&
      header.offset % shape_.chunk_bytes == 0 &&
      (header.offset < header.message_bytes || (header.offset == 0 && header.message_bytes == 0)) &&
      header.payload_bytes == std::min(shape_.chunk_bytes, header.message_bytes - header.offset);
  if (!well_formed || header.number >= consumed_ + shape_.slots) return Admission::reject;
  const bool again =
      planted(Mutant::copy_not_deduplicated) && communicator_ == streams_communicator;
  if (header.number < consumed_ && !planted(Mutant::generation_ignored) && !again)
    return Admission::discard;

  InMessage& message = by_slot_[header.slot];
  if (!message.in_use) {
    // The slot is free.  A second slot for the same message is a protocol violation.
    InMessage& other = at(header.number);
    if (other.in_use && other.number == header.number) return Admission::reject;
    const std::uint64_t bits = planted(Mutant::bitmap_not_cleared) ? message.chunk_bits : 0;
    message = InMessage{.number = header.number,
                        .chunk_bits = bits,
                        .tag = header.tag,
                        .bytes = header.message_bytes,
                        .in_use = true,
                        .target = target_of(header.number, header.message_bytes)};
    slot_ring_[header.number % shape_.slots] = header.slot;
    last_bytes_ = {header.message_bytes, last_bytes_[0]};
  } else if ((message.number != header.number && !planted(Mutant::generation_ignored)) ||
             message.bytes != header.message_bytes) {
    return Admission::reject;
  }
  if ((header.flags & frame_flag::ack_now) != 0) message.ack_now = true;
  const std::uint64_t bit = std::uint64_t{1} << (header.offset / shape_.chunk_bytes);
  const bool here = (message.chunk_bits & bit) != 0 && !planted(Mutant::duplicate_counted);
  return here ? Admission::discard : Admission::accept;
}

bool InStream::wants(const FrameHeader& header) const {
  if (header.number < consumed_ || header.slot >= shape_.all_slots()) return false;
  const InMessage& message = by_slot_[header.slot];
  const std::uint64_t bit = std::uint64_t{1} << (header.offset / shape_.chunk_bytes);
  return !message.in_use || message.number != header.number || (message.chunk_bits & bit) == 0;
}

// Predicts the next message's slot.  A wrong guess costs only a copy, because a free slot holds no
// data.  No prediction is made for slots open to RDMA writes, with a target, or for messages of
// several chunks, as any chunk may be the first to arrive on a rail.
std::span<std::byte> InStream::likely_room() {
  const std::size_t slot = delivered_ % shape_.slots;
  const std::uint32_t bytes = std::max(last_bytes_[0], last_bytes_[1]);
  if (bytes == 0 || bytes > shape_.chunk_bytes) return {};
  if (by_slot_[slot].in_use || target.memory != nullptr) return {};
  std::byte* const ahead = memory_.ahead_of(slot);
  if (ahead == nullptr) return {};
  // Room for another header, so that a read rarely fills the whole buffer.
  const std::size_t behind = std::min(bytes, max_likely_bytes) + sizeof(FrameHeader);
  return {ahead, sizeof(FrameHeader) + std::min<std::size_t>(behind, shape_.slot_bytes)};
}

std::byte* InStream::chunk_memory(const FrameHeader& header) {
  const InMessage& message = by_slot_[header.slot];
  const std::uint64_t bit = std::uint64_t{1} << (header.offset / shape_.chunk_bytes);
  if (!message.in_use || message.number != header.number || (message.chunk_bits & bit) != 0)
    return nullptr;
  return (message.target != nullptr ? message.target : memory_.slot(header.slot)) + header.offset;
}

const std::byte* InStream::chunk_placed(const FrameHeader& header) {
  const bool in_target = (header.flags & frame_flag::in_target) != 0;
  return (in_target ? target_of(header.number, header.message_bytes) : memory_.slot(header.slot)) +
         header.offset;
}

bool InStream::put_into_target(RailId rail, const FrameHeader& header) {
  if ((header.flags & frame_flag::replay) != 0 && !planted(Mutant::replay_into_target))
    return false;
  std::erase(target.pending_writes, Target::PendingWrite{rail, header.number, header.offset});
  if (header.number < consumed_) return true;
  return (target.offered >> rail & 1U) != 0 &&
         target_of(header.number, header.message_bytes) != nullptr;
}

bool InStream::chunk_arrived(const FrameHeader& header) {
  InMessage& message = by_slot_[header.slot];
  const std::uint64_t bit = std::uint64_t{1} << (header.offset / shape_.chunk_bytes);
  const bool current = message.number == header.number || planted(Mutant::generation_ignored);
  const bool here = (message.chunk_bits & bit) != 0 && !planted(Mutant::duplicate_counted);
  if (!message.in_use || !current || here) return false;
  message.chunk_bits |= bit;
  message.received += header.payload_bytes;
  message.replayed |= (header.flags & frame_flag::replay) != 0;
  if (header.epoch != 0 && (header.flags & frame_flag::replay) != 0) {
    const auto first = static_cast<RailId>(header.epoch - 1);
    if ((target.offered >> first & 1U) != 0)
      target.pending_writes.push_back({first, header.number, header.offset});
  }
  if (message.received < message.bytes) return false;
  message.complete = true;
  if (message.ack_now) owed_now_ = true;
  while (delivered_ < consumed_ + shape_.slots) {
    const InMessage& next = at(delivered_);
    if (!next.in_use || next.number != delivered_ || !next.complete) break;
    ++delivered_;
  }
  return true;
}

const InMessage* InStream::front() const {
  return consumed_ < delivered_ ? &at(consumed_) : nullptr;
}

const std::byte* InStream::front_data() const {
  const InMessage& message = at(consumed_);
  return message.target != nullptr ? message.target
                                   : memory_.at(slot_ring_[consumed_ % shape_.slots]);
}

void InStream::consume() {
  assert(consumed_ < delivered_);
  at(consumed_).in_use = false;
  ++consumed_;
}

void InStream::ack_sent() {
  acked_ = delivered_;
  credited_ = consumed_;
  owed_now_ = false;
  owed_since_ns = 0;
}

void InStream::owe_again() {
  if (delivered_ > 0) owed_now_ = true;
}

}  // namespace r2ccl
