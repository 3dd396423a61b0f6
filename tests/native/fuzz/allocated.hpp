// Bytes that the program has allocated, for bounds of memory.
#pragma once

#include <cstddef>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define R2CCL_COUNTS_ALLOCATIONS
#include <sanitizer/allocator_interface.h>
#endif
#endif

namespace r2ccl::fuzz {

// Returns 0 without clang's AddressSanitizer: every bound then holds.
inline std::size_t allocated_bytes() {
#ifdef R2CCL_COUNTS_ALLOCATIONS
  return __sanitizer_get_current_allocated_bytes();
#else
  return 0;
#endif
}

}  // namespace r2ccl::fuzz
