// What one epoch of a verbs rail consists of before anything is sent: a queue pair, and rings that
// frames are built in and land in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/errors.hpp"
#include "base/units.hpp"
#include "drivers/verbs.hpp"
#include "link/frame.hpp"
#include "rails/verbs/fence.hpp"
#include "rails/verbs/memory_pool.hpp"

namespace r2ccl {

// Frames that may be on their way in each direction.
inline constexpr std::uint32_t ring_frames = 64;
// Room for a frame with as much payload as travels with its header, in whole cache lines.
inline constexpr std::uint32_t ring_stride = (sizeof(FrameHeader) + max_eager_bytes + 63) / 64 * 64;
// Chunks on their way that had to be copied, since their memory is not registered.
inline constexpr std::uint32_t bounce_chunks = 8;

// What the peer must know of an epoch.
struct VerbsEndpoint {
  VerbsAddress address;
  std::uint64_t ring_address = 0;  // ring_frames entries of ring_stride bytes
  std::uint32_t ring_key = 0;
};

// Work request ids: a kind in the lowest bits, a number above them.
enum class VerbsRequest : std::uint8_t { frame = 0, credit = 1, receive = 2, marker = 3 };
[[nodiscard]] constexpr std::uint64_t request_id(VerbsRequest kind, std::uint64_t number) {
  return number << 2U | static_cast<std::uint64_t>(kind);
}

class VerbsSession {
 public:
  // `chunk_bytes`: of the link.
  VerbsSession(std::string device, MemoryPool& pool, std::uint32_t chunk_bytes)
      : device_(std::move(device)), pool_(pool), chunk_bytes_(chunk_bytes) {}
  ~VerbsSession();
  VerbsSession(const VerbsSession&) = delete;
  VerbsSession& operator=(const VerbsSession&) = delete;

  // Takes memory for the rings, registered with all devices.
  Status prepare();
  // The same without registering it, which the thread may do that makes the queue pair.
  Status reserve();
  [[nodiscard]] std::span<std::byte> to_register() const;  // empty: it is
  // Takes what to_register() was registered with.
  Status attach(const VerbsDevice& device, std::unique_ptr<VerbsMemory> with);

  // Ends the queue pair, on a thread; idempotent.
  void begin_fence(TimeNs now);
  // Nothing that the queue pair was asked for touches memory any more: it has ended; or, of a
  // device that does not come to that, all memory has been withdrawn from it.
  [[nodiscard]] bool fenced() const { return fence_ == nullptr || fence_->done() || withdrawn(); }
  [[nodiscard]] bool withdrawn() const { return withdrawal_ && withdrawal_->load(); }
  // Somebody has waited for the device since then: not for ever.
  void judge_device(TimeNs since, TimeNs now);
  [[nodiscard]] TimeNs fence_begun() const { return fence_begun_; }

  [[nodiscard]] static VerbsDepth depth();
  [[nodiscard]] VerbsEndpoint endpoint(const VerbsAddress& address) const;

  [[nodiscard]] const std::string& device() const { return device_; }
  [[nodiscard]] MemoryPool& pool() const { return pool_; }
  [[nodiscard]] std::uint32_t local_key() const { return keys_.local; }
  [[nodiscard]] std::byte* in_entry(std::uint64_t frame) const {
    return memory_ + frame % ring_frames * ring_stride;
  }
  [[nodiscard]] std::byte* out_entry(std::uint64_t frame) const {
    return memory_ + (ring_frames + frame % ring_frames) * ring_stride;
  }
  [[nodiscard]] std::byte* bounce(std::size_t index) const {
    return memory_ + std::size_t{2} * ring_frames * ring_stride + index * chunk_bytes_;
  }
  // The device may still reach the memory: it is never used for anything else.
  void abandon_memory() { memory_ = nullptr; }

  // Gone once its fence has begun.
  std::unique_ptr<VerbsQueuePair> pair;
  VerbsAddress own;
  VerbsEndpoint peer;

 private:
  [[nodiscard]] std::size_t bytes() const;
  Status take_keys();

  const std::string device_;
  MemoryPool& pool_;
  const std::uint32_t chunk_bytes_;
  std::shared_ptr<VerbsFence> fence_;
  TimeNs fence_begun_ = 0;
  MemoryPool::Withdrawal withdrawal_;
  std::byte* memory_ = nullptr;  // in ring, out ring, bounce buffers
  MemoryPool::Keys keys_;
};

}  // namespace r2ccl
