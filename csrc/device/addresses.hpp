// Addresses of a device's memory, as kernels and the driver know them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "drivers/cuda_library.hpp"

namespace r2ccl::device {

inline constexpr std::uint64_t line_bytes = 128;

constexpr std::uint64_t rounded_up(std::uint64_t bytes) {
  return (bytes + line_bytes - 1) / line_bytes * line_bytes;
}

// Bytes that a shard may have where so many share `staging_bytes`; a multiple of what a vector has,
// so that slices lie where copies are fast.
constexpr std::uint64_t shard_bytes(std::uint64_t staging_bytes, std::size_t shards) {
  return staging_bytes / shards / line_bytes * line_bytes;
}

template <typename T>
T* at(cuda::Address address) {
  return reinterpret_cast<T*>(address);  // NOLINT(performance-no-int-to-ptr)
}

}  // namespace r2ccl::device
