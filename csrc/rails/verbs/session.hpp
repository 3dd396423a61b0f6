// A verbs session: the queue pair and the memory of one epoch of a verbs rail.  The out ring has
// the frames to send; frames of the peer land in the in ring.
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

// Size of a ring entry in bytes: a header and the largest payload that travels with its header, in
// whole cache lines.
inline constexpr std::uint32_t ring_stride = (sizeof(FrameHeader) + max_eager_bytes + 63) / 64 * 64;
// Number of bounce buffers, of a chunk each.  A chunk in memory without registration is copied to a
// bounce buffer and sent from there.
inline constexpr std::uint32_t bounce_chunks = 8;

// Addresses and key that the peer needs for an epoch.
struct VerbsEndpoint {
  VerbsAddress address;
  std::uint64_t ring_address = 0;  // verbs_ring_frames entries of ring_stride bytes
  std::uint32_t ring_key = 0;
};

// Kinds of work requests.  A request id has the kind in bits 0 and 1 and a number above them.
enum class VerbsRequest : std::uint8_t { frame = 0, credit = 1, receive = 2, marker = 3 };
[[nodiscard]] constexpr std::uint64_t request_id(VerbsRequest kind, std::uint64_t number) {
  return number << 2U | static_cast<std::uint64_t>(kind);
}

class VerbsSession {
 public:
  // `chunk_bytes`: chunk size of the link.
  VerbsSession(std::string device, MemoryPool& pool, std::uint32_t chunk_bytes)
      : device_(std::move(device)), pool_(pool), chunk_bytes_(chunk_bytes) {}
  ~VerbsSession();
  VerbsSession(const VerbsSession&) = delete;
  VerbsSession& operator=(const VerbsSession&) = delete;

  // Allocates memory for the rings and bounce buffers, registered with all devices.
  Status prepare();
  // Like prepare(), but leaves the registration to the caller, on any thread; see to_register().
  Status reserve();
  // Returns the memory to register; empty if already registered.
  [[nodiscard]] std::span<std::byte> to_register() const;
  // Adds the registration of the memory from to_register(); null if none was needed.
  Status attach(const VerbsDevice& device, std::unique_ptr<VerbsMemory> with);

  // Starts the fence of the queue pair, on a detached thread; idempotent.
  void begin_fence(TimeNs now);
  // Returns true once no request of the queue pair touches memory any more.  Either the fence is
  // done, or all memory has been withdrawn from a device that does not finish the fence.
  [[nodiscard]] bool fenced() const { return fence_ == nullptr || fence_->done() || withdrawn(); }
  [[nodiscard]] bool withdrawn() const { return withdrawal_ && withdrawal_->load(); }
  // Distrusts the device if an operation is pending since `since`, and longer than the time limit
  // of 2 s; see MemoryPool::distrust().
  void judge_device(TimeNs since, TimeNs now);
  [[nodiscard]] TimeNs fence_begun() const { return fence_begun_; }

  [[nodiscard]] static VerbsDepth depth();
  [[nodiscard]] VerbsEndpoint endpoint(const VerbsAddress& address) const;

  [[nodiscard]] const std::string& device() const { return device_; }
  [[nodiscard]] MemoryPool& pool() const { return pool_; }
  [[nodiscard]] std::uint32_t local_key() const { return keys_.local; }
  [[nodiscard]] std::byte* in_entry(std::uint64_t frame) const {
    return memory_ + frame % verbs_ring_frames * ring_stride;
  }
  [[nodiscard]] std::byte* out_entry(std::uint64_t frame) const {
    return memory_ + (verbs_ring_frames + frame % verbs_ring_frames) * ring_stride;
  }
  [[nodiscard]] std::byte* bounce(std::size_t index) const {
    return memory_ + std::size_t{2} * verbs_ring_frames * ring_stride + index * chunk_bytes_;
  }
  // Gives the memory up for good, since the device may still reach it.  The pool never uses the
  // memory again.
  void abandon_memory() { memory_ = nullptr; }

  // Queue pair, set by the owner; null before, and once the fence has begun.
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
