#include "link/device_memory.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

namespace r2ccl {
namespace {

constexpr std::size_t alignment = 2U << 20U;

// Registry of all device memory.  Never destroyed, because threads may outlive static objects.
struct Registry {
  std::atomic<std::size_t> count{0};  // readable without the lock, for a fast check
  std::shared_mutex mutex;            // held shared during a copy or look-up
  std::vector<DeviceMemory*> all;
};

Registry& registry() {
  static auto& made = *new Registry;
  return made;
}

}  // namespace

Result<std::unique_ptr<DeviceMemory>> DeviceMemory::reserve(std::uint64_t address,
                                                            std::size_t bytes,
                                                            std::unique_ptr<DeviceCopier> copier) {
  // Align to 2 MiB like device memory, so that NICs can map the range with large pages.
  const std::size_t mapped = bytes + alignment;
  void* const reserved =
      ::mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED)
    return Status(ErrorCode::internal, "cannot reserve " + std::to_string(bytes) +
                                           " bytes of address space: " + std::strerror(errno));
  const auto begin =
      (reinterpret_cast<std::uintptr_t>(reserved) + alignment - 1) / alignment * alignment;
  std::unique_ptr<DeviceMemory> made(
      new DeviceMemory(address, {static_cast<std::byte*>(reserved), mapped},
                       {reinterpret_cast<std::byte*>(begin), bytes}, std::move(copier)));
  const std::unique_lock guard(registry().mutex);
  registry().all.push_back(made.get());
  registry().count.fetch_add(1, std::memory_order_release);
  return made;
}

DeviceMemory::~DeviceMemory() {
  if (origin_.foreign()) return;  // a parent's thread may hold the lock
  {
    const std::unique_lock guard(registry().mutex);
    std::erase(registry().all, this);
    registry().count.fetch_sub(1, std::memory_order_release);
  }
  ::munmap(reserved_.data(), reserved_.size());
}

Status DeviceMemory::failure() const {
  const std::lock_guard guard(mutex_);
  return failure_.ok() ? Status() : Status(failure_.code(), failure_.message());
}

bool DeviceMemory::copy(std::byte* to, const std::byte* from, std::size_t bytes) {
  Status status = copier_->copy(address_of(to), address_of(from), bytes, has(from));
  if (status.ok()) return true;
  const std::lock_guard guard(mutex_);
  if (failure_.ok()) failure_ = std::move(status);
  return false;
}

bool is_device_memory(const std::byte* at) {
  if (registry().count.load(std::memory_order_acquire) == 0) return false;
  const std::shared_lock guard(registry().mutex);
  return std::ranges::any_of(registry().all,
                             [at](const DeviceMemory* each) { return each->has(at); });
}

Status device_memory_failure(const std::byte* at) {
  if (registry().count.load(std::memory_order_acquire) == 0) return {};
  const std::shared_lock guard(registry().mutex);
  const auto found = std::ranges::find_if(registry().all,
                                          [at](const DeviceMemory* each) { return each->has(at); });
  if (found == registry().all.end()) return {};
  // A status owns its text: no leak.
  return (*found)->failure();  // NOLINT(clang-analyzer-cplusplus.NewDeleteLeaks)
}

bool copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (registry().count.load(std::memory_order_acquire) > 0) {
    const std::shared_lock guard(registry().mutex);
    const auto found = std::ranges::find_if(
        registry().all, [&](const DeviceMemory* each) { return each->has(to) || each->has(from); });
    if (found != registry().all.end()) return (*found)->copy(to, from, bytes);
  }
  std::memcpy(to, from, bytes);
  return true;
}

}  // namespace r2ccl
