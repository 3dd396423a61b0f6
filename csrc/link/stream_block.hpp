// The slots of a stream: each in memory of its own, made when it is first used, or all in one block
// that rails reach by themselves.  Memory of its own has room for a frame's header right before the
// slot, so that a byte stream carries both at once.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "link/link_types.hpp"

namespace r2ccl {

class StreamBlock {
 public:
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

  // Null: there is no such slot.
  [[nodiscard]] std::byte* slot(std::size_t index) {
    if (index >= slots_) return nullptr;
    if (base_ != nullptr) return base_ + index * slot_bytes_;
    auto& memory = own_[index];
    if (!memory) memory = make();
    return memory.get() + headroom;
  }
  // Where a header goes that is to lie right before the slot.  Null: there is no room.
  [[nodiscard]] std::byte* ahead_of(std::size_t index) {
    return base_ != nullptr ? nullptr : slot(index) - sizeof(FrameHeader);
  }
  // Null: nothing has used the slot.
  [[nodiscard]] const std::byte* at(std::size_t index) const {
    if (base_ != nullptr) return base_ + index * slot_bytes_;
    return own_[index] == nullptr ? nullptr : own_[index].get() + headroom;
  }
  // Null: not in one block.
  [[nodiscard]] std::byte* base() const { return base_; }

 private:
  static constexpr std::size_t alignment = 64;  // of slots: a cache line
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

}  // namespace r2ccl
