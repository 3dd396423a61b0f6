// Types shared by reduce.cc and the kernels of each instruction set.  Kernel files are compiled
// with different instruction-set flags, so this header must not define inline functions: the linker
// could pick an AVX-512 copy of a function for all files.
#pragma once

#include <cstddef>
#include <cstdint>

namespace r2ccl {

// Arguments of a reduction.  inputs are in fold order; node_sizes splits inputs into nodes.
struct Fold {
  std::byte* out;
  const std::byte* const* inputs;
  const std::uint16_t* node_sizes;
  std::size_t nodes;
  std::size_t ranks;
  std::size_t count;  // elements of each input
};

using Kernel = void (*)(const Fold&);

// Kernels indexed by DType and ReduceOp, in the order of the enums.  avg of boolean is null.
struct KernelTable {
  Kernel kernels[9][5];
};

extern const KernelTable portable_kernels;
#if defined(__x86_64__)
extern const KernelTable avx2_kernels;
extern const KernelTable avx512_kernels;
#endif

}  // namespace r2ccl
