#include "device/kernel_image.hpp"

#if defined(R2CCL_KERNEL_IMAGE)

// Embeds a file as read-only bytes from `name`_begin to `name`_end, followed by a zero byte.
#define R2CCL_EMBED(name, file)                                                \
  asm(".pushsection .rodata." #name                                            \
      ", \"a\"\n"                                                              \
      ".balign 64\n"                                                           \
      ".globl " #name "_begin, " #name                                         \
      "_end\n"                                                                 \
      ".hidden " #name "_begin, " #name "_end\n" #name                         \
      "_begin:\n"                                                              \
      ".incbin \"" file                                                        \
      "\"\n"                                                                   \
      ".byte 0\n" #name                                                        \
      "_end:\n"                                                                \
      ".popsection\n");                                                        \
  extern "C" {                                                                 \
  extern const std::byte name##_begin[] __attribute__((visibility("hidden"))); \
  extern const std::byte name##_end[] __attribute__((visibility("hidden")));   \
  }

R2CCL_EMBED(r2ccl_kernel_image, R2CCL_KERNEL_IMAGE)
R2CCL_EMBED(r2ccl_kernel_text, R2CCL_KERNEL_TEXT)

#endif

namespace r2ccl::device {

cuda::Image kernel_image() {
#if defined(R2CCL_KERNEL_IMAGE)
  return {.binary = {r2ccl_kernel_image_begin, r2ccl_kernel_image_end},
          .text = {r2ccl_kernel_text_begin, r2ccl_kernel_text_end}};
#else
  return {};
#endif
}

}  // namespace r2ccl::device
