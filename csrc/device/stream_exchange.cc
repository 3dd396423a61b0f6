// StreamCommunicator: collectives with the exchange inside the node.
#include <algorithm>
#include <array>

#include "device/addresses.hpp"
#include "device/stream_communicator.hpp"

namespace r2ccl::device {
namespace {

// Returns the first byte of each of several contiguous shards.
template <typename BytesOf>
std::vector<std::uint64_t> starts(std::span<const std::size_t> counts, const BytesOf& bytes_of) {
  std::vector<std::uint64_t> made;
  std::uint64_t next = 0;
  for (const std::size_t count : counts) {
    made.push_back(next);
    next += bytes_of(count);
  }
  return made;
}

}  // namespace

// ---- collectives ----

Status StreamCommunicator::in_node(cuda::Stream stream, const Plan& plan, cuda::Address in,
                                   cuda::Address out) {
  R2CCL_TRY(check_origin());
  const std::lock_guard guard(call_mutex_);
  auto capturing = begin(stream);
  if (!capturing.ok()) return capturing.take_status();
  if (plan.collective == Collective::all_reduce)
    return all_reduce_in_node(stream, plan, in, out, capturing.value());
  if (plan.collective == Collective::all_gather)
    return all_gather_in_node(stream, plan, in, out, capturing.value());
  return reduce_scatter_in_node(stream, plan, in, out, capturing.value());
}

Status StreamCommunicator::all_reduce_in_node(cuda::Stream stream, const Plan& plan,
                                              cuda::Address in, cuda::Address out, bool capturing) {
  const std::size_t element = size_of(plan.dtype);
  const std::size_t count = plan.counts.front();
  const std::uint32_t own = node_.own_local_rank();
  const auto nodes = static_cast<std::uint32_t>(node_.nodes().size());
  const bool two = nodes == 2;
  Plan posted = plan;
  posted.inter_node = true;
  posted.direct = direct_.adds_up(
      direct_.inter_node(), count * element / node_.ranks() / (two ? 1 : nodes), plan.op, nodes);
  // With 2 nodes, both nodes gather both shards, and each node reduces all data itself.  With more
  // nodes, each node reduces a part of the shard, and the nodes then gather the sums.
  posted.unreduced = posted.direct && !two;
  if (posted.direct) posted.collective = two ? Collective::all_gather : Collective::reduce_scatter;
  Exchange& exchange = node_.through(posted.direct);
  const std::uint64_t slice_of = posted.direct ? slice_bytes(2) : staging_bytes_;
  const auto shards_of = [&](const Slice& slice) {
    return EvenShards::of(slice.of(count), element, exchange.node.ranks);
  };
  const auto rows_of_shard = [&](const EvenShards& shards, std::uint32_t rank) {
    return Rows{1, shards.size(rank) * element, 0, 0, shards.first(rank) * element};
  };
  const auto post = [&](const Slice& slice) {
    const EvenShards shards = shards_of(slice);
    const std::size_t mine = shards.size(own);
    posted.counts = {mine};
    if (posted.direct && two) posted.counts = {mine, mine};
    if (posted.unreduced) {
      const EvenShards sub_shards = EvenShards::of(mine, element, nodes);
      posted.counts.clear();
      for (std::uint32_t node = 0; node < nodes; ++node)
        posted.counts.push_back(sub_shards.size(node));
    }
    const Slice all{0, mine, element};
    R2CCL_TRY(publish_input(stream, {in, {&count, 1}}, slice));
    std::vector<Rows> rows{rows_of_shard(shards, own)};
    if (posted.direct && two) rows[0].offset = own_offset(posted, all);
    if (posted.unreduced) {
      const EvenShards sub_shards = EvenShards::of(mine, element, nodes);
      const auto me = static_cast<std::uint32_t>(node_.inter_node()->rank());
      rows.insert(rows.begin(), in_place(me, sub_shards.size(me) * element,
                                         rows[0].first + sub_shards.first(me) * element));
    }
    return local_reduce_scatter(stream, exchange, rows, plan, add_plan(posted, capturing, all));
  };
  const auto receive = [&](const Slice& slice, std::uint32_t lag) {
    const EvenShards shards = shards_of(slice);
    const std::uint64_t bytes = shards.size(own) * element;
    OutputRows outputs{};
    for (std::uint32_t rank = 0; rank < exchange.node.ranks; ++rank)
      outputs.of[rank] = rows_of_shard(shards, rank);
    const Reduction reduction =
        posted.direct && two ? Reduction{nodes, plan.dtype, plan.op, bytes} : Reduction();
    R2CCL_TRY(publish_result(stream, exchange, bytes, reduction, lag));
    return local_all_gather(stream, {&outputs, 1}, out + slice.first * element,
                            slice.bytes_of(count), lag);
  };
  if (!posted.unreduced) return in_slices(count, slice_of / element, element, post, receive);
  const std::size_t most = slice_of / element;
  for (std::size_t first = 0; first < count; first += most) {
    const Slice slice{first, most, element};
    R2CCL_TRY(post(slice));
    R2CCL_TRY(reduce_and_post(stream, posted, capturing));
    R2CCL_TRY(receive(slice, 0));
  }
  return {};
}

Status StreamCommunicator::all_gather_in_node(cuda::Stream stream, const Plan& plan,
                                              cuda::Address in, cuda::Address out, bool capturing) {
  const std::size_t element = size_of(plan.dtype);
  const std::size_t largest = *std::ranges::max_element(plan.counts);
  const std::size_t mine = own(plan.counts).front();
  Plan posted = inter_node_plan(plan);
  posted.direct = direct_.goes(direct_.inter_node(), largest * element);
  Exchange& exchange = node_.through(posted.direct);
  return in_slices(
      largest, slice_bytes(node_.nodes().size()) / element, element,
      [&](const Slice& slice) {
        const auto* source = at<const std::byte>(in + slice.first * element);
        std::uint64_t bytes = slice.bytes_of(mine);
        std::uint64_t offset = own_offset(posted, slice) - staging_bytes_;
        std::uint32_t number = add_plan(posted, capturing, slice);
        std::array<void*, 5> arguments{&exchange, &source, &bytes, &offset, &number};
        return launch(stage_in_place_kernel_, stream, bytes, arguments.data());
      },
      [&](const Slice& slice, std::uint32_t lag) {
        std::uint64_t bytes = 0;
        for (const std::size_t count : posted.counts) bytes += slice.bytes_of(count);
        R2CCL_TRY(publish_result(stream, exchange, bytes, Reduction(), lag));
        const auto first_bytes =
            starts(plan.counts, [&](std::size_t count) { return count * element; });
        std::vector<OutputRows> outputs;
        for (std::size_t local_rank = 0; local_rank < exchange.node.ranks; ++local_rank) {
          const auto rows =
              rows_of(node_.inter_node_ranks(local_rank), first_bytes, plan.counts, slice);
          outputs.resize(std::max(outputs.size(), rows.size()), OutputRows{});
          for (std::size_t i = 0; i < rows.size(); ++i) outputs[i].of[local_rank] = rows[i];
        }
        return local_all_gather(stream, outputs, out + slice.first * element,
                                bytes * exchange.node.ranks, lag);
      });
}

Status StreamCommunicator::reduce_scatter_in_node(cuda::Stream stream, const Plan& plan,
                                                  cuda::Address in, cuda::Address out,
                                                  bool capturing) {
  const std::size_t element = size_of(plan.dtype);
  const std::size_t largest = *std::ranges::max_element(plan.counts);
  const std::size_t mine = own(plan.counts).front();
  const auto nodes = static_cast<std::uint32_t>(node_.nodes().size());
  Plan posted = inter_node_plan(plan);
  posted.direct = posted.unreduced =
      direct_.adds_up(direct_.inter_node(), largest * element, plan.op, nodes);
  Exchange& exchange = node_.through(posted.direct);
  return in_slices(
      largest, slice_bytes(plan.counts.size()) / element, element,
      [&](const Slice& slice) {
        R2CCL_TRY(publish_input(stream, {in, plan.counts}, slice));
        const auto first_bytes =  // contiguous in an entry, like copies()
            starts(plan.counts, [&](std::size_t count) { return slice.bytes_of(count); });
        auto rows =
            rows_of(node_.inter_node_ranks(exchange.node.own), first_bytes, plan.counts, slice);
        if (posted.unreduced)
          rows.insert(
              rows.begin(),
              in_place(static_cast<std::uint32_t>(node_.inter_node()->rank()), slice.bytes_of(mine),
                       first_bytes[static_cast<std::size_t>(communicator_.rank())]));
        return local_reduce_scatter(stream, exchange, rows, plan,
                                    add_plan(posted, capturing, slice));
      },
      [&](const Slice& slice, std::uint32_t lag) {
        auto* target = at<std::byte>(out + slice.first * element);
        std::uint64_t bytes = slice.bytes_of(mine);
        Reduction reduction =
            posted.unreduced ? Reduction{nodes, plan.dtype, plan.op, bytes} : Reduction();
        std::array<void*, 5> arguments{&exchange, &target, &bytes, &reduction, &lag};
        return launch(deliver_shard_kernel_, stream, bytes, arguments.data());
      });
}

// ---- kernels ----

Status StreamCommunicator::publish_input(cuda::Stream stream, const Shards& in,
                                         const Slice& slice) {
  std::vector<Copy> shards = copies(in, slice);
  if (shards.empty()) shards.emplace_back();
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const auto* source = at<const std::byte>(shards[i].address);
    Rows rows = shards[i].rows;
    bool last = i + 1 == shards.size();
    std::array<void*, 4> arguments{&node_.through(false), &source, &rows, &last};
    R2CCL_TRY(launch(publish_input_kernel_, stream, rows.count * rows.bytes, arguments.data()));
  }
  return {};
}

Status StreamCommunicator::local_reduce_scatter(cuda::Stream stream, Exchange& exchange,
                                                std::span<const Rows> rows, const Plan& plan,
                                                std::uint32_t number) {
  DType dtype = plan.dtype;
  ReduceOp op = plan.op;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    Rows each = rows[i];
    bool last = i + 1 == rows.size();
    std::array<void*, 6> arguments{&exchange, &each, &dtype, &op, &number, &last};
    R2CCL_TRY(launch(local_reduce_scatter_kernel_, stream, each.count * each.bytes * node_.ranks(),
                     arguments.data()));
  }
  return {};
}

Status StreamCommunicator::publish_result(cuda::Stream stream, Exchange& exchange,
                                          std::uint64_t bytes, Reduction reduction,
                                          std::uint32_t lag) {
  std::array<void*, 4> arguments{&exchange, &bytes, &reduction, &lag};
  return launch(publish_result_kernel_, stream, bytes, arguments.data());
}

Status StreamCommunicator::local_all_gather(cuda::Stream stream,
                                            std::span<const OutputRows> outputs, cuda::Address out,
                                            std::uint64_t bytes, std::uint32_t lag) {
  auto* target = at<std::byte>(out);
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    OutputRows each = outputs[i];
    bool last = i + 1 == outputs.size();
    std::array<void*, 5> arguments{&node_.through(false), &each, &target, &lag, &last};
    R2CCL_TRY(launch(local_all_gather_kernel_, stream, bytes / outputs.size(), arguments.data()));
  }
  return {};
}

Plan StreamCommunicator::inter_node_plan(const Plan& plan) const {
  Plan made = plan;
  made.inter_node = true;
  made.counts.clear();
  for (const int rank : node_.inter_node_ranks(node_.own_local_rank()))
    made.counts.push_back(plan.counts[static_cast<std::size_t>(rank)]);
  return made;
}

std::vector<Rows> StreamCommunicator::rows_of(std::span<const int> ranks,
                                              std::span<const std::uint64_t> first_bytes,
                                              std::span<const std::size_t> counts,
                                              const Slice& slice) {
  std::vector<Rows> rows;
  std::uint64_t offset = 0;
  for (const int rank : ranks) {
    const auto of = static_cast<std::size_t>(rank);
    const std::uint64_t bytes = slice.bytes_of(counts[of]);
    rows.push_back({1, bytes, 0, offset, first_bytes[of]});
    offset += bytes;
  }
  // Rows of equal size and equal distance merge into a single Rows object.
  Rows all = rows.front();
  all.count = rows.size();
  all.pitch = rows.size() > 1 ? rows[1].first - all.first : 0;
  for (std::size_t i = 0; i < rows.size(); ++i)
    if (rows[i].bytes != all.bytes || rows[i].first != all.first + i * all.pitch) return rows;
  return {all};
}

Status StreamCommunicator::quiesce() {
  std::array<void*, 1> arguments{&node_.through(false)};
  R2CCL_TRY(launch(quiesce_kernel_, nullptr, 0, arguments.data()));
  return device_->synchronise();
}

}  // namespace r2ccl::device
