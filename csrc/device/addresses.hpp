// Addresses of device memory, for kernels and driver calls.
#pragma once

#include <cstddef>
#include <cstdint>

#include "drivers/cuda_library.hpp"

namespace r2ccl::device {

inline constexpr std::uint64_t line_bytes = 128;

// Rounds up to a multiple of line_bytes.
constexpr std::uint64_t rounded_up(std::uint64_t bytes) {
  return (bytes + line_bytes - 1) / line_bytes * line_bytes;
}

// Returns the largest shard, in bytes, if `shards` shards share `staging_bytes`.  The size is a
// multiple of a line, so that slices are aligned for fast copies.
constexpr std::uint64_t shard_bytes(std::uint64_t staging_bytes, std::size_t shards) {
  return staging_bytes / shards / line_bytes * line_bytes;
}

// Returns the address as a pointer, for kernel arguments.  The host must not dereference the
// pointer.
template <typename T>
T* at(cuda::Address address) {
  return reinterpret_cast<T*>(address);  // NOLINT(performance-no-int-to-ptr)
}

}  // namespace r2ccl::device
