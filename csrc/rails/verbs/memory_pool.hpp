// The memory registered with the RDMA devices of a process: slots, staging, rings, buffers of
// callers, and GPU memory.  Devices may read the memory, and peers may write it.  Not thread-safe.
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

  using DmaBuf = std::shared_ptr<const FileDescriptor>;  // null for host memory

  // A registration that add_device() needs. register_all() makes registrations ahead of time, on
  // any thread.
  struct Registration {
    std::span<std::byte> span;
    std::uint64_t serial = 0;  // differs if the same memory is registered again
    DmaBuf dma_buf = {};
    std::unique_ptr<VerbsMemory> with = {};
  };
  [[nodiscard]] std::vector<Registration> registrations() const;
  static void register_all(VerbsDevice& device, std::vector<Registration>& registrations);
  // Registers all memory of the pool with the device.  A dma-buf that the device refuses is
  // skipped.  `ahead`: registrations made by register_all().
  Status add_device(std::shared_ptr<VerbsDevice> device, std::vector<Registration> ahead = {});
  // Removes a device that is gone or must lose access to all memory.  Deregistration runs on a
  // detached thread, since the device may be slow.
  void remove_device(const std::string& name);
  // Flag of a device; becomes true once the device is removed and has no access to memory of the
  // pool.
  using Withdrawal = std::shared_ptr<const std::atomic<bool>>;
  // Returns the flag of the device as it is open now; null if the pool does not have the device.
  [[nodiscard]] Withdrawal withdrawal_of(const std::string& device) const;
  // Marks a device that is gone, or does not make or end a queue pair in time.  The caller of
  // take_distrusted() must remove the device.
  void distrust(const std::string& device);
  [[nodiscard]] std::set<std::string> take_distrusted() { return std::exchange(distrusted_, {}); }
  // Drops all registrations without freeing them.  For a forked child: the registrations belong to
  // the parent.
  void abandon();

  // Returns null on failure; see last_error().
  std::byte* allocate(std::size_t bytes) override;
  // Returns memory for a single device, or null on failure.  The memory may not be registered with
  // the device yet.  Registration may take long: the caller runs register_with() on any thread and
  // passes the result to attach().
  std::byte* allocate_for(const std::string& device, std::size_t bytes);
  static Result<std::unique_ptr<VerbsMemory>> register_with(VerbsDevice& device,
                                                            std::span<std::byte> memory);
  void attach(std::byte* memory, const VerbsDevice& device, std::unique_ptr<VerbsMemory> with);
  void release(std::byte* memory) override;
  // Returns the size of memory allocated here, in bytes of whole pages.
  [[nodiscard]] std::size_t bytes_of(const std::byte* memory) const {
    return regions_.at(memory).bytes;
  }
  [[nodiscard]] bool is_registered(std::span<const std::byte> memory) const override;
  // Takes the buffer away from all devices, on a detached thread.  The caller must still call
  // deregister_buffer().  Memory allocated by the pool is not revoked.
  void revoke(std::span<const std::byte> memory) override;
  [[nodiscard]] const std::string& last_error() const { return last_error_; }

  // Registers a caller's buffer.  Each call needs a matching deregister_buffer().
  Status register_buffer(std::span<std::byte> buffer);
  // Registers memory of a GPU, which the CPU does not touch; see VerbsDevice::share_dma_buf().  On
  // an error no device has the memory.
  Status register_dma_buf(std::span<std::byte> addresses, FileDescriptor dma_buf);
  // Undoes one call of register_buffer() or register_dma_buf().  After the last, the caller may
  // free the memory, if no rail still reads it.  Returns false if the memory is not registered.
  bool deregister_buffer(const std::byte* buffer);

  struct Keys {
    std::uint32_t local = 0;
    std::uint32_t remote = 0;
  };
  // Returns the device's keys for this memory; empty if the memory is not registered with the
  // device in full.
  [[nodiscard]] std::optional<Keys> find(const std::string& device, const std::byte* data,
                                         std::size_t bytes) const;

  // Returns the size of all memory in the pool, in bytes.
  [[nodiscard]] std::size_t registered_bytes() const { return registered_bytes_; }

 private:
  struct Device {
    std::shared_ptr<VerbsDevice> open;
    std::shared_ptr<std::atomic<bool>> withdrawn;
  };
  struct Region {
    std::size_t bytes = 0;
    unsigned users = 1;    // registrations not undone yet
    bool own = true;       // memory mapped by the pool
    bool revoked = false;  // no device may use the memory
    std::uint64_t serial = 0;
    DmaBuf dma_buf = {};
    std::map<std::string, std::unique_ptr<VerbsMemory>> with;  // by device
  };

  using Regions = std::map<const std::byte*, Region>;

  // Returns the region that contains all of these bytes, or the end.
  [[nodiscard]] Regions::const_iterator region_of(const std::byte* data, std::size_t bytes) const;
  // Removes and returns all registrations of the device.
  std::vector<std::unique_ptr<VerbsMemory>> withdraw(const std::string& device);
  // Maps new memory.  Returns null on failure; see last_error().
  std::byte* map(std::size_t bytes);
  void unmap(std::byte* memory);
  static Result<std::unique_ptr<VerbsMemory>> register_as(const DmaBuf& dma_buf,
                                                          VerbsDevice& device,
                                                          std::span<std::byte> memory);
  Status register_memory(std::span<std::byte> memory, DmaBuf dma_buf);
  Status share(std::byte* at, Region& region, VerbsDevice& device);
  // Registers the region with every device that lacks the region.  A device that is gone is skipped
  // and distrusted.
  Status share_with_all(std::byte* at, Region& region);

  std::map<std::string, Device> devices_;
  std::set<std::string> distrusted_;
  Regions regions_;
  std::multimap<std::size_t, std::byte*> free_;  // by size; kept because registering is slow
  std::size_t registered_bytes_ = 0;
  std::string last_error_;
  std::uint64_t last_serial_ = 0;
};

}  // namespace r2ccl
