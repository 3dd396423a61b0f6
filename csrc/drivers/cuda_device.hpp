// A GPU of this machine: its memory, the host's memory that it can reach, kernels and their
// launches. It works in the device's primary context, which is the one that torch uses.
#pragma once

#include <sys/types.h>
#include <unistd.h>

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

// What the driver says of a GPU.
struct Description {
  std::string name;
  int major = 0;  // compute capability
  int minor = 0;
  bool dma_buf = false;  // its memory can be given to others as one
};

// All that it shows.
[[nodiscard]] Result<std::vector<Description>> describe_all(const std::string& library);

// The kernels, in the forms that a driver takes.
struct Image {
  std::span<const std::byte> binary{};  // a fat binary or a cubin: for the GPUs that it names
  // PTX that ends with a zero byte: for GPUs and drivers that do not take the binary.  The driver
  // compiles it when it is loaded, which takes seconds, and keeps the result in its cache.
  std::span<const std::byte> text{};

  [[nodiscard]] bool empty() const { return binary.empty(); }
};

// Memory of the device, zeroed; or pinned memory of the host, zeroed, that the device can reach; or
// memory of a device that another process has given to this one.
class Memory {
 public:
  Memory() = default;
  Memory(Memory&& other) noexcept { *this = std::move(other); }
  Memory& operator=(Memory&& other) noexcept;
  ~Memory();

  [[nodiscard]] Address address() const { return address_; }  // as kernels know it
  [[nodiscard]] std::byte* host() const { return host_; }     // null: it is the device's

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
  // `library`: as Library::load has it; `image`: all kernels.
  static Result<std::unique_ptr<Device>> open(const std::string& library, int ordinal,
                                              const Image& image);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  [[nodiscard]] Result<Memory> allocate(std::size_t bytes) const;
  [[nodiscard]] Result<Memory> allocate_pinned(std::size_t bytes) const;
  // Memory of allocate(), for a process of this machine; it has to outlive what that makes of it.
  [[nodiscard]] Result<IpcHandle> export_ipc(const Memory& memory) const;
  [[nodiscard]] Result<Memory> import_ipc(const IpcHandle& handle) const;
  // A kernel, loaded into the device at once and not with its first launch.
  [[nodiscard]] Result<Function> kernel(const char* name) const;
  // `arguments`: the address of each.
  [[nodiscard]] Status launch(Function kernel, unsigned blocks, unsigned threads, Stream stream,
                              void** arguments) const;
  // Whether what is put into the stream goes into a graph.
  [[nodiscard]] Result<bool> capturing(Stream stream) const;
  // Waits for all that was launched.
  [[nodiscard]] Status synchronise() const;

  // Memory of allocate() of so many bytes, for NICs of this machine; both in whole pages.
  [[nodiscard]] Result<FileDescriptor> export_dma_buf(const Memory& memory,
                                                      std::size_t bytes) const;
  // Whether kernels see what NICs have written only after flush_writes(); an error: not even then.
  [[nodiscard]] Result<bool> needs_flush() const;
  [[nodiscard]] Status flush_writes() const;
  [[nodiscard]] Result<std::unique_ptr<Copier>> make_copier() const;

 private:
  friend class Memory;
  friend class Copier;
  class ScopedContext;   // makes the context current for a scope
  class RelaxedCapture;  // so that captures of other threads do not mind what this one does
  [[nodiscard]] Result<int> attribute(Attribute asked) const;

  Device(const Library& library, int device) : cuda_(library), device_(device) {}
  [[nodiscard]] bool foreign() const { return ::getpid() != process_; }  // a child has no driver
  Status load(const Image& image);
  void free(const Memory& memory) const;

  const Library& cuda_;
  const int device_;
  const pid_t process_ = ::getpid();
  Context context_ = nullptr;
  Module module_ = nullptr;
};

// Copies for threads of the host, between memory of the device and the host's or inside the device:
// on a stream of its own, which waits for no other.
class Copier {
 public:
  explicit Copier(const Device& device) : device_(device) {}
  ~Copier();
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;

  // On any thread; returns when it is done.
  Status copy(Address to, Address from, std::size_t bytes);

 private:
  friend class Device;
  Status open();

  const Device& device_;
  std::mutex mutex_;
  Stream stream_ = nullptr;
};

}  // namespace r2ccl::cuda
