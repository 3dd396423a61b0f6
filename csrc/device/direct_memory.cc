#include "device/direct_memory.hpp"

#include <array>
#include <utility>

#include "rails/verbs/memory_pool.hpp"

namespace r2ccl::device {
namespace {

// Alignment of large driver allocations; a multiple of the page size of every host.
constexpr std::uint64_t granule = 2U << 20U;

class Copier final : public DeviceCopier {
 public:
  Copier(const cuda::Device& device, std::unique_ptr<cuda::Copier> copier, bool needs_flush)
      : device_(device), copier_(std::move(copier)), needs_flush_(needs_flush) {}

  Status copy(std::uint64_t to, std::uint64_t from, std::size_t bytes, bool out) override {
    // A NIC may have written the data to copy.
    if (out && needs_flush_) R2CCL_TRY(device_.flush_writes());
    return copier_->copy(to, from, bytes);
  }

 private:
  const cuda::Device& device_;
  const std::unique_ptr<cuda::Copier> copier_;
  const bool needs_flush_;
};

}  // namespace

Result<DirectMemory> make_direct_memory(const cuda::Device& device, std::uint64_t bytes) {
  bytes = (bytes + granule - 1) / granule * granule;
  DirectMemory made;
  auto needs_flush = device.needs_flush();
  if (!needs_flush.ok()) return needs_flush.take_status();
  made.needs_flush = needs_flush.value();
  auto memory = device.allocate(bytes);
  if (!memory.ok()) return memory.take_status();
  made.memory = std::move(memory.value());
  auto dma_buf = device.export_dma_buf(made.memory, bytes);
  if (!dma_buf.ok()) return dma_buf.take_status();
  made.dma_buf = std::move(dma_buf.value());
  auto copier = device.make_copier();
  if (!copier.ok()) return copier.take_status();
  auto host_view = DeviceMemory::reserve(
      made.memory.address(), bytes,
      std::make_unique<Copier>(device, std::move(copier.value()), made.needs_flush));
  if (!host_view.ok()) return host_view.take_status();
  made.host_view = std::move(host_view.value());
  return made;
}

Status probe_direct(const std::string& library, int device, const cuda::Image& image,
                    VerbsDriver* driver, std::span<const std::string> rdma) {
  auto gpu = cuda::Device::open(library, device, image);
  if (!gpu.ok()) return gpu.take_status();
  auto made = make_direct_memory(*gpu.value(), 1);
  if (!made.ok()) return made.take_status();
  const DeviceMemory& memory = *made.value().host_view;
  const std::array written{std::byte{1}, std::byte{2}, std::byte{3}};
  std::array<std::byte, written.size()> read{};
  copy_bytes(memory.addresses().data(), written.data(), written.size());
  if (made.value().needs_flush) R2CCL_TRY(gpu.value()->flush_writes());
  copy_bytes(read.data(), memory.addresses().data(), read.size());
  R2CCL_TRY(memory.failure());
  if (read != written)
    return {ErrorCode::internal, "copies of GPU memory differ from the original"};
  if (rdma.empty()) return {};

  MemoryPool pool;
  for (const std::string& name : rdma) {
    auto opened = driver->open(name);
    if (!opened.ok()) return opened.take_status();
    R2CCL_TRY(pool.add_device(std::move(opened.value())));
  }
  R2CCL_TRY(pool.register_dma_buf(memory.addresses(), std::move(made.value().dma_buf)));
  (void)pool.deregister_buffer(memory.addresses().data());
  return {};
}

}  // namespace r2ccl::device
