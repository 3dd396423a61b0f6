// The kernels themselves; launched through the driver, from the fat binary that this becomes.
#include "device/kernel_bodies.hpp"

namespace r2ccl::device {
namespace {

struct ThreadBlock : Spinning {
  __device__ void sync() const { __syncthreads(); }
};

__device__ Place here() { return {blockIdx.x, gridDim.x, threadIdx.x, blockDim.x}; }

}  // namespace

// The host launches them by these names, with these arguments (stream_communicator.cc).
extern "C" __global__ void r2ccl_stage(Mailbox* mailbox, DeviceState* state, Staging staging,
                                       const std::byte* source, Rows rows, std::uint32_t plan,
                                       bool last) {
  __shared__ Shared shared;
  stage(here(), ThreadBlock{}, shared, *mailbox, *state, staging, source, rows, plan, last);
}

extern "C" __global__ void r2ccl_deliver(const Mailbox* mailbox, const DeviceState* state,
                                         Staging staging, std::byte* target, Rows rows,
                                         std::uint32_t lag) {
  __shared__ Shared shared;
  deliver(here(), ThreadBlock{}, shared, *mailbox, *state, staging, target, rows, lag);
}

}  // namespace r2ccl::device
