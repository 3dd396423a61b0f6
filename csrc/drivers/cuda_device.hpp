// A GPU of this machine: its memory, the host's memory that it can reach, kernels and their
// launches. It works in the device's primary context, which is the one that torch uses.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

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

class Device {
 public:
  // `library`: as Library::load has it; `image`: a fat binary, a cubin or PTX, with all kernels.
  static Result<std::unique_ptr<Device>> open(const std::string& library, int ordinal,
                                              std::span<const std::byte> image);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  [[nodiscard]] Result<Memory> allocate(std::size_t bytes) const;
  [[nodiscard]] Result<Memory> allocate_pinned(std::size_t bytes) const;
  // Memory of allocate(), for a process of this machine; it has to outlive what that makes of it.
  [[nodiscard]] Result<IpcHandle> give(const Memory& memory) const;
  [[nodiscard]] Result<Memory> take(const IpcHandle& given) const;
  // A kernel, loaded into the device at once and not with its first launch.
  [[nodiscard]] Result<Function> kernel(const char* name) const;
  // `arguments`: the address of each.
  [[nodiscard]] Status launch(Function kernel, unsigned blocks, unsigned threads, Stream stream,
                              void** arguments) const;
  // Whether what is put into the stream goes into a graph.
  [[nodiscard]] Result<bool> capturing(Stream stream) const;
  // Waits for all that was launched.
  [[nodiscard]] Status synchronise() const;

 private:
  friend class Memory;
  class Current;  // makes the context current for a scope

  Device(const Library& library, int device) : cuda_(library), device_(device) {}
  [[nodiscard]] bool foreign() const { return ::getpid() != process_; }  // a child has no driver
  Status load(std::span<const std::byte> image);
  void free(const Memory& memory) const;

  const Library& cuda_;
  const int device_;
  const pid_t process_ = ::getpid();
  Context context_ = nullptr;
  Module module_ = nullptr;
};

}  // namespace r2ccl::cuda
