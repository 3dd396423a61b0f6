// The kernels of kernels.cu, embedded where they were built with nvcc.
#pragma once

#include "drivers/cuda_device.hpp"

namespace r2ccl::device {

// Empty: this build has none.
[[nodiscard]] cuda::Image kernel_image();

}  // namespace r2ccl::device
