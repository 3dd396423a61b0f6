// The kernels themselves; launched through the driver, from the fat binary that this becomes.
#include "device/direct_bodies.hpp"
#include "device/exchange_bodies.hpp"

namespace r2ccl::device {
namespace {

struct ThreadBlock : Spinning {
  __device__ void sync() const { __syncthreads(); }
};

__device__ ThreadPosition here() { return {blockIdx.x, gridDim.x, threadIdx.x, blockDim.x}; }

}  // namespace

// The host launches them by these names, with these arguments (stream_communicator.cc,
// stream_exchange.cc).
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

extern "C" __global__ void r2ccl_share(const __grid_constant__ Exchange exchange,
                                       const std::byte* source, Rows rows, bool last) {
  __shared__ Shared shared;
  share(here(), ThreadBlock{}, shared, exchange, source, rows, last);
}

extern "C" __global__ void r2ccl_sum_up(const __grid_constant__ Exchange exchange, Rows rows,
                                        DType dtype, ReduceOp op, std::uint32_t plan, bool last) {
  __shared__ Shared shared;
  sum_up(here(), ThreadBlock{}, shared, exchange, rows, dtype, op, plan, last);
}

extern "C" __global__ void r2ccl_bring(const __grid_constant__ Exchange exchange,
                                       const std::byte* source, std::uint64_t bytes,
                                       std::uint64_t offset, std::uint32_t plan) {
  __shared__ Shared shared;
  bring(here(), ThreadBlock{}, shared, exchange, source, bytes, offset, plan);
}

extern "C" __global__ void r2ccl_spread(const __grid_constant__ Exchange exchange,
                                        std::uint64_t bytes, Sum sum, std::uint32_t lag) {
  __shared__ Shared shared;
  spread(here(), ThreadBlock{}, shared, exchange, bytes, sum, lag);
}

extern "C" __global__ void r2ccl_collect(const __grid_constant__ Exchange exchange,
                                         const __grid_constant__ Results results, std::byte* target,
                                         std::uint32_t lag, bool last) {
  __shared__ Shared shared;
  collect(here(), ThreadBlock{}, shared, exchange, results, target, lag, last);
}

extern "C" __global__ void r2ccl_take(const __grid_constant__ Exchange exchange, std::byte* target,
                                      std::uint64_t bytes, Sum sum, std::uint32_t lag) {
  __shared__ Shared shared;
  take(here(), ThreadBlock{}, shared, exchange, target, bytes, sum, lag);
}

extern "C" __global__ void r2ccl_deliver_sum(const Mailbox* mailbox, const DeviceState* state,
                                             Staging staging, std::byte* target,
                                             std::uint64_t bytes, Sum sum, std::uint32_t lag) {
  __shared__ Shared shared;
  deliver_sum(here(), ThreadBlock{}, shared, *mailbox, *state, staging, target, bytes, sum, lag);
}

extern "C" __global__ void r2ccl_combine(Mailbox* mailbox, DeviceState* state, Staging staging,
                                         const Inbox* inbox, std::uint64_t bytes,
                                         std::uint64_t offset, Sum sum, std::uint32_t plan) {
  __shared__ Shared shared;
  combine(here(), ThreadBlock{}, shared, *mailbox, *state, staging, inbox, bytes, offset, sum,
          plan);
}

extern "C" __global__ void r2ccl_depart(const __grid_constant__ Exchange exchange) {
  if (threadIdx.x == 0) depart(ThreadBlock{}, exchange);
}

}  // namespace r2ccl::device
