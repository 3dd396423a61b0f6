// Memory of a stream's slots.  Slots are either separate allocations, made on first use, or parts
// of a single block accessible to verbs rails.  A separate slot has room for a frame header
// directly before the slot, so header and payload can be sent or received together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "link/link_types.hpp"

namespace r2ccl {

class StreamBlock {
 public:
  // Allocates a single block from `shared`.  Slots are separate if `shared` is null, has no memory,
  // or slot_bytes is 0.
  StreamBlock(StreamMemory* shared, std::size_t slots, std::size_t slot_bytes)
      : shared_(shared), slots_(slots), slot_bytes_(slot_bytes) {
    if (shared_ != nullptr && slot_bytes_ > 0) base_ = shared_->allocate(slots * slot_bytes);
    if (base_ == nullptr) own_.resize(slots);
  }
  ~StreamBlock() {
    if (base_ != nullptr) shared_->release(base_);
  }
  StreamBlock(StreamBlock&& other) noexcept
      : shared_(other.shared_),
        slots_(other.slots_),
        slot_bytes_(other.slot_bytes_),
        base_(std::exchange(other.base_, nullptr)),
        own_(std::move(other.own_)) {}
  StreamBlock(const StreamBlock&) = delete;
  StreamBlock& operator=(const StreamBlock&) = delete;
  StreamBlock& operator=(StreamBlock&&) = delete;

  // Returns the memory of a slot; allocates a separate slot on first use.  Null: invalid index.
  [[nodiscard]] std::byte* slot(std::size_t index) {
    if (index >= slots_) return nullptr;
    if (base_ != nullptr) return base_ + index * slot_bytes_;
    auto& memory = own_[index];
    if (!memory) memory = make();
    return memory.get() + headroom;
  }
  // Returns the room for a header directly before the slot.  Null: slots are in a single block.
  [[nodiscard]] std::byte* ahead_of(std::size_t index) {
    return base_ != nullptr ? nullptr : slot(index) - sizeof(FrameHeader);
  }
  // Returns the memory of a used slot.  Null: the slot was never used.
  [[nodiscard]] const std::byte* at(std::size_t index) const {
    if (base_ != nullptr) return base_ + index * slot_bytes_;
    return own_[index] == nullptr ? nullptr : own_[index].get() + headroom;
  }
  // Returns the single block.  Null: slots are separate allocations.
  [[nodiscard]] std::byte* base() const { return base_; }

 private:
  static constexpr std::size_t alignment = 64;  // a cache line
  static constexpr std::size_t headroom = 128;
  static_assert(headroom % alignment == 0 && headroom >= sizeof(FrameHeader));

  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  using Memory = std::unique_ptr<std::byte[], Free>;

  [[nodiscard]] Memory make() const {
    const std::size_t bytes = (headroom + slot_bytes_ + alignment - 1) / alignment * alignment;
    Memory memory(static_cast<std::byte*>(std::aligned_alloc(alignment, bytes)));
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
  }

  StreamMemory* const shared_;
  const std::size_t slots_;
  const std::size_t slot_bytes_;
  std::byte* base_ = nullptr;
  std::vector<Memory> own_;
};

// Memory of closed streams, kept until no rail can access the blocks.
struct DeferredFree {
  std::uint64_t communicator = 0;
  std::uint64_t written_by = 0;  // bit r: the peer may write over rail r
  // Rails with reads in flight; the reads of a rail end with the path ack of the position.
  std::vector<std::pair<RailId, std::uint64_t>> read_by{};
  std::optional<StreamBlock> in{};
  std::optional<StreamBlock> out{};
};

}  // namespace r2ccl
