// The compiled kernels of kernels.cu, embedded in builds with nvcc.
#pragma once

#include "drivers/cuda_device.hpp"

namespace r2ccl::device {

// Returns the kernels; empty in a build without nvcc.
[[nodiscard]] cuda::Image kernel_image();

}  // namespace r2ccl::device
