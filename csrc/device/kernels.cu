// The CUDA kernels.  The host launches the kernels through the driver, from the embedded fat binary
// of this file.
#include "device/direct_bodies.hpp"
#include "device/exchange_bodies.hpp"

namespace r2ccl::device {
namespace {

struct ThreadBlock : SpinWait {
  __device__ void sync() const { __syncthreads(); }
};

__device__ ThreadPosition here() { return {blockIdx.x, gridDim.x, threadIdx.x, blockDim.x}; }

}  // namespace

// Names and arguments must match the launches in stream_communicator.cc, stream_direct.cc and
// stream_exchange.cc.
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

extern "C" __global__ void r2ccl_publish_input(const __grid_constant__ Exchange exchange,
                                               const std::byte* source, Rows rows, bool last) {
  __shared__ Shared shared;
  publish_input(here(), ThreadBlock{}, shared, exchange, source, rows, last);
}

extern "C" __global__ void r2ccl_local_reduce_scatter(const __grid_constant__ Exchange exchange,
                                                      Rows rows, DType dtype, ReduceOp op,
                                                      std::uint32_t plan, bool last) {
  __shared__ Shared shared;
  local_reduce_scatter(here(), ThreadBlock{}, shared, exchange, rows, dtype, op, plan, last);
}

extern "C" __global__ void r2ccl_stage_in_place(const __grid_constant__ Exchange exchange,
                                                const std::byte* source, std::uint64_t bytes,
                                                std::uint64_t offset, std::uint32_t plan) {
  __shared__ Shared shared;
  stage_in_place(here(), ThreadBlock{}, shared, exchange, source, bytes, offset, plan);
}

extern "C" __global__ void r2ccl_publish_result(const __grid_constant__ Exchange exchange,
                                                std::uint64_t bytes, Reduction reduction,
                                                std::uint32_t lag) {
  __shared__ Shared shared;
  publish_result(here(), ThreadBlock{}, shared, exchange, bytes, reduction, lag);
}

extern "C" __global__ void r2ccl_local_all_gather(const __grid_constant__ Exchange exchange,
                                                  const __grid_constant__ OutputRows outputs,
                                                  std::byte* target, std::uint32_t lag, bool last) {
  __shared__ Shared shared;
  local_all_gather(here(), ThreadBlock{}, shared, exchange, outputs, target, lag, last);
}

extern "C" __global__ void r2ccl_deliver_shard(const __grid_constant__ Exchange exchange,
                                               std::byte* target, std::uint64_t bytes,
                                               Reduction reduction, std::uint32_t lag) {
  __shared__ Shared shared;
  deliver_shard(here(), ThreadBlock{}, shared, exchange, target, bytes, reduction, lag);
}

extern "C" __global__ void r2ccl_reduce_and_deliver(const Mailbox* mailbox,
                                                    const DeviceState* state, Staging staging,
                                                    std::byte* target, std::uint64_t bytes,
                                                    Reduction reduction, std::uint32_t lag) {
  __shared__ Shared shared;
  reduce_and_deliver(here(), ThreadBlock{}, shared, *mailbox, *state, staging, target, bytes,
                     reduction, lag);
}

extern "C" __global__ void r2ccl_reduce_and_post(Mailbox* mailbox, DeviceState* state,
                                                 Staging staging, const Inbox* inbox,
                                                 std::uint64_t bytes, std::uint64_t offset,
                                                 Reduction reduction, std::uint32_t plan) {
  __shared__ Shared shared;
  reduce_and_post(here(), ThreadBlock{}, shared, *mailbox, *state, staging, inbox, bytes, offset,
                  reduction, plan);
}

extern "C" __global__ void r2ccl_quiesce(const __grid_constant__ Exchange exchange) {
  if (threadIdx.x == 0) quiesce(ThreadBlock{}, exchange);
}

}  // namespace r2ccl::device
