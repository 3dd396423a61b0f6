// Stand-in for GPU memory: a memfd exported as a dma-buf, under addresses without CPU access.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <span>

#include "base/file_descriptor.hpp"

namespace r2ccl::testing {

class ExportedMemory {
 public:
  explicit ExportedMemory(std::size_t bytes)
      : file_(::memfd_create("gpu", MFD_CLOEXEC)),
        addresses_(map(bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1)) {
    EXPECT_EQ(::ftruncate(file_.get(), static_cast<off_t>(bytes)), 0);
    bytes_ = map(bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_.get());
  }
  ~ExportedMemory() {
    for (const std::span<std::byte>& mapped : {addresses_, bytes_})
      ::munmap(mapped.data(), mapped.size());
  }
  ExportedMemory(const ExportedMemory&) = delete;
  ExportedMemory& operator=(const ExportedMemory&) = delete;

  [[nodiscard]] FileDescriptor dma_buf() const { return FileDescriptor(::dup(file_.get())); }
  [[nodiscard]] std::span<std::byte> addresses() const { return addresses_; }
  [[nodiscard]] std::span<std::byte> bytes() const { return bytes_; }  // the GPU's view

 private:
  static std::span<std::byte> map(std::size_t bytes, int protection, int flags, int file) {
    void* const mapped = ::mmap(nullptr, bytes, protection, flags, file, 0);
    EXPECT_NE(mapped, MAP_FAILED);
    return {static_cast<std::byte*>(mapped), bytes};
  }

  const FileDescriptor file_;
  const std::span<std::byte> addresses_;
  std::span<std::byte> bytes_;
};

}  // namespace r2ccl::testing
