// Memory of one end of a simulated link that the peer's port may write: only what is in use.
#pragma once

#include <cstddef>
#include <map>
#include <memory>

#include "link/link_types.hpp"

namespace r2ccl::sim {

class Memory final : public StreamMemory {
 public:
  std::byte* allocate(std::size_t bytes) override {
    auto block = std::make_unique_for_overwrite<std::byte[]>(bytes);
    std::byte* const at = block.get();
    blocks_.emplace(at, Block{std::move(block), bytes});
    return at;
  }
  void release(std::byte* memory) override { blocks_.erase(memory); }

  [[nodiscard]] bool holds(const std::byte* at, std::size_t bytes) const {
    auto block = blocks_.upper_bound(at);
    if (block == blocks_.begin()) return false;
    --block;
    return at + bytes <= block->first + block->second.bytes;
  }
  [[nodiscard]] std::size_t blocks() const { return blocks_.size(); }

 private:
  struct Block {
    std::unique_ptr<std::byte[]> memory;
    std::size_t bytes;
  };
  std::map<const std::byte*, Block> blocks_;
};

}  // namespace r2ccl::sim
