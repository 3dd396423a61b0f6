// Memory of a device (a GPU) that NICs reach and the CPU does not, under addresses of the host that
// nobody else has and nobody may touch.  All that names memory by its address, up to the peer's
// writes, works with it as with any other; who copies bytes uses copy_bytes().
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>

#include "base/errors.hpp"

namespace r2ccl {

// Copies, on any thread, and returns when that is done.  Addresses are those that the device has;
// of the host's memory they are the host's.
class DeviceCopier {
 public:
  virtual ~DeviceCopier() = default;
  // `out`: out of the device's memory.
  virtual Status copy(std::uint64_t to, std::uint64_t from, std::size_t bytes, bool out) = 0;
};

class DeviceMemory {
 public:
  // Of `bytes` bytes at the device's address.
  static Result<std::unique_ptr<DeviceMemory>> reserve(std::uint64_t address, std::size_t bytes,
                                                       std::unique_ptr<DeviceCopier> copier);
  ~DeviceMemory();  // no copy is under way, or begins, that knows the addresses
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  [[nodiscard]] std::span<std::byte> addresses() const { return addresses_; }
  [[nodiscard]] bool has(const std::byte* at) const {
    return at >= addresses_.data() && at < addresses_.data() + addresses_.size();
  }
  // The first copy that failed: what was to be copied is not what lies there.
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

  const pid_t process_ = ::getpid();
  const std::uint64_t address_;
  const std::span<std::byte> reserved_;
  const std::span<std::byte> addresses_;
  const std::unique_ptr<DeviceCopier> copier_;
  mutable std::mutex mutex_;
  Status failure_;
};

// Whether the address is one of these.
[[nodiscard]] bool is_device_memory(const std::byte* at);

// Why copies of the memory that has this address do not succeed; ok if they do, or there is none.
[[nodiscard]] Status device_memory_failure(const std::byte* at);

// As memcpy, wherever the memory is; not from one device to another.  False: the device does not
// copy any more, and what lies there is anything.
bool copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes);

}  // namespace r2ccl
