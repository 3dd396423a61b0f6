// GPU memory that NICs read and write (GPUDirect).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/file_descriptor.hpp"
#include "drivers/cuda_device.hpp"
#include "drivers/verbs.hpp"
#include "link/device_memory.hpp"

namespace r2ccl::device {

struct DirectMemory {
  cuda::Memory memory;
  std::unique_ptr<DeviceMemory> host_view;  // host addresses of the memory; null if not allocated
  FileDescriptor dma_buf;                   // export of the memory for NICs
  bool needs_flush = false;                 // kernels see NIC writes only after a flush
};

// Allocates at least `bytes` bytes of zeroed GPU memory, with dma-buf and host addresses.
Result<DirectMemory> make_direct_memory(const cuda::Device& device, std::uint64_t bytes);

// Tests whether GPUDirect can work: the driver must export and copy GPU memory, and every RDMA
// device named in `rdma` must register the memory.  Frees everything before it returns.  `library`,
// `device`, `image`: see cuda::Device::open().  `driver`: opens the devices of `rdma`; null if
// `rdma` is empty.
Status probe_direct(const std::string& library, int device, const cuda::Image& image,
                    VerbsDriver* driver, std::span<const std::string> rdma);

}  // namespace r2ccl::device
