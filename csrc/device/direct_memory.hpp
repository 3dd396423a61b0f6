// Memory of a GPU that NICs read and write (GPUDirect).
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
  std::unique_ptr<DeviceMemory> host_view;  // as the host knows it; null: there is none
  FileDescriptor dma_buf;                   // as NICs are given it
  bool needs_flush = false;                 // before kernels see what NICs have written
};

// Of so many bytes at least, zeroed.
Result<DirectMemory> make_direct_memory(const cuda::Device& device, std::uint64_t bytes);

// Ok: its driver gives memory of the GPU out and copies it, and these RDMA devices, all of them,
// take it.  Nothing of it is kept.  `image`: as cuda::Device::open() has it; `driver`: of `rdma`,
// null if there are none.
Status probe_direct(const std::string& library, int device, const cuda::Image& image,
                    VerbsDriver* driver, std::span<const std::string> rdma);

}  // namespace r2ccl::device
