#include "link/out_stream.hpp"

#include <algorithm>
#include <cassert>

#include "link/device_memory.hpp"
#include "link/mutants.hpp"

namespace r2ccl {

OutStream::OutStream(const StreamShape& shape, std::uint64_t communicator, StreamMemory* memory)
    : shape_(shape),
      communicator_(communicator),
      by_slot_(shape.all_slots()),
      slot_ring_(shape.slots),
      staging_(shape.resilience ? memory : nullptr, shape.all_slots(),
               std::min(shape.staging_bytes, shape.slot_bytes)),
      next_number_(shape.first_number),
      posting_number_(shape.first_number),
      delivered_(shape.first_number),
      credit_(shape.first_number) {}

void OutStream::post(const std::byte* data, std::uint64_t bytes, const CallTag& tag,
                     std::uint8_t copies) {
  const bool staged = shape_.resilience && bytes <= shape_.staging_bytes && !is_device_memory(data);
  const bool copied = staged && bytes <= std::min(shape_.chunk_bytes, shape_.slot_bytes);
  ops_.push_back({data, bytes, tag, staged, copied ? copies : std::uint8_t{1}});
  posted_position_ += bytes;
  if (!staged) zero_copy_position_ = posted_position_;
}

bool OutStream::free_slot(std::uint64_t number, std::uint16_t& slot) const {
  slot = static_cast<std::uint16_t>(number % shape_.slots);
  if (!by_slot_[slot].in_use) return true;
  // An unresolved attempt may still write the message's own slot (quarantine): use a spare slot.
  for (slot = shape_.slots; slot < shape_.all_slots(); ++slot)
    if (!by_slot_[slot].in_use) return true;
  return false;
}

std::size_t OutStream::open_messages() {
  std::size_t opened = 0;
  std::uint16_t slot = 0;
  while (!ops_.empty() && next_number_ < credit_ + shape_.slots && free_slot(next_number_, slot)) {
    Op& op = ops_.front();
    OutMessage& message = by_slot_[slot];
    const auto bytes =
        static_cast<std::uint32_t>(std::min<std::uint64_t>(op.bytes, shape_.slot_bytes));
    message.number = next_number_;
    message.data = op.data;
    message.tag = op.tag;
    message.bytes = bytes;
    message.unresolved = 0;
    message.unwritten = 0;
    message.slot = slot;
    message.chunks = static_cast<std::uint16_t>(
        std::max<std::uint32_t>(1, (bytes + shape_.chunk_bytes - 1) / shape_.chunk_bytes));
    message.next_chunk = 0;
    message.staged = op.staged;
    message.ack_now = shape_.resilience && (!op.staged || bytes > shape_.ack_later_bytes);
    message.in_use = true;
    message.copies = op.copies;
    message.carriers = 0;
    message.replay_queued = 0;
    message.attempts.fill(0);
    if (op.staged && bytes > 0) {
      std::byte* const staging = staging_.slot(slot);
      copy_bytes(staging, op.data, bytes);
      message.data = staging;
    }
    slot_ring_[next_number_ % shape_.slots] = slot;
    opened_position_ += bytes;
    message.end_position = opened_position_;
    ++next_number_;
    ++opened;
    op.data += bytes;
    op.bytes -= bytes;
    if (op.bytes == 0) ops_.pop_front();
  }
  return opened;
}

bool OutStream::acknowledge(std::uint64_t delivered, std::uint64_t credit, TimeNs now) {
  // A message cannot be delivered before all of its chunks are posted.
  if (delivered > posting_number_ || credit > delivered) return false;
  if (delivered <= delivered_ && credit <= credit_) return true;
  // A single late ack counts little; several in a row are usual, as on a host short of CPU time.
  if (delivered > delivered_) {
    const TimeNs took = std::min(now - last_ack_ns, 2 * usual_ack_ns + ns_per_ms);
    usual_ack_ns = (3 * usual_ack_ns + took) / 4;
  }
  last_ack_ns = now;
  ack_request_after = 0;
  for (; delivered_ < delivered; ++delivered_) message(delivered_).data = nullptr;
  while (credit_ < credit) {
    OutMessage& done = message(credit_);
    ++credit_;
    release_if_done(done);
  }
  return true;
}

void OutStream::attempt_posted(OutMessage& message, std::uint16_t chunk, RailId rail) {
  ++message.unresolved;
  ++message.unwritten;
  message.resolved_at = 0;
  message.last_rail[chunk] = static_cast<std::uint8_t>(rail);
  if (message.attempts[chunk] < 255) ++message.attempts[chunk];
  if (chunk == message.next_chunk) ++message.next_chunk;
  if (message.copies == 1) return;
  message.carriers |= std::uint64_t{1} << rail;
  ++copied_on_[rail];
}

void OutStream::attempt_resolved(OutMessage& message, RailId rail, TimeNs acknowledged_at) {
  assert(message.unresolved > 0);
  --message.unresolved;
  if (message.copies != 1 && copied_on_[rail] > 0) --copied_on_[rail];
  message.resolved_at = std::max(message.resolved_at, acknowledged_at);
  release_if_done(message);
}

void OutStream::release_if_done(OutMessage& message) {
  const bool resolved = message.unresolved == 0 || planted(Mutant::reuse_without_fence);
  if (message.number < credit_ && resolved) message.in_use = false;
}

OutMessage* OutStream::posting() {
  return posting_number_ < next_number_ ? &message(posting_number_) : nullptr;
}

void OutStream::advance_posting() {
  while (posting_number_ < next_number_) {
    const OutMessage& current = message(posting_number_);
    if (current.next_chunk < current.chunks) return;
    ++posting_number_;
  }
}

std::uint64_t OutStream::settled_position() const {
  // Delivered messages are settled.  Staged messages are settled, because their bytes were copied.
  // With resilience off, messages handed to the transport in full are settled, too.
  std::uint64_t position = opened_position_;
  for (std::uint64_t number = delivered_; number < next_number_; ++number) {
    const OutMessage& open = message(number);
    const bool keeps_nothing = !shape_.resilience || planted(Mutant::source_freed_early);
    const bool handed_on = keeps_nothing && open.next_chunk == open.chunks &&
                           (open.unwritten == 0 || planted(Mutant::source_freed_early));
    if (!open.staged && !handed_on) {
      position = open.end_position - open.bytes;
      break;
    }
  }
  return position;
}

}  // namespace r2ccl
