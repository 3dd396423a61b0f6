// The kernels of kernels.cu as a fat binary, embedded where they were built with nvcc.
#pragma once

#include <cstddef>
#include <span>

namespace r2ccl::device {

// Empty: this build has none.
[[nodiscard]] std::span<const std::byte> kernel_image();

}  // namespace r2ccl::device
