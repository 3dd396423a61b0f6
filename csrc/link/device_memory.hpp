// Device memory (GPU) for GPUDirect RDMA: accessible to NICs, not to the CPU.  A reserved range of
// host addresses stands for the memory; the CPU must never access the range.  Code that only passes
// addresses on, for example to RDMA writes, works unchanged.  Copies must use copy_bytes().
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>

#include "base/errors.hpp"
#include "base/fork.hpp"

namespace r2ccl {

// Synchronous copies between device and host, callable from any thread.  Addresses are device
// addresses for device memory and host addresses for host memory.
class DeviceCopier {
 public:
  virtual ~DeviceCopier() = default;
  // Copies `bytes` bytes.  `out`: from device memory to the host.
  virtual Status copy(std::uint64_t to, std::uint64_t from, std::size_t bytes, bool out) = 0;
};

// A range of device memory, with the reserved host addresses for the range.
class DeviceMemory {
 public:
  // Reserves host addresses for `bytes` bytes at device address `address`.
  static Result<std::unique_ptr<DeviceMemory>> reserve(std::uint64_t address, std::size_t bytes,
                                                       std::unique_ptr<DeviceCopier> copier);
  ~DeviceMemory();  // waits for copies in progress; none may start afterwards
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  [[nodiscard]] std::span<std::byte> addresses() const { return addresses_; }
  [[nodiscard]] bool has(const std::byte* at) const {
    return at >= addresses_.data() && at < addresses_.data() + addresses_.size();
  }
  // Returns the error of the first failed copy; the destination of the copy has undefined contents.
  [[nodiscard]] Status failure() const;

 private:
  friend bool copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes);
  DeviceMemory(std::uint64_t address, std::span<std::byte> reserved, std::span<std::byte> addresses,
               std::unique_ptr<DeviceCopier> copier)
      : address_(address), reserved_(reserved), addresses_(addresses), copier_(std::move(copier)) {}

  [[nodiscard]] std::uint64_t address_of(const std::byte* at) const {
    return has(at) ? address_ + static_cast<std::uint64_t>(at - addresses_.data())
                   : reinterpret_cast<std::uintptr_t>(at);
  }
  bool copy(std::byte* to, const std::byte* from, std::size_t bytes);

  const Origin origin_;
  const std::uint64_t address_;
  const std::span<std::byte> reserved_;
  const std::span<std::byte> addresses_;
  const std::unique_ptr<DeviceCopier> copier_;
  mutable std::mutex mutex_;
  Status failure_;
};

// Returns true if the address lies in a reserved range of device memory.
[[nodiscard]] bool is_device_memory(const std::byte* at);

// Returns the first copy error of the device memory at `at`; ok for host memory.
[[nodiscard]] Status device_memory_failure(const std::byte* at);

// Like memcpy, for host or device memory on either side; not between two devices.  Returns false if
// the device's copy failed; the destination then has undefined contents.
bool copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes);

}  // namespace r2ccl
