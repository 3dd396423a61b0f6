// Memory that every RDMA device of the process may read and its peers write: slots, staging, rings,
// buffers of callers that asked for it, and memory of GPUs.  Not for concurrent use.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/errors.hpp"
#include "base/file_descriptor.hpp"
#include "drivers/verbs.hpp"
#include "link/link_types.hpp"

namespace r2ccl {

class MemoryPool final : public StreamMemory {
 public:
  MemoryPool() = default;
  ~MemoryPool() override;
  MemoryPool(const MemoryPool&) = delete;
  MemoryPool& operator=(const MemoryPool&) = delete;

  using DmaBuf = std::shared_ptr<const FileDescriptor>;  // null: memory of the host

  // What add_device() registers; register_all() does it ahead, on any thread.
  struct Registration {
    std::span<std::byte> span;
    std::uint64_t serial = 0;  // another one's, if the same memory is registered anew
    DmaBuf dma_buf = {};
    std::unique_ptr<VerbsMemory> with = {};
  };
  [[nodiscard]] std::vector<Registration> registrations() const;
  static void register_all(VerbsDevice& device, std::vector<Registration>& registrations);
  // Everything here is registered with the device, too, but for dma-bufs that it does not take.
  // `ahead`: what already is.
  Status add_device(std::shared_ptr<VerbsDevice> device, std::vector<Registration> ahead = {});
  // One that is gone, or is not to reach anything any more; it may take its time for that.
  void remove_device(const std::string& name);
  // True once a device that was removed reaches nothing any more of what it was opened for.
  using Withdrawal = std::shared_ptr<const std::atomic<bool>>;
  // Of the device as it is open now; null: it is not here.
  [[nodiscard]] Withdrawal withdrawal_of(const std::string& device) const;
  // It does not end a queue pair: somebody is to remove it.
  void distrust(const std::string& device);
  [[nodiscard]] std::set<std::string> take_distrusted() { return std::exchange(distrusted_, {}); }
  // Of a fork: what the parent's devices have is not ours to free.
  void abandon();

  // Null: last_error() says why.
  std::byte* allocate(std::size_t bytes) override;
  // For one device alone, and perhaps not registered with it yet: that may take long, so whoever
  // wants it does it, on any thread, and attaches what comes of it.
  std::byte* allocate_for(const std::string& device, std::size_t bytes);
  static Result<std::unique_ptr<VerbsMemory>> register_with(VerbsDevice& device,
                                                            std::span<std::byte> memory);
  void attach(std::byte* memory, const VerbsDevice& device, std::unique_ptr<VerbsMemory> with);
  void release(std::byte* memory) override;
  // Of what was allocated here, in whole pages.
  [[nodiscard]] std::size_t bytes_of(const std::byte* memory) const {
    return regions_.at(memory).bytes;
  }
  [[nodiscard]] bool is_registered(std::span<const std::byte> memory) const override;
  // No device may use the buffer any more; it is still to be given back.
  void revoke(std::span<const std::byte> memory) override;
  [[nodiscard]] const std::string& last_error() const { return last_error_; }

  // A caller's buffer; as often as it is registered it has to be given back.
  Status register_buffer(std::span<std::byte> buffer);
  // Memory of another device, which the CPU does not touch: VerbsDevice::share_dma_buf() says more.
  // All devices that are here take it, or none has it.
  Status register_dma_buf(std::span<std::byte> addresses, FileDescriptor dma_buf);
  // Of either.  The memory may be freed then, if no rail reads it any more.  False: it is not
  // registered.
  bool deregister_buffer(const std::byte* buffer);

  struct Keys {
    std::uint32_t local = 0;
    std::uint32_t remote = 0;
  };
  // Of all these bytes for the device; empty: they are not registered with it.
  [[nodiscard]] std::optional<Keys> find(const std::string& device, const std::byte* data,
                                         std::size_t bytes) const;

  [[nodiscard]] std::size_t registered_bytes() const { return registered_bytes_; }

 private:
  struct Device {
    std::shared_ptr<VerbsDevice> open;
    std::shared_ptr<std::atomic<bool>> withdrawn;
  };
  struct Region {
    std::size_t bytes = 0;
    unsigned users = 1;
    bool own = true;       // mapped here
    bool revoked = false;  // no device may use it
    std::uint64_t serial = 0;
    DmaBuf dma_buf = {};
    std::map<std::string, std::unique_ptr<VerbsMemory>> with;  // by device
  };

  using Regions = std::map<const std::byte*, Region>;

  // The one that has all of these bytes; the end: none.
  [[nodiscard]] Regions::const_iterator region_of(const std::byte* data, std::size_t bytes) const;
  // What is registered with the device, which no longer counts.
  std::vector<std::unique_ptr<VerbsMemory>> withdraw(const std::string& device);
  // Null: last_error() says why.
  std::byte* map(std::size_t bytes);
  void unmap(std::byte* memory);
  static Result<std::unique_ptr<VerbsMemory>> register_as(const DmaBuf& dma_buf,
                                                          VerbsDevice& device,
                                                          std::span<std::byte> memory);
  Status register_memory(std::span<std::byte> memory, DmaBuf dma_buf);
  Status share(std::byte* at, Region& region, VerbsDevice& device);
  Status share_with_all(std::byte* at, Region& region);  // that it is not shared with yet

  std::map<std::string, Device> devices_;
  std::set<std::string> distrusted_;
  Regions regions_;
  std::multimap<std::size_t, std::byte*> free_;  // by size: registering is slow
  std::size_t registered_bytes_ = 0;
  std::string last_error_;
  std::uint64_t last_serial_ = 0;
};

}  // namespace r2ccl
