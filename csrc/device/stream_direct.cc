// A StreamCommunicator's collectives on staging in the memory of its GPU (GPUDirect).
#include <algorithm>
#include <array>
#include <numeric>

#include "device/addresses.hpp"
#include "device/stream_communicator.hpp"

namespace r2ccl::device {
namespace {

// Of a part, in elements.
std::size_t start_of(std::span<const std::size_t> counts, std::size_t part) {
  const auto parts = counts.first(part);
  return std::accumulate(parts.begin(), parts.end(), std::size_t{0});
}

}  // namespace

// In place: nobody has to copy it there.
std::uint64_t StreamCommunicator::place_of_own(const Plan& gather, const Piece& piece) const {
  std::uint64_t offset = staging_bytes_;
  for (int rank = 0; rank < among(gather).rank(); ++rank)
    offset += piece.bytes_of(gather.counts[static_cast<std::size_t>(rank)]);
  return offset;
}

// ---- collectives that add up ----

Status StreamCommunicator::all_reduce_direct(cuda::Stream stream, const Plan& plan,
                                             cuda::Address in, cuda::Address out) {
  const std::lock_guard guard(call_mutex_);
  auto capturing = begin(stream);
  if (!capturing.ok()) return capturing.take_status();
  const auto ranks = static_cast<std::uint32_t>(communicator_.size());
  const std::size_t element = size_of(plan.dtype);
  const std::size_t count = plan.counts.front();
  const Parts all_in{in, {&count, 1}};
  const Parts all_out{out, {&count, 1}};
  Plan posted = plan;
  posted.direct = true;
  if (ranks == 2) {  // everybody gets everything, and adds it up alone
    posted.collective = Collective::all_gather;
    posted.counts = {count, count};
    return in_pieces(
        count, piece_bytes(ranks) / element, element,
        [&](const Piece& piece) {
          return stage(stream, direct_.buffers(), all_in, piece, place_of_own(posted, piece),
                       add_plan(posted, capturing.value(), piece));
        },
        [&](const Piece& piece, std::uint32_t lag) {
          const std::uint64_t bytes = piece.bytes_of(count);
          return deliver_sum(stream, out + piece.first * element, bytes,
                             {ranks, plan.dtype, plan.op, bytes}, lag);
        });
  }
  // One after the other: what the device does here takes no time beside what the rails do.
  posted.collective = Collective::reduce_scatter;
  posted.apart = true;
  const std::size_t most =
      (staging_bytes_ - ranks * line_bytes) / line_bytes * line_bytes / element;
  for (std::size_t first = 0; first < count; first += most) {
    const Piece piece{first, most, element};
    const Shares shares = Shares::of(piece.of(count), element, ranks);
    posted.counts.clear();
    for (std::uint32_t rank = 0; rank < ranks; ++rank) posted.counts.push_back(shares.size(rank));
    const auto me = static_cast<std::uint32_t>(communicator_.rank());
    const std::uint64_t bytes = shares.size(me) * element;
    R2CCL_TRY(put(stream, in + (first + shares.first(me)) * element, me, bytes));
    R2CCL_TRY(stage(stream, direct_.buffers(), all_in, piece, 0,
                    add_plan(posted, capturing.value(), {0, most, element})));
    R2CCL_TRY(combine(stream, posted, capturing.value()));
    R2CCL_TRY(deliver(stream, direct_.buffers(), all_out, piece, 0));
  }
  return {};
}

Status StreamCommunicator::reduce_scatter_direct(cuda::Stream stream, const Plan& plan,
                                                 cuda::Address in, cuda::Address out) {
  const std::lock_guard guard(call_mutex_);
  auto capturing = begin(stream);
  if (!capturing.ok()) return capturing.take_status();
  const std::size_t element = size_of(plan.dtype);
  const auto ranks = static_cast<std::uint32_t>(plan.counts.size());
  const std::size_t mine = own(plan.counts).front();
  Plan posted = plan;
  posted.direct = posted.apart = true;
  return in_pieces(
      *std::ranges::max_element(plan.counts), piece_bytes(ranks) / element, element,
      [&](const Piece& piece) {
        const auto me = static_cast<std::uint32_t>(communicator_.rank());
        const cuda::Address part = in + start_of(plan.counts, me) * element;
        R2CCL_TRY(put(stream, part + piece.first * element, me, piece.bytes_of(mine)));
        return stage(stream, direct_.buffers(), {in, plan.counts}, piece, 0,
                     add_plan(posted, capturing.value(), piece));
      },
      [&](const Piece& piece, std::uint32_t lag) {
        const std::uint64_t bytes = piece.bytes_of(mine);
        return deliver_sum(stream, out + piece.first * element, bytes,
                           {ranks, plan.dtype, plan.op, bytes}, lag);
      });
}

Status StreamCommunicator::put(cuda::Stream stream, cuda::Address part, std::uint32_t place,
                               std::uint64_t bytes) {
  auto* mailbox = at<Mailbox>(mailbox_memory_.address());
  auto* state = at<DeviceState>(state_memory_.address());
  const auto* source = at<const std::byte>(part);
  Rows rows = in_place(place, bytes, 0);
  std::uint32_t none = 0;
  bool last = false;
  std::array<void*, 7> arguments{&mailbox, &state, &direct_.buffers().device, &source, &rows,
                                 &none,    &last};
  return launch(stage_kernel_, stream, bytes, arguments.data());
}

Status StreamCommunicator::deliver_sum(cuda::Stream stream, cuda::Address out, std::uint64_t bytes,
                                       Sum sum, std::uint32_t lag) {
  auto* mailbox = at<Mailbox>(mailbox_memory_.address());
  auto* state = at<DeviceState>(state_memory_.address());
  auto* target = at<std::byte>(out);
  std::array<void*, 7> arguments{&mailbox, &state, &direct_.buffers().device, &target, &bytes,
                                 &sum,     &lag};
  return launch(deliver_sum_kernel_, stream, bytes * sum.terms, arguments.data());
}

Status StreamCommunicator::combine(cuda::Stream stream, const Plan& plan, bool capturing) {
  auto* mailbox = at<Mailbox>(mailbox_memory_.address());
  auto* state = at<DeviceState>(state_memory_.address());
  const std::size_t element = size_of(plan.dtype);
  const Piece whole_of{0, *std::ranges::max_element(plan.counts), element};
  Plan gather = plan;
  gather.collective = Collective::all_gather;
  gather.apart = false;
  const auto ranks = static_cast<std::uint32_t>(plan.counts.size());
  std::uint64_t bytes = plan.counts[static_cast<std::size_t>(among(plan).rank())] * element;
  // From where results are.
  std::uint64_t offset = place_of_own(gather, whole_of) - staging_bytes_;
  Sum sum{ranks, plan.dtype, plan.op, bytes};
  std::uint32_t number = add_plan(gather, capturing, whole_of);
  const Inbox* inbox =
      plan.in_column ? node_.through(false).node.inboxes[node_.own_place()] : nullptr;
  std::array<void*, 8> arguments{
      &mailbox, &state, &direct_.buffers().device, &inbox, &bytes, &offset, &sum, &number};
  return launch(combine_kernel_, stream, bytes * ranks, arguments.data());
}

}  // namespace r2ccl::device
