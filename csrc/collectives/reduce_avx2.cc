// Kernels for x86-64 with AVX2 and F16C; compiled with both instruction sets enabled.
#if defined(__x86_64__)

#define R2CCL_ISA avx2
#define R2CCL_VECTOR_BYTES 32
#include "collectives/reduce_kernels.hpp"

namespace r2ccl {

constinit const KernelTable avx2_kernels = avx2::make_table();

}  // namespace r2ccl

#endif
