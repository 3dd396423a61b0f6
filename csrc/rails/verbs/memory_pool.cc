#include "rails/verbs/memory_pool.hpp"

#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <future>
#include <list>
#include <thread>
#include <utility>

namespace r2ccl {
namespace {

constexpr std::size_t page_bytes = 4096;
// At the end, with devices that may hang: all memory stays mapped then.
constexpr std::chrono::seconds patience{1};
// Data may overtake data, and a frame's header its payload: nobody looks at either before the
// completion that follows both, which overtakes nothing.
constexpr bool relaxed_ordering = true;

// By a device that may take long for it.
std::future<void> free_apart(std::vector<std::unique_ptr<VerbsMemory>> gone,
                             std::shared_ptr<VerbsDevice> device = nullptr) {
  std::promise<void> over;
  auto freed = over.get_future();
  std::thread([memory = std::move(gone), last = std::move(device),
               through = std::move(over)]() mutable {
    memory.clear();
    last.reset();
    through.set_value();
  }).detach();
  return freed;
}

std::string memlock_hint() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return "";
  return "; the limit of locked memory is " + std::to_string(limit.rlim_cur) +
         " bytes: raise it (ulimit -l unlimited)";
}

}  // namespace

MemoryPool::~MemoryPool() {
  std::vector<std::future<void>> freed;
  for (auto& [name, device] : std::exchange(devices_, {}))
    freed.push_back(free_apart(withdraw(name), std::move(device)));
  const auto limit = std::chrono::steady_clock::now() + patience;
  for (const auto& of_device : freed)
    if (of_device.wait_until(limit) != std::future_status::ready) return;  // it may still write
  for (const auto& [at, region] : regions_)
    if (region.own) ::munmap(const_cast<std::byte*>(at), region.bytes);
}

void MemoryPool::abandon() {
  static auto* const kept = new std::list<Regions>();  // for ever
  kept->push_back(std::exchange(regions_, {}));
  devices_.clear();
}

std::vector<MemoryPool::Known> MemoryPool::known() const {
  std::vector<Known> all;
  for (const auto& [at, region] : regions_)
    if (!region.revoked)
      all.push_back({.span = {const_cast<std::byte*>(at), region.bytes}, .serial = region.serial});
  return all;
}

void MemoryPool::register_all(VerbsDevice& device, std::vector<Known>& known) {
  for (Known& one : known)  // what fails is tried again, and its error told, by add_device()
    if (auto shared = device.share(one.span, relaxed_ordering); shared.ok())
      one.with = std::move(shared.value());
}

Status MemoryPool::add_device(std::shared_ptr<VerbsDevice> device, std::vector<Known> ahead) {
  const std::string& name = device->name();
  for (Known& one : ahead) {
    const auto region = regions_.find(one.span.data());
    if (region != regions_.end() && region->second.serial == one.serial && one.with &&
        !region->second.revoked)
      region->second.with[name] = std::move(one.with);
  }
  for (auto& [at, region] : regions_) {
    if (region.revoked || region.with.contains(name)) continue;
    Status status = share(const_cast<std::byte*>(at), region, *device);
    if (status.ok()) continue;
    remove_device(name);
    return status;
  }
  devices_[name] = std::move(device);
  return {};
}

void MemoryPool::remove_device(const std::string& name) {
  devices_.erase(name);
  (void)free_apart(withdraw(name));
}

std::vector<std::unique_ptr<VerbsMemory>> MemoryPool::withdraw(const std::string& device) {
  std::vector<std::unique_ptr<VerbsMemory>> gone;
  for (auto& [at, region] : regions_) {
    const auto with = region.with.find(device);
    if (with == region.with.end()) continue;
    gone.push_back(std::move(with->second));
    region.with.erase(with);
  }
  return gone;
}

Status MemoryPool::share(std::byte* at, Region& region, VerbsDevice& device) {
  auto shared = device.share({at, region.bytes}, relaxed_ordering);
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
  Region region{.bytes = bytes, .serial = ++last_serial_, .with = {}};
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

void MemoryPool::release(std::byte* memory) {
  if (const auto region = regions_.find(memory); region != regions_.end())  // else: abandoned
    free_.emplace(region->second.bytes, memory);
}

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
  Region region{.bytes = buffer.size(), .own = false, .serial = ++last_serial_, .with = {}};
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

bool MemoryPool::is_registered(std::span<const std::byte> memory) const {
  return !devices_.empty() && std::ranges::all_of(devices_, [&](const auto& device) {
    return find(device.first, memory.data(), memory.size()).has_value();
  });
}

void MemoryPool::revoke(std::span<const std::byte> memory) {
  const auto found = region_of(memory.data(), memory.size());
  if (found == regions_.end() || found->second.own) return;
  Region& region = regions_.at(found->first);
  region.revoked = true;
  std::vector<std::unique_ptr<VerbsMemory>> gone;
  for (auto& [name, with] : region.with) gone.push_back(std::move(with));
  region.with.clear();
  (void)free_apart(std::move(gone));
}

MemoryPool::Regions::const_iterator MemoryPool::region_of(const std::byte* data,
                                                          std::size_t bytes) const {
  auto region = regions_.upper_bound(data);
  if (region == regions_.begin()) return regions_.end();
  --region;
  return data + bytes <= region->first + region->second.bytes ? region : regions_.end();
}

std::optional<MemoryPool::Keys> MemoryPool::find(const std::string& device, const std::byte* data,
                                                 std::size_t bytes) const {
  const auto region = region_of(data, bytes);
  if (region == regions_.end()) return std::nullopt;
  const auto with = region->second.with.find(device);
  if (with == region->second.with.end()) return std::nullopt;
  return Keys{with->second->local_key(), with->second->remote_key()};
}

}  // namespace r2ccl
