#include "rails/verbs/memory_pool.hpp"

#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <future>
#include <iterator>
#include <list>
#include <utility>

#include "drivers/detached.hpp"

namespace r2ccl {
namespace {

constexpr std::size_t page_bytes = 4096;
// Time limit of the destructor for devices that may hang.  After the limit all memory stays mapped,
// since a device may still write.
constexpr std::chrono::seconds patience{1};
// PCIe relaxed ordering: writes may overtake earlier writes, for example a header its payload.  A
// receiver reads both only after the completion, and a completion overtakes no write.
constexpr bool relaxed_ordering = true;

// Destroys registrations on a detached thread, since a device may be slow.  `withdrawn`: set once
// all of the registrations were deregistered.
std::future<void> free_apart(std::vector<std::unique_ptr<VerbsMemory>> gone,
                             std::shared_ptr<VerbsDevice> device = nullptr,
                             std::shared_ptr<std::atomic<bool>> withdrawn = nullptr) {
  std::promise<void> over;
  auto freed = over.get_future();
  auto free = [memory = std::move(gone), last = std::move(device), all = std::move(withdrawn),
               through = std::move(over)]() mutable {
    bool none_left = true;
    for (const auto& one : memory) none_left = one->deregister() == 0 && none_left;
    if (all != nullptr && none_left) all->store(true, std::memory_order_release);
    memory.clear();
    last.reset();
    through.set_value();
  };
  const auto work = std::make_shared<decltype(free)>(std::move(free));
  // Without a thread the memory is freed now, because nothing would retry.
  if (!run_detached("r2ccl-free", [work] { (*work)(); })) (*work)();
  return freed;
}

std::size_t in_pages(std::size_t bytes) {
  return (bytes + page_bytes - 1) / page_bytes * page_bytes;
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
    freed.push_back(free_apart(withdraw(name), std::move(device.open)));
  const auto limit = std::chrono::steady_clock::now() + patience;
  for (const auto& of_device : freed)
    // On a timeout all memory stays mapped, since a device may still write.
    if (of_device.wait_until(limit) != std::future_status::ready) return;
  for (const auto& [at, region] : regions_)
    if (region.own) ::munmap(const_cast<std::byte*>(at), region.bytes);
}

void MemoryPool::abandon() {
  static auto* const kept = new std::list<Regions>();  // stays allocated until the process exits
  kept->push_back(std::exchange(regions_, {}));
  devices_.clear();
}

std::vector<MemoryPool::Registration> MemoryPool::registrations() const {
  std::vector<Registration> all;
  for (const auto& [at, region] : regions_)
    if (!region.revoked)
      all.push_back({.span = {const_cast<std::byte*>(at), region.bytes},
                     .serial = region.serial,
                     .dma_buf = region.dma_buf});
  return all;
}

void MemoryPool::register_all(VerbsDevice& device, std::vector<Registration>& registrations) {
  // add_device() retries a failed registration and reports the error.
  for (Registration& one : registrations)
    if (auto shared = register_as(one.dma_buf, device, one.span); shared.ok())
      one.with = std::move(shared.value());
}

Status MemoryPool::add_device(std::shared_ptr<VerbsDevice> device,
                              std::vector<Registration> ahead) {
  const std::string& name = device->name();
  for (Registration& one : ahead) {
    const auto region = regions_.find(one.span.data());
    if (region != regions_.end() && region->second.serial == one.serial && one.with &&
        !region->second.revoked)
      region->second.with[name] = std::move(one.with);
  }
  for (auto& [at, region] : regions_) {
    if (region.revoked || region.with.contains(name)) continue;
    Status status = share(const_cast<std::byte*>(at), region, *device);
    if (status.ok() || region.dma_buf != nullptr) continue;  // a refused dma-buf is skipped
    remove_device(name);
    return status;
  }
  devices_[name] = {std::move(device), std::make_shared<std::atomic<bool>>(false)};
  return {};
}

void MemoryPool::remove_device(const std::string& name) {
  const auto found = devices_.find(name);
  std::shared_ptr<std::atomic<bool>> withdrawn;
  if (found != devices_.end()) {
    withdrawn = std::move(found->second.withdrawn);
    devices_.erase(found);
  }
  (void)free_apart(withdraw(name), nullptr, std::move(withdrawn));
}

MemoryPool::Withdrawal MemoryPool::withdrawal_of(const std::string& device) const {
  const auto found = devices_.find(device);
  return found == devices_.end() ? nullptr : found->second.withdrawn;
}

void MemoryPool::distrust(const std::string& device) {
  if (devices_.contains(device)) distrusted_.insert(device);
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
  auto shared = register_as(region.dma_buf, device, {at, region.bytes});
  if (!shared.ok()) return shared.take_status();
  region.with[device.name()] = std::move(shared.value());
  return {};
}

// Between its loss and its removal from the pool, a device must not fail the rails of other
// devices.
Status MemoryPool::share_with_all(std::byte* at, Region& region) {
  for (const auto& [name, device] : devices_) {
    if (region.with.contains(name)) continue;
    Status status = share(at, region, *device.open);
    if (status.ok()) continue;
    if (!device.open->gone()) return status;
    distrust(name);
  }
  return {};
}

Result<std::unique_ptr<VerbsMemory>> MemoryPool::register_with(VerbsDevice& device,
                                                               std::span<std::byte> memory) {
  auto shared = device.share(memory, relaxed_ordering);
  if (shared.ok()) return shared;
  const Status status = shared.take_status();
  return Status(status.code(), status.message() + memlock_hint());
}

Result<std::unique_ptr<VerbsMemory>> MemoryPool::register_as(const DmaBuf& dma_buf,
                                                             VerbsDevice& device,
                                                             std::span<std::byte> memory) {
  if (dma_buf == nullptr) return register_with(device, memory);
  return device.share_dma_buf(dma_buf->get(), memory, relaxed_ordering);
}

void MemoryPool::attach(std::byte* memory, const VerbsDevice& device,
                        std::unique_ptr<VerbsMemory> with) {
  const auto region = regions_.find(memory);
  const auto found = devices_.find(device.name());
  const bool wanted = region != regions_.end() && found != devices_.end() &&
                      found->second.open.get() == &device &&
                      !region->second.with.contains(device.name());
  if (wanted) {
    region->second.with[device.name()] = std::move(with);
    return;
  }
  std::vector<std::unique_ptr<VerbsMemory>> late;  // the device was removed in between
  late.push_back(std::move(with));
  (void)free_apart(std::move(late));
}

std::byte* MemoryPool::allocate(std::size_t bytes) {
  bytes = in_pages(bytes);
  std::byte* memory = nullptr;
  if (const auto found = free_.find(bytes); found != free_.end()) {
    memory = found->second;
    free_.erase(found);
  } else {
    memory = map(bytes);
  }
  if (memory == nullptr) return nullptr;
  if (const Status status = share_with_all(memory, regions_.at(memory)); !status.ok()) {
    last_error_ = status.message();
    unmap(memory);
    return nullptr;
  }
  return memory;
}

std::byte* MemoryPool::allocate_for(const std::string& device, std::size_t bytes) {
  bytes = in_pages(bytes);
  const auto [first, last] = free_.equal_range(bytes);
  const auto found = std::find_if(first, last, [&](const auto& entry) {
    return regions_.at(entry.second).with.contains(device);
  });
  const auto taken = found != last ? found : first;
  if (taken == last) return map(bytes);
  std::byte* const memory = taken->second;
  free_.erase(taken);
  return memory;
}

std::byte* MemoryPool::map(std::size_t bytes) {
  void* const mapped =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) {
    last_error_ = "mapping " + std::to_string(bytes) + " bytes: " + std::strerror(errno);
    return nullptr;
  }
  // Without MADV_DONTFORK, a forked child could take over pages that a device writes.
  ::madvise(mapped, bytes, MADV_DONTFORK);
  auto* const memory = static_cast<std::byte*>(mapped);
  regions_[memory] = {.bytes = bytes, .serial = ++last_serial_, .with = {}};
  registered_bytes_ += bytes;
  return memory;
}

void MemoryPool::unmap(std::byte* memory) {
  const auto region = regions_.find(memory);
  const std::size_t bytes = region->second.bytes;
  regions_.erase(region);  // registrations end before the memory is unmapped
  registered_bytes_ -= bytes;
  ::munmap(memory, bytes);
}

void MemoryPool::release(std::byte* memory) {
  if (const auto region = regions_.find(memory); region != regions_.end())  // not abandoned
    free_.emplace(region->second.bytes, memory);
}

Status MemoryPool::register_buffer(std::span<std::byte> buffer) {
  return register_memory(buffer, nullptr);
}

Status MemoryPool::register_dma_buf(std::span<std::byte> addresses, FileDescriptor dma_buf) {
  if (devices_.empty()) return {ErrorCode::internal, "there is no RDMA device"};
  return register_memory(addresses, std::make_shared<const FileDescriptor>(std::move(dma_buf)));
}

Status MemoryPool::register_memory(std::span<std::byte> buffer, DmaBuf dma_buf) {
  if (buffer.empty()) return {ErrorCode::invalid_argument, "buffer: has 0 bytes, needs at least 1"};
  // Find the first region that ends behind the buffer's first byte: only this region can be the
  // same buffer.
  auto found = regions_.upper_bound(buffer.data());
  if (found != regions_.begin() &&
      std::prev(found)->first + std::prev(found)->second.bytes > buffer.data())
    --found;
  if (found != regions_.end() && found->first < buffer.data() + buffer.size()) {
    Region& region = found->second;
    if (region.own || found->first != buffer.data() || region.bytes != buffer.size() ||
        (region.dma_buf == nullptr) != (dma_buf == nullptr))
      return {ErrorCode::invalid_argument, "buffer: its " + std::to_string(buffer.size()) +
                                               " bytes overlap a registered buffer of " +
                                               std::to_string(region.bytes) + " bytes"};
    // A device added later may lack this registration.
    if (!region.revoked) R2CCL_TRY(share_with_all(buffer.data(), region));
    ++region.users;
    return {};
  }
  Region region{.bytes = buffer.size(),
                .own = false,
                .serial = ++last_serial_,
                .dma_buf = std::move(dma_buf),
                .with = {}};
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
  const auto with = [&](const auto& device) {
    return find(device.first, memory.data(), memory.size()).has_value();
  };
  // A dma-buf counts if any device has it: a device added later may refuse the dma-buf, and rails
  // of other devices must not suffer.
  const auto region = region_of(memory.data(), memory.size());
  const bool some = region != regions_.end() && region->second.dma_buf != nullptr;
  return some ? std::ranges::any_of(devices_, with)
              : !devices_.empty() && std::ranges::all_of(devices_, with);
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
