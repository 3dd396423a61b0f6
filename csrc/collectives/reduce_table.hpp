// What reduce.cc and the kernels of each instruction set agree on.  The kernel files are compiled
// with different instruction-set flags, so this header holds types only: an inline function here
// could be emitted with AVX-512 code and then be chosen by the linker for everybody.
#pragma once

#include <cstddef>
#include <cstdint>

namespace r2ccl {

// One reduction.  inputs are in fold order; node_sizes cut them into nodes.
struct Fold {
  std::byte* out;
  const std::byte* const* inputs;
  const std::uint16_t* node_sizes;
  std::size_t nodes;
  std::size_t ranks;
  std::size_t count;  // elements of each input
};

using Kernel = void (*)(const Fold&);

// Indexed by DType and ReduceOp, in the order of those enums.  avg of boolean is null.
struct KernelTable {
  Kernel kernels[9][5];
};

extern const KernelTable portable_kernels;
#if defined(__x86_64__)
extern const KernelTable avx2_kernels;
extern const KernelTable avx512_kernels;
#endif

}  // namespace r2ccl
