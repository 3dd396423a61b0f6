// Collectives on GPU memory, in the order of a stream.  Kernels stage the input and post the
// collective; the proxy carries the collective out on a communicator of the host; kernels deliver
// the result.  Staging memory is pinned host memory.  Large transfers are staged in GPU memory if
// NICs reach GPU memory (GPUDirect).  The ranks of a node may first reduce their inputs in shared
// GPU memory; each rank then reduces a shard.  A graph may capture all of these kernels.  A replay
// of the graph repeats the collectives without further calls.
#pragma once

#include <sys/types.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "device/direct_bodies.hpp"
#include "device/direct_staging.hpp"
#include "device/exchange_bodies.hpp"
#include "device/kernel_image.hpp"
#include "device/node_exchange.hpp"
#include "device/plan_runner.hpp"
#include "device/proxy.hpp"
#include "drivers/cuda_device.hpp"
#include "engine/communicator.hpp"

namespace r2ccl::device {

struct StreamOptions {
  std::string library = "libcuda.so.1";
  int device = 0;
  // Bytes of staging memory for an input, and again for a result.  Larger collectives run in
  // slices.  Must be equal on all ranks.
  std::uint64_t staging_bytes = 8U << 20U;
  NodeOptions node{};
  DirectOptions direct{};
  ProxyOptions proxy{};
  cuda::Image image = kernel_image();
};

// Thread-safe: a lock serialises the calls.  Kernels of different calls must not overlap, so a
// caller of several streams must order the streams by events.  The status of a call tells whether
// the work is in the stream; failure() tells whether results are valid.
class StreamCommunicator {
 public:
  // Creates the communicator; collective.  `communicator` has no other user, and outlives close().
  // create() waits for all work of the GPU.  If ranks share a GPU, no rank may begin work before
  // all ranks have been created.
  static Result<std::unique_ptr<StreamCommunicator>> create(Communicator& communicator,
                                                            const StreamOptions& options);
  ~StreamCommunicator();
  StreamCommunicator(const StreamCommunicator&) = delete;
  StreamCommunicator& operator=(const StreamCommunicator&) = delete;

  // The collectives of Communicator, on device addresses; counts in elements.
  Status all_reduce(cuda::Stream stream, cuda::Address in, cuda::Address out, std::size_t count,
                    DType dtype, ReduceOp op, Algorithm algorithm);
  Status all_gatherv(cuda::Stream stream, cuda::Address in, cuda::Address out,
                     std::span<const std::size_t> counts, DType dtype);
  Status reduce_scatterv(cuda::Stream stream, cuda::Address in, cuda::Address out,
                         std::span<const std::size_t> counts, DType dtype, ReduceOp op);
  Status broadcast(cuda::Stream stream, cuda::Address data, std::size_t count, DType dtype,
                   int root);
  Status gather(cuda::Stream stream, cuda::Address in, cuda::Address out,
                std::span<const std::size_t> counts, DType dtype, int root);
  // Sends `count` elements to each rank, and receives `count` elements from each rank.
  Status all_to_all(cuda::Stream stream, cuda::Address in, cuda::Address out, std::size_t count,
                    DType dtype);
  Status send_to(cuda::Stream stream, cuda::Address data, std::size_t count, DType dtype, int peer);
  Status receive_from(cuda::Stream stream, cuda::Address data, std::size_t count, DType dtype,
                      int peer);
  // Makes later work of the stream wait for all ranks.
  Status barrier(cuda::Stream stream);

  // ---- the comparison of positions (R2CCL_CONSENSUS), in the order of the stream ----
  // Without effect if it is off; see Communicator.  A stream that is being captured is refused.
  // Ends the open step and begins step `step`.  Without `compare` the open step ends without a
  // comparison.
  Status begin_step(cuda::Stream stream, std::uint32_t step, std::string about,
                    bool compare = true);
  // Ends the open step: ranks compare its calls, captured calls included, once the stream gets
  // here.  No later work of the stream waits for the comparison; await_steps() does.
  Status end_step(cuda::Stream stream);
  // Makes a rank that replays another captured graph than other ranks an error; see Communicator.
  void compare_captures();
  // Returns the number of steps whose end was enqueued.
  [[nodiscard]] std::uint64_t steps_ended();
  // Waits until the first `steps` of these steps were compared; returns failure().
  [[nodiscard]] Status await_steps(std::uint64_t steps);

  // Gathers `count` elements of each rank, but leaves the shards in staging memory.  Kernels of the
  // caller, next in the stream, wait for the shards and read them; see slots().  Returns an error
  // if a shard exceeds Slots::most_bytes.
  Status gather_slots(cuda::Stream stream, cuda::Address in, std::size_t count, DType dtype);
  // Addresses of the shards of gather_slots().  An entry has the shards of all ranks, contiguous in
  // rank order.  `sequence` is in device memory, `arrived` and `abort` are in host memory.
  struct Slots {
    cuda::Address base = 0;         // entry 0; collective s is in entry s % ring
    cuda::Address direct_base = 0;  // entry 0 for shards of `direct_from` bytes or more; 0 = none
    std::uint64_t direct_from = 0;
    std::uint64_t entry_bytes = 0;  // distance of two entries
    std::uint64_t most_bytes = 0;   // largest shard, bytes
    cuda::Address sequence = 0;
    const Word* arrived = nullptr;
    const Word* abort = nullptr;
  };
  [[nodiscard]] Slots slots() const;

  // Returns why ranks of the node do not exchange; ok if the exchange is active.
  [[nodiscard]] const Status& exchange() const { return node_.failure(); }
  // Returns why GPUDirect is unused; ok if large transfers use GPUDirect.
  [[nodiscard]] const Status& direct() const { return direct_.failure(); }

  // Returns ok in the process that made the communicator.  In a forked child, this call and all
  // calls below or above return invalid_argument.
  [[nodiscard]] Status check_origin() const { return origin_.check("communicator"); }
  // Returns the error that has ended the communicator; ok before.  Results after an error are void.
  [[nodiscard]] Status failure();
  // Announces the replay of a graph: the proxy polls without a pause for a while.
  Status wake();
  // Waits for all work in the streams, then ends the communicator; idempotent.
  void close();

 private:
  // A caller's buffer: contiguous shards, counts in elements.
  struct Shards {
    cuda::Address address = 0;
    std::span<const std::size_t> counts;
  };

  // A slice: at most `most` elements of each shard, from element `first` on.
  struct Slice {
    std::size_t first;
    std::size_t most;
    std::size_t element;  // bytes per element

    [[nodiscard]] std::size_t of(std::size_t count) const {
      return std::min(count - std::min(count, first), most);
    }
    [[nodiscard]] std::uint64_t bytes_of(std::size_t count) const { return of(count) * element; }
  };
  struct Copy {
    cuda::Address address = 0;
    Rows rows;
  };
  StreamCommunicator(Communicator& communicator, const StreamOptions& options);
  Status open(const StreamOptions& options);

  [[nodiscard]] Mailbox& mailbox() const;
  // Returns failure(), or ok while another thread is in a call.
  [[nodiscard]] Status failure_unless_busy();
  [[nodiscard]] Status whole() const;  // like failure(); requires an open communicator

  // Begins a call, with the lock held.  Returns whether the stream is being captured.
  Result<bool> begin(cuda::Stream stream);
  // Puts a collective into the stream, in slices that are the same on all ranks.  `in` and `out`
  // may have no shards on this rank.
  Status enqueue(cuda::Stream stream, const Plan& plan, const Shards& in, const Shards& out);
  // Posts slice n + 1 before it receives slice n, so that the proxy carries out a slice while
  // kernels stage the next.  `receive` gets the number of slices posted after its slice.
  template <typename Post, typename Receive>
  static Status in_slices(std::size_t largest, std::size_t most, std::size_t element,
                          const Post& post, const Receive& receive) {
    std::optional<Slice> before;
    for (std::size_t first = 0; first == 0 || first < largest; first += most) {
      const Slice slice{first, most, element};
      R2CCL_TRY(post(slice));
      if (before) R2CCL_TRY(receive(*before, 1U));
      before = slice;
    }
    return receive(*before, 0U);
  }
  // Launches the staging of a slice.  `offset`: first byte of the data in an entry.
  Status stage(cuda::Stream stream, Buffers& at, const Shards& in, const Slice& slice,
               std::uint64_t offset, std::uint32_t plan);
  // Launches the delivery of a slice.  `lag`: see deliver() in kernel_bodies.hpp.
  Status deliver(cuda::Stream stream, Buffers& at, const Shards& out, const Slice& slice,
                 std::uint32_t lag);
  // Returns the offset in an entry of the own shard of an all-gather's result.
  [[nodiscard]] std::uint64_t own_offset(const Plan& gather, const Slice& slice) const;
  [[nodiscard]] Communicator& among(const Plan& plan) const {
    return plan.inter_node ? *node_.inter_node() : communicator_;
  }
  // Returns the largest shard of a slice, in bytes; see shard_bytes().
  [[nodiscard]] std::uint64_t slice_bytes(std::size_t shards) const;
  Status begin_numbers();
  // Returns the copies of a slice; shards of equal size become a single copy.
  static std::vector<Copy> copies(const Shards& shards, const Slice& slice);
  Status launch(cuda::Function kernel, cuda::Stream stream, std::uint64_t bytes, void** arguments);

  // Enqueues an all-reduce, an all-gather or a reduce-scatter with the exchange inside the node.
  Status in_node(cuda::Stream stream, const Plan& plan, cuda::Address in, cuda::Address out);
  Status all_reduce_in_node(cuda::Stream stream, const Plan& plan, cuda::Address in,
                            cuda::Address out, bool capturing);
  Status all_gather_in_node(cuda::Stream stream, const Plan& plan, cuda::Address in,
                            cuda::Address out, bool capturing);
  Status reduce_scatter_in_node(cuda::Stream stream, const Plan& plan, cuda::Address in,
                                cuda::Address out, bool capturing);
  Status publish_input(cuda::Stream stream, const Shards& in, const Slice& slice);
  Status local_reduce_scatter(cuda::Stream stream, Exchange& exchange, std::span<const Rows> rows,
                              const Plan& plan, std::uint32_t number);
  Status publish_result(cuda::Stream stream, Exchange& exchange, std::uint64_t bytes,
                        Reduction reduction, std::uint32_t lag);
  Status local_all_gather(cuda::Stream stream, std::span<const OutputRows> outputs,
                          cuda::Address out, std::uint64_t bytes, std::uint32_t lag);
  // Returns the rows of a rank's own unreduced shard, which goes straight to its place in the
  // result.
  [[nodiscard]] Rows in_place(std::uint32_t index, std::uint64_t bytes, std::uint64_t first) const {
    return {1, bytes, 0, staging_bytes_ + index * bytes, first};
  }
  // Returns the plan posted for the inter-node group.
  [[nodiscard]] Plan inter_node_plan(const Plan& plan) const;
  // Returns rows for the shards of these ranks: apart in the caller's buffer, contiguous in an
  // entry.
  static std::vector<Rows> rows_of(std::span<const int> ranks,
                                   std::span<const std::uint64_t> first_bytes,
                                   std::span<const std::size_t> counts, const Slice& slice);
  Status quiesce();  // waits until no local peer reads this rank's memory

  // Enqueue a collective staged in GPU memory and reduced by kernels.
  Status all_reduce_direct(cuda::Stream stream, const Plan& plan, cuda::Address in,
                           cuda::Address out);
  Status reduce_scatter_direct(cuda::Stream stream, const Plan& plan, cuda::Address in,
                               cuda::Address out);
  // Launches a copy of the own shard into the result: the rails carry only shards of other ranks.
  Status copy_own_shard(cuda::Stream stream, cuda::Address shard, std::uint32_t index,
                        std::uint64_t bytes);
  Status reduce_and_deliver(cuda::Stream stream, cuda::Address out, std::uint64_t bytes,
                            Reduction reduction, std::uint32_t lag);
  // Reduces the unreduced shards of `plan`, the reduce-scatter posted last, and posts the
  // all-gather of the sums.
  Status reduce_and_post(cuda::Stream stream, const Plan& plan, bool capturing);

  [[nodiscard]] std::span<const std::size_t> own(std::span<const std::size_t> counts) const;

  std::uint32_t add_plan(const Plan& plan, bool captured, const Slice& of);
  // With the lock held: posts a plan without data.
  Status post(cuda::Stream stream, Plan plan);
  Status post_end(cuda::Stream stream);

  Communicator& communicator_;
  const std::uint64_t staging_bytes_;
  const Origin origin_;
  std::unique_ptr<cuda::Device> device_;
  cuda::Function stage_kernel_ = nullptr;
  cuda::Function deliver_kernel_ = nullptr;
  cuda::Memory mailbox_memory_;
  cuda::Memory state_memory_;
  cuda::Memory staging_memory_;
  Buffers pinned_;

  DirectStaging direct_;
  cuda::Function reduce_and_deliver_kernel_ = nullptr;
  cuda::Function reduce_and_post_kernel_ = nullptr;

  NodeExchange node_;
  cuda::Function publish_input_kernel_ = nullptr;
  cuda::Function local_reduce_scatter_kernel_ = nullptr;
  cuda::Function stage_in_place_kernel_ = nullptr;
  cuda::Function publish_result_kernel_ = nullptr;
  cuda::Function local_all_gather_kernel_ = nullptr;
  cuda::Function deliver_shard_kernel_ = nullptr;
  cuda::Function quiesce_kernel_ = nullptr;

  std::mutex call_mutex_;  // held during a call; protects the steps
  bool step_open_ = false;
  std::uint64_t steps_ended_ = 0;

  std::unique_ptr<PlanRunner> runner_;  // null if never opened
  std::unique_ptr<Proxy> proxy_;        // null if closed; the proxy's thread uses runner_
  Status closed_;
};

}  // namespace r2ccl::device
