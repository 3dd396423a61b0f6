// Memory of a link end that the peer's port may write.  Each region in use has a key.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <span>

#include "link/link_types.hpp"

namespace r2ccl::sim {

// Content of memory never written, and of memory not to be read any more.
inline constexpr std::byte garbage{0x5A};

class Memory final : public StreamMemory {
 public:
  std::byte* allocate(std::size_t bytes) override {
    auto block = std::make_unique_for_overwrite<std::byte[]>(bytes);
    std::byte* const at = block.get();
    regions_.emplace(at, Region{std::move(block), bytes, ++last_key_});
    return at;
  }
  void release(std::byte* memory) override { regions_.erase(memory); }

  // Adds memory of a caller.
  void add(std::span<const std::byte> memory) {
    if (!memory.empty()) regions_[memory.data()] = {nullptr, memory.size(), ++last_key_};
  }
  void remove(std::span<const std::byte> memory) { regions_.erase(memory.data()); }
  [[nodiscard]] bool is_registered(std::span<const std::byte> memory) const override {
    return key(memory.data(), memory.size()) != 0;
  }
  void revoke(std::span<const std::byte> memory) override {
    revoked_.insert(key(memory.data(), memory.size()));
  }

  // Returns the key needed by the peer to write to the range; 0 = no access.
  [[nodiscard]] std::uint32_t key(const std::byte* at, std::size_t bytes) const {
    auto region = regions_.upper_bound(at);
    if (region == regions_.begin()) return 0;
    --region;
    return at + bytes <= region->first + region->second.bytes ? region->second.key : 0;
  }
  [[nodiscard]] bool is_revoked(std::uint32_t key) const { return revoked_.contains(key); }
  [[nodiscard]] std::size_t regions() const { return regions_.size(); }

 private:
  struct Region {
    std::unique_ptr<std::byte[]> memory;  // null: memory of a caller
    std::size_t bytes;
    std::uint32_t key;
  };
  std::map<const std::byte*, Region> regions_;
  std::set<std::uint32_t> revoked_;
  std::uint32_t last_key_ = 0;
};

}  // namespace r2ccl::sim
