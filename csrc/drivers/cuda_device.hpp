// A GPU of this machine: device memory, pinned host memory, kernels and launches.  All calls use
// the device's primary context, the same context as torch.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/file_descriptor.hpp"
#include "drivers/cuda_library.hpp"

namespace r2ccl::cuda {

class Device;

// Properties of a GPU, as reported by the driver.
struct Description {
  std::string name;
  int major = 0;  // compute capability
  int minor = 0;
  bool dma_buf = false;  // export as dma-buf is supported
};

// Returns the properties of all visible GPUs, in ordinal order.
[[nodiscard]] Result<std::vector<Description>> describe_all(const std::string& library);

// The compiled kernels, in the two forms accepted by the driver.
struct Image {
  std::span<const std::byte> binary{};  // fat binary or cubin, for the GPUs named in it
  // PTX, terminated by a zero byte: the fallback for GPUs and drivers that reject the binary.  The
  // driver compiles PTX at load time, which takes seconds, and caches the result.
  std::span<const std::byte> text{};

  [[nodiscard]] bool empty() const { return binary.empty(); }
};

// Owner of one of three kinds of memory: zeroed device memory, zeroed pinned host memory mapped
// into the device, or device memory imported from another process.  Must not outlive its Device.
class Memory {
 public:
  Memory() = default;
  Memory(Memory&& other) noexcept { *this = std::move(other); }
  Memory& operator=(Memory&& other) noexcept;
  ~Memory();

  [[nodiscard]] Address address() const { return address_; }  // address used by kernels
  [[nodiscard]] std::byte* host() const { return host_; }     // null for device memory

 private:
  friend class Device;
  const Device* device_ = nullptr;
  Address address_ = 0;
  std::byte* host_ = nullptr;
  bool imported_ = false;
};

class Copier;

class Device {
 public:
  // Opens a GPU and loads `image`, which holds all kernels.  `library` is passed to
  // Library::load().
  static Result<std::unique_ptr<Device>> open(const std::string& library, int ordinal,
                                              const Image& image);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  [[nodiscard]] Result<Memory> allocate(std::size_t bytes) const;
  [[nodiscard]] Result<Memory> allocate_pinned(std::size_t bytes) const;
  // Exports memory of allocate() to another process of this machine.  `memory` must outlive every
  // mapping made from the handle.
  [[nodiscard]] Result<IpcHandle> export_ipc(const Memory& memory) const;
  [[nodiscard]] Result<Memory> import_ipc(const IpcHandle& handle) const;
  // Returns a kernel.  The driver loads the kernel into the device now, not at its first launch.
  [[nodiscard]] Result<Function> kernel(const char* name) const;
  // Launches a kernel.  `arguments` holds the address of each kernel argument.
  [[nodiscard]] Status launch(Function kernel, unsigned blocks, unsigned threads, Stream stream,
                              void** arguments) const;
  // Returns whether the stream is being captured into a graph.
  [[nodiscard]] Result<bool> capturing(Stream stream) const;
  // Waits until all work of the context has finished.
  [[nodiscard]] Status synchronise() const;

  // Exports memory of allocate() as a dma-buf for NICs of this machine.  The address and `bytes`
  // must be multiples of the page size.
  [[nodiscard]] Result<FileDescriptor> export_dma_buf(const Memory& memory,
                                                      std::size_t bytes) const;
  // Returns whether kernels see NIC writes only after flush_writes().  Returns an error if the
  // driver has no flush.
  [[nodiscard]] Result<bool> needs_flush() const;
  // Makes earlier NIC writes visible to kernels.  Requires needs_flush().
  [[nodiscard]] Status flush_writes() const;
  [[nodiscard]] Result<std::unique_ptr<Copier>> make_copier() const;

 private:
  friend class Memory;
  friend class Copier;
  class ScopedContext;   // makes the context current for a scope
  class RelaxedCapture;  // allows driver calls during stream captures of other threads
  [[nodiscard]] Result<int> attribute(Attribute asked) const;

  Device(const Library& library, int device) : cuda_(library), device_(device) {}
  // Returns true in a forked child, where the driver is unusable.
  [[nodiscard]] bool foreign() const { return origin_.foreign(); }
  Status load(const Image& image);
  void free(const Memory& memory) const;

  const Library& cuda_;
  const int device_;
  const Origin origin_;
  Context context_ = nullptr;
  Module module_ = nullptr;
};

// Copies between host and device memory, or inside the device, for host threads.  Copies run on a
// private non-blocking stream, so they wait for no other stream.
class Copier {
 public:
  explicit Copier(const Device& device) : device_(device) {}
  ~Copier();
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;

  // Copies `bytes` bytes and returns when the copy is complete; returns an error after 5 s.
  // Thread-safe.
  Status copy(Address to, Address from, std::size_t bytes);

 private:
  friend class Device;
  Status open();

  const Device& device_;
  std::mutex mutex_;
  Stream stream_ = nullptr;
};

}  // namespace r2ccl::cuda
