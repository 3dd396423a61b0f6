#include "rails/verbs/memory_pool.hpp"

#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace r2ccl {
namespace {

constexpr std::size_t page_bytes = 4096;

std::string memlock_hint() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return "";
  return "; the limit of locked memory is " + std::to_string(limit.rlim_cur) +
         " bytes: raise it (ulimit -l unlimited)";
}

}  // namespace

MemoryPool::~MemoryPool() {
  for (auto& [at, region] : regions_) {
    region.with.clear();
    if (region.own) ::munmap(const_cast<std::byte*>(at), region.bytes);
  }
}

Status MemoryPool::add_device(std::shared_ptr<VerbsDevice> device) {
  const std::string& name = device->name();
  for (auto& [at, region] : regions_) region.with.erase(name);
  for (auto& [at, region] : regions_) {
    Status status = share(const_cast<std::byte*>(at), region, *device);
    if (status.ok()) continue;
    for (auto& [other, shared] : regions_) shared.with.erase(name);
    return status;
  }
  devices_[name] = std::move(device);
  return {};
}

// Data may overtake data; what tells of it is written after it in any case.
Status MemoryPool::share(std::byte* at, Region& region, VerbsDevice& device) {
  auto shared = device.share({at, region.bytes}, /*relaxed_ordering=*/true);
  if (!shared.ok()) {
    const Status status = shared.take_status();
    return {status.code(), status.message() + memlock_hint()};
  }
  region.with[device.name()] = std::move(shared.value());
  return {};
}

Status MemoryPool::share_with_all(std::byte* at, Region& region) {
  for (const auto& [name, device] : devices_) R2CCL_TRY(share(at, region, *device));
  return {};
}

std::byte* MemoryPool::allocate(std::size_t bytes) {
  bytes = (bytes + page_bytes - 1) / page_bytes * page_bytes;
  if (const auto found = free_.find(bytes); found != free_.end()) {
    std::byte* const memory = found->second;
    free_.erase(found);
    return memory;
  }
  void* const mapped =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) {
    last_error_ = "mapping " + std::to_string(bytes) + " bytes: " + std::strerror(errno);
    return nullptr;
  }
  // A child of a fork would otherwise take pages that a device writes.
  ::madvise(mapped, bytes, MADV_DONTFORK);
  auto* const memory = static_cast<std::byte*>(mapped);
  Region region{.bytes = bytes, .users = 1, .own = true, .with = {}};
  if (const Status status = share_with_all(memory, region); !status.ok()) {
    last_error_ = status.message();
    region.with.clear();
    ::munmap(mapped, bytes);
    return nullptr;
  }
  regions_[memory] = std::move(region);
  registered_bytes_ += bytes;
  return memory;
}

void MemoryPool::release(std::byte* memory) { free_.emplace(regions_.at(memory).bytes, memory); }

Status MemoryPool::register_buffer(std::span<std::byte> buffer) {
  if (buffer.empty()) return {ErrorCode::invalid_argument, "buffer: it has no bytes"};
  const auto found = regions_.find(buffer.data());
  if (found != regions_.end()) {
    Region& known = found->second;
    if (known.own || known.bytes != buffer.size())
      return {ErrorCode::invalid_argument,
              "the buffer of " + std::to_string(buffer.size()) + " bytes overlaps one of " +
                  std::to_string(known.bytes) + " bytes that is registered"};
    ++known.users;
    return {};
  }
  Region region{.bytes = buffer.size(), .users = 1, .own = false, .with = {}};
  R2CCL_TRY(share_with_all(buffer.data(), region));
  regions_[buffer.data()] = std::move(region);
  registered_bytes_ += buffer.size();
  return {};
}

bool MemoryPool::deregister_buffer(const std::byte* buffer) {
  const auto found = regions_.find(buffer);
  if (found == regions_.end() || found->second.own) return false;
  if (--found->second.users > 0) return true;
  registered_bytes_ -= found->second.bytes;
  regions_.erase(found);
  return true;
}

std::optional<MemoryPool::Keys> MemoryPool::find(const std::string& device, const std::byte* data,
                                                 std::size_t bytes) const {
  auto region = regions_.upper_bound(data);
  if (region == regions_.begin()) return std::nullopt;
  --region;
  if (data + bytes > region->first + region->second.bytes) return std::nullopt;
  const auto with = region->second.with.find(device);
  if (with == region->second.with.end()) return std::nullopt;
  return Keys{with->second->local_key(), with->second->remote_key()};
}

}  // namespace r2ccl
