// Kernels for x86-64 with AVX-512 (F, BW, VL, DQ); compiled with these sets enabled.
#if defined(__x86_64__)

#define R2CCL_ISA avx512
#define R2CCL_VECTOR_BYTES 64
#include "collectives/reduce_kernels.hpp"

namespace r2ccl {

constinit const KernelTable avx512_kernels = avx512::make_table();

}  // namespace r2ccl

#endif
