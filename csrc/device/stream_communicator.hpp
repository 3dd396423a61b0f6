// Collectives on memory of a GPU, in the order of one of its streams.  Kernels stage the input and
// post it; the proxy carries it out on a communicator of the host; kernels deliver the result.
// What is staged lies in pinned memory of the host or, where NICs reach that and it is large, in
// the GPU's own (GPUDirect).  Ranks of one node may add up what they have before that, each a
// shard, in memory of their GPUs that they give each other.  All of it may be captured into a
// graph, which then needs nobody else when it is replayed.
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

#include "device/carrier.hpp"
#include "device/direct_bodies.hpp"
#include "device/direct_staging.hpp"
#include "device/exchange_bodies.hpp"
#include "device/kernel_image.hpp"
#include "device/node_exchange.hpp"
#include "device/proxy.hpp"
#include "drivers/cuda_device.hpp"
#include "engine/communicator.hpp"

namespace r2ccl::device {

struct StreamOptions {
  std::string library = "libcuda.so.1";
  int device = 0;
  // Of an input, and as much of a result; larger collectives go in slices.  The same on all ranks.
  std::uint64_t staging_bytes = 8U << 20U;
  NodeOptions node{};
  DirectOptions direct{};
  ProxyOptions proxy{};
  cuda::Image image = kernel_image();
};

// Calls are one after another, on streams that the caller has put in order.  What they return says
// whether the work is in the stream; failure() whether results are to be trusted.
class StreamCommunicator {
 public:
  // `communicator` is used by nobody else, and outlives close().  Waits for all of the GPU's work:
  // of ranks that share one none may begin before all have been made.
  static Result<std::unique_ptr<StreamCommunicator>> create(Communicator& communicator,
                                                            const StreamOptions& options);
  ~StreamCommunicator();
  StreamCommunicator(const StreamCommunicator&) = delete;
  StreamCommunicator& operator=(const StreamCommunicator&) = delete;

  // As Communicator's; addresses are the device's.
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
  // Even: `count` elements to each rank, and from each.
  Status all_to_all(cuda::Stream stream, cuda::Address in, cuda::Address out, std::size_t count,
                    DType dtype);
  Status send_to(cuda::Stream stream, cuda::Address data, std::size_t count, DType dtype, int peer);
  Status receive_from(cuda::Stream stream, cuda::Address data, std::size_t count, DType dtype,
                      int peer);
  // For the stream: what is put into it later waits.
  Status barrier(cuda::Stream stream);

  // As all_gatherv with one count for all, but the shards stay where they arrive: kernels of the
  // caller's, next in the stream, wait for them and read them (slots()).
  Status gather_slots(cuda::Stream stream, cuda::Address in, std::size_t count, DType dtype);
  // Where they do.  `sequence` is in the device's memory, the words are in the host's.
  struct Slots {
    cuda::Address base = 0;         // of entry 0; collective s is in entry s % ring
    cuda::Address direct_base = 0;  // and of shards of `direct_from` bytes or more; 0: of none
    std::uint64_t direct_from = 0;
    std::uint64_t entry_bytes = 0;  // from one entry to the next
    std::uint64_t most_bytes = 0;   // that a shard may have
    cuda::Address sequence = 0;
    const Word* arrived = nullptr;
    const Word* abort = nullptr;
  };
  [[nodiscard]] Slots slots() const;

  // Why ranks of the node do not exchange what they have; ok if they do.
  [[nodiscard]] const Status& exchange() const { return node_.failure(); }
  // Why nothing is staged in the GPU's own memory; ok if what is large is.
  [[nodiscard]] const Status& direct() const { return direct_.failure(); }

  // Why no more results come, and those since are void; ok while they do.
  [[nodiscard]] Status failure();
  // A graph is about to be replayed: the proxy looks without a pause for a while.
  void wake();
  // Waits for what is in the streams, and ends; idempotent.
  void close();

 private:
  // A buffer of the caller's: shards one after the other, in elements.
  struct Shards {
    cuda::Address address = 0;
    std::span<const std::size_t> counts;
  };

  // Of each shard `most` elements, from `first` on, or as many as there are.
  struct Slice {
    std::size_t first;
    std::size_t most;
    std::size_t element;  // bytes of one

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
  [[nodiscard]] Status whole() const;  // failure(), of one that is open

  // What every call begins with, with the lock held: whether the stream is being captured.
  Result<bool> begin(cuda::Stream stream);
  // Puts a collective into the stream, in slices that are the same on all ranks; `in` and `out` may
  // have no shards here.
  Status enqueue(cuda::Stream stream, const Plan& plan, const Shards& in, const Shards& out);
  // One behind: a slice is posted while the one before it is carried out.
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
  // `offset`: of where it is put, in an entry.
  Status stage(cuda::Stream stream, Buffers& at, const Shards& in, const Slice& slice,
               std::uint64_t offset, std::uint32_t plan);
  Status deliver(cuda::Stream stream, Buffers& at, const Shards& out, const Slice& slice,
                 std::uint32_t lag);
  // Where the own shard of an all-gather's result is, in an entry.
  [[nodiscard]] std::uint64_t own_offset(const Plan& gather, const Slice& slice) const;
  [[nodiscard]] Communicator& among(const Plan& plan) const {
    return plan.inter_node ? *node_.inter_node() : communicator_;
  }
  // Bytes that a shard may have in a slice of so many; a multiple of what a vector has, so that
  // slices lie where copies are fast.
  [[nodiscard]] std::uint64_t slice_bytes(std::size_t shards) const;
  // Shards that are alike are one copy.
  static std::vector<Copy> copies(const Shards& shards, const Slice& slice);
  Status launch(cuda::Function kernel, cuda::Stream stream, std::uint64_t bytes, void** arguments);

  // Through the node: as enqueue().  An all-reduce, an all-gather or a reduce-scatter.
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
  // What a rank sends itself among shards that stay apart: right into its place in the result.
  [[nodiscard]] Rows in_place(std::uint32_t index, std::uint64_t bytes, std::uint64_t first) const {
    return {1, bytes, 0, staging_bytes_ + index * bytes, first};
  }
  // What is posted of the ranks of this local rank.
  [[nodiscard]] Plan inter_node_plan(const Plan& plan) const;
  // The shards of these ranks: apart at the one end, one after the other at the other.
  static std::vector<Rows> rows_of(std::span<const int> ranks,
                                   std::span<const std::uint64_t> first_bytes,
                                   std::span<const std::size_t> counts, const Slice& slice);
  Status quiesce();  // nobody reads this rank's memory any more

  // As enqueue(), of what kernels add up.
  Status all_reduce_direct(cuda::Stream stream, const Plan& plan, cuda::Address in,
                           cuda::Address out);
  Status reduce_scatter_direct(cuda::Stream stream, const Plan& plan, cuda::Address in,
                               cuda::Address out);
  Status copy_own_shard(cuda::Stream stream, cuda::Address shard, std::uint32_t index,
                        std::uint64_t bytes);
  Status reduce_and_deliver(cuda::Stream stream, cuda::Address out, std::uint64_t bytes,
                            Reduction reduction, std::uint32_t lag);
  // What `plan`, a reduce-scatter that was posted last, has left apart becomes the own shard of an
  // all-gather of as many.
  Status reduce_and_post(cuda::Stream stream, const Plan& plan, bool capturing);

  [[nodiscard]] std::span<const std::size_t> own(std::span<const std::size_t> counts) const;

  std::uint32_t add_plan(const Plan& plan, bool captured, const Slice& of);

  Communicator& communicator_;
  const std::uint64_t staging_bytes_;
  const pid_t process_;
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

  std::mutex call_mutex_;  // held for a call

  std::unique_ptr<Carrier> carrier_;  // null: never opened
  std::unique_ptr<Proxy> proxy_;      // null: closed; its thread uses carrier_
  Status closed_;
};

}  // namespace r2ccl::device
