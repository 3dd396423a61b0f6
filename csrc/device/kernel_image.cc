#include "device/kernel_image.hpp"

#if defined(R2CCL_KERNEL_IMAGE)

asm(".pushsection .rodata.r2ccl_kernel_image, \"a\"\n"
    ".balign 64\n"
    ".globl r2ccl_kernel_image_begin, r2ccl_kernel_image_end\n"
    ".hidden r2ccl_kernel_image_begin, r2ccl_kernel_image_end\n"
    "r2ccl_kernel_image_begin:\n"
    ".incbin \"" R2CCL_KERNEL_IMAGE
    "\"\n"
    "r2ccl_kernel_image_end:\n"
    ".popsection\n");

extern "C" {
extern const std::byte r2ccl_kernel_image_begin[] __attribute__((visibility("hidden")));
extern const std::byte r2ccl_kernel_image_end[] __attribute__((visibility("hidden")));
}

#endif

namespace r2ccl::device {

std::span<const std::byte> kernel_image() {
#if defined(R2CCL_KERNEL_IMAGE)
  return {r2ccl_kernel_image_begin, r2ccl_kernel_image_end};
#else
  return {};
#endif
}

}  // namespace r2ccl::device
