// The slots of a stream: each in memory of its own, made when it is first used, or all in one block
// that rails reach by themselves.
#pragma once

#include <cstddef>
#include <memory>
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
    if (!memory) memory = std::make_unique_for_overwrite<std::byte[]>(slot_bytes_);
    return memory.get();
  }
  // Null: nothing has used the slot.
  [[nodiscard]] const std::byte* at(std::size_t index) const {
    return base_ != nullptr ? base_ + index * slot_bytes_ : own_[index].get();
  }
  // Null: not in one block.
  [[nodiscard]] std::byte* base() const { return base_; }

 private:
  StreamMemory* const shared_;
  const std::size_t slots_;
  const std::size_t slot_bytes_;
  std::byte* base_ = nullptr;
  std::vector<std::unique_ptr<std::byte[]>> own_;
};

}  // namespace r2ccl
