// StreamCommunicator: collectives staged in GPU memory (GPUDirect).
#include <algorithm>
#include <array>
#include <numeric>

#include "device/addresses.hpp"
#include "device/stream_communicator.hpp"

namespace r2ccl::device {
namespace {

// Returns the first element of a shard.
std::size_t start_of(std::span<const std::size_t> counts, std::size_t shard) {
  const auto shards = counts.first(shard);
  return std::accumulate(shards.begin(), shards.end(), std::size_t{0});
}

}  // namespace

// The own shard is staged at this offset, in the result instead of the input, which saves a copy.
std::uint64_t StreamCommunicator::own_offset(const Plan& gather, const Slice& slice) const {
  std::uint64_t offset = staging_bytes_;
  for (int rank = 0; rank < among(gather).rank(); ++rank)
    offset += slice.bytes_of(gather.counts[static_cast<std::size_t>(rank)]);
  return offset;
}

// ---- reducing collectives ----

Status StreamCommunicator::all_reduce_direct(cuda::Stream stream, const Plan& plan,
                                             cuda::Address in, cuda::Address out) {
  R2CCL_TRY(check_origin());
  const std::lock_guard guard(call_mutex_);
  auto capturing = begin(stream);
  if (!capturing.ok()) return capturing.take_status();
  const auto ranks = static_cast<std::uint32_t>(communicator_.size());
  const std::size_t element = size_of(plan.dtype);
  const std::size_t count = plan.counts.front();
  const Shards all_in{in, {&count, 1}};
  const Shards all_out{out, {&count, 1}};
  Plan posted = plan;
  posted.direct = true;
  if (ranks == 2) {  // both ranks gather both inputs, and each reduces all data
    posted.collective = Collective::all_gather;
    posted.counts = {count, count};
    return in_slices(
        count, slice_bytes(ranks) / element, element,
        [&](const Slice& slice) {
          return stage(stream, direct_.buffers(), all_in, slice, own_offset(posted, slice),
                       add_plan(posted, capturing.value(), slice));
        },
        [&](const Slice& slice, std::uint32_t lag) {
          const std::uint64_t bytes = slice.bytes_of(count);
          return reduce_and_deliver(stream, out + slice.first * element, bytes,
                                    {ranks, plan.dtype, plan.op, bytes}, lag);
        });
  }
  // Slices run one after another: kernels take little time compared to the rails.
  posted.collective = Collective::reduce_scatter;
  posted.unreduced = true;
  const std::size_t most =
      (staging_bytes_ - ranks * line_bytes) / line_bytes * line_bytes / element;
  for (std::size_t first = 0; first < count; first += most) {
    const Slice slice{first, most, element};
    const EvenShards shards = EvenShards::of(slice.of(count), element, ranks);
    posted.counts.clear();
    for (std::uint32_t rank = 0; rank < ranks; ++rank) posted.counts.push_back(shards.size(rank));
    const auto me = static_cast<std::uint32_t>(communicator_.rank());
    const std::uint64_t bytes = shards.size(me) * element;
    R2CCL_TRY(copy_own_shard(stream, in + (first + shards.first(me)) * element, me, bytes));
    R2CCL_TRY(stage(stream, direct_.buffers(), all_in, slice, 0,
                    add_plan(posted, capturing.value(), {0, most, element})));
    R2CCL_TRY(reduce_and_post(stream, posted, capturing.value()));
    R2CCL_TRY(deliver(stream, direct_.buffers(), all_out, slice, 0));
  }
  return {};
}

Status StreamCommunicator::reduce_scatter_direct(cuda::Stream stream, const Plan& plan,
                                                 cuda::Address in, cuda::Address out) {
  R2CCL_TRY(check_origin());
  const std::lock_guard guard(call_mutex_);
  auto capturing = begin(stream);
  if (!capturing.ok()) return capturing.take_status();
  const std::size_t element = size_of(plan.dtype);
  const auto ranks = static_cast<std::uint32_t>(plan.counts.size());
  const std::size_t mine = own(plan.counts).front();
  Plan posted = plan;
  posted.direct = posted.unreduced = true;
  return in_slices(
      *std::ranges::max_element(plan.counts), slice_bytes(ranks) / element, element,
      [&](const Slice& slice) {
        const auto me = static_cast<std::uint32_t>(communicator_.rank());
        const cuda::Address shard = in + start_of(plan.counts, me) * element;
        R2CCL_TRY(copy_own_shard(stream, shard + slice.first * element, me, slice.bytes_of(mine)));
        return stage(stream, direct_.buffers(), {in, plan.counts}, slice, 0,
                     add_plan(posted, capturing.value(), slice));
      },
      [&](const Slice& slice, std::uint32_t lag) {
        const std::uint64_t bytes = slice.bytes_of(mine);
        return reduce_and_deliver(stream, out + slice.first * element, bytes,
                                  {ranks, plan.dtype, plan.op, bytes}, lag);
      });
}

Status StreamCommunicator::copy_own_shard(cuda::Stream stream, cuda::Address shard,
                                          std::uint32_t index, std::uint64_t bytes) {
  auto* mailbox = at<Mailbox>(mailbox_memory_.address());
  auto* state = at<DeviceState>(state_memory_.address());
  const auto* source = at<const std::byte>(shard);
  Rows rows = in_place(index, bytes, 0);
  std::uint32_t none = 0;
  bool last = false;
  std::array<void*, 7> arguments{&mailbox, &state, &direct_.buffers().device, &source, &rows,
                                 &none,    &last};
  return launch(stage_kernel_, stream, bytes, arguments.data());
}

Status StreamCommunicator::reduce_and_deliver(cuda::Stream stream, cuda::Address out,
                                              std::uint64_t bytes, Reduction reduction,
                                              std::uint32_t lag) {
  auto* mailbox = at<Mailbox>(mailbox_memory_.address());
  auto* state = at<DeviceState>(state_memory_.address());
  auto* target = at<std::byte>(out);
  std::array<void*, 7> arguments{&mailbox,   &state, &direct_.buffers().device, &target, &bytes,
                                 &reduction, &lag};
  return launch(reduce_and_deliver_kernel_, stream, bytes * reduction.operands, arguments.data());
}

Status StreamCommunicator::reduce_and_post(cuda::Stream stream, const Plan& plan, bool capturing) {
  auto* mailbox = at<Mailbox>(mailbox_memory_.address());
  auto* state = at<DeviceState>(state_memory_.address());
  const std::size_t element = size_of(plan.dtype);
  const Slice whole_of{0, *std::ranges::max_element(plan.counts), element};
  Plan gather = plan;
  gather.collective = Collective::all_gather;
  gather.unreduced = false;
  const auto ranks = static_cast<std::uint32_t>(plan.counts.size());
  std::uint64_t bytes = plan.counts[static_cast<std::size_t>(among(plan).rank())] * element;
  // Offset of the shard within the result.
  std::uint64_t offset = own_offset(gather, whole_of) - staging_bytes_;
  Reduction reduction{ranks, plan.dtype, plan.op, bytes};
  std::uint32_t number = add_plan(gather, capturing, whole_of);
  const Inbox* inbox =
      plan.inter_node ? node_.through(false).node.inboxes[node_.own_local_rank()] : nullptr;
  std::array<void*, 8> arguments{
      &mailbox, &state, &direct_.buffers().device, &inbox, &bytes, &offset, &reduction, &number};
  return launch(reduce_and_post_kernel_, stream, bytes * ranks, arguments.data());
}

}  // namespace r2ccl::device
