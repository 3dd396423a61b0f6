// Kernels for any processor: 16-byte vectors, mapped to SSE2 or NEON by the compiler.
#define R2CCL_ISA portable
#define R2CCL_VECTOR_BYTES 16
#include "collectives/reduce_kernels.hpp"

namespace r2ccl {

constinit const KernelTable portable_kernels = portable::make_table();

}  // namespace r2ccl
