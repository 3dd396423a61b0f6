// A StreamCommunicator's staging in the memory of its GPU, which NICs read and write (GPUDirect).
#include <algorithm>
#include <array>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>

#include "device/addresses.hpp"
#include "device/stream_communicator.hpp"

namespace r2ccl::device {
namespace {

// Of a part, in elements.
std::size_t start_of(std::span<const std::size_t> counts, std::size_t part) {
  const auto parts = counts.first(part);
  return std::accumulate(parts.begin(), parts.end(), std::size_t{0});
}

// Of a trial, from each rank: enough for several rails.
constexpr std::uint64_t most_tried = 1U << 20U;

Status another_cannot() { return {ErrorCode::invalid_argument, "another rank cannot"}; }

}  // namespace

Status StreamCommunicator::open_direct(const DirectOptions& options) {
  direct_from_ = options.from_bytes;
  if (options.use == DirectOptions::Use::never) {
    no_direct_ = {ErrorCode::invalid_argument, "it is off"};
    return {};
  }
  Status among_all = communicator_.check_direct();
  Status in_column = column_ == nullptr
                         ? Status(ErrorCode::invalid_argument, "ranks do not exchange")
                         : column_->check_direct();
  Status staged = among_all.ok() || in_column.ok() ? register_staging() : Status();
  // Every rank says all that there is to say, or the others would wait for it.
  const auto of_everybody = [&](Status& own) -> Result<bool> {
    auto all = agree(staged.ok() ? own : staged);
    if (all.ok() && !all.value() && own.ok()) own = another_cannot();
    return all;
  };
  for (const auto& [own, possible, ranks] :
       {std::tuple{&among_all, &direct_among_all_, &communicator_},
        std::tuple{&in_column, &direct_in_column_, column_}}) {
    auto all = of_everybody(*own);
    if (!all.ok()) return all.take_status();
    if (!all.value()) continue;
    // Drivers may promise what the platform does not do.
    auto tried = try_direct(*ranks);
    if (!tried.ok()) return tried.take_status();
    if (!tried.value().empty())
      *own = {ErrorCode::invalid_argument, "in a trial, " + tried.value()};
    all = of_everybody(*own);
    if (!all.ok()) return all.take_status();
    *possible = all.value();
  }
  if (direct_among_all_ || direct_in_column_) return {};

  withdraw_staging();
  // Of a job whose ranks exchange, what the rails carry is the column's.
  Status& why = column_ == nullptr ? among_all : in_column;
  no_direct_ = staged.ok() ? std::move(why) : std::move(staged);
  if (options.use != DirectOptions::Use::always) return {};
  return {ErrorCode::invalid_argument,
          "gpu_direct: it is on, and cannot be used: " + no_direct_.message()};
}

Status StreamCommunicator::register_staging() {
  const std::uint64_t entry_bytes = 2 * staging_bytes_;
  auto made = make_direct_memory(*device_, ring * entry_bytes);
  if (!made.ok()) return made.take_status();
  R2CCL_TRY(communicator_.register_dma_buf(made.value().named->addresses(),
                                           std::move(made.value().dma_buf)));
  direct_memory_ = std::move(made.value());
  direct_.device = {at<std::byte>(direct_memory_.memory.address()), entry_bytes, staging_bytes_};
  direct_.host = {direct_memory_.named->addresses().data(), entry_bytes, staging_bytes_};
  direct_exchange_ = exchange_;
  direct_exchange_.staging = direct_.device;
  return {};
}

Result<std::string> StreamCommunicator::try_direct(Communicator& ranks) {
  const auto size = static_cast<std::size_t>(ranks.size());
  const auto own = static_cast<std::size_t>(ranks.rank());
  const std::size_t each = std::min<std::uint64_t>(piece_bytes(size), most_tried);
  const auto part_of = [each](std::size_t rank) {
    std::vector<std::byte> part(each);
    for (std::size_t i = 0; i < each; ++i) part[i] = static_cast<std::byte>(i * 7 + i / 251 + rank);
    return part;
  };
  std::byte* const all = direct_.host.result(0);
  copy_bytes(all + own * each, part_of(own).data(), each);
  const std::vector<Epoch> before = ranks.rdma_epochs();
  if (Status status = ranks.all_gatherv(all + own * each, all, std::vector(size, each), DType::u8);
      !status.ok())
    return Status(status.code(), "a trial of GPUDirect, which R2CCL_GPU_DIRECT=off does without: " +
                                     status.message());
  bool right = true;
  std::vector<std::byte> got(each);
  for (std::size_t rank = 0; rank < size; ++rank) {
    copy_bytes(got.data(), all + rank * each, each);
    right = right && got == part_of(rank);
  }
  if (Status status = direct_memory_.named->failure(); !status.ok()) return status.message();
  if (!right) return std::string("what NICs wrote into the GPU's memory was not what was sent");
  const std::vector<Epoch> after = ranks.rdma_epochs();
  bool same = true;  // of those that were connected: others may just be
  for (std::size_t i = 0; i < before.size(); ++i)
    same = same && (before[i] == 0 || before[i] == after[i]);
  if (!same) return std::string("rails were lost when NICs reached for the GPU's memory");
  return std::string();
}

void StreamCommunicator::withdraw_staging() {
  if (direct_memory_.named)
    (void)communicator_.deregister_buffer(direct_memory_.named->addresses().data());
  direct_memory_.named.reset();
  direct_memory_.memory = {};
}

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
          return stage(stream, direct_, all_in, piece, place_of_own(posted, piece),
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
    R2CCL_TRY(stage(stream, direct_, all_in, piece, 0,
                    add_plan(posted, capturing.value(), {0, most, element})));
    R2CCL_TRY(combine(stream, posted, capturing.value()));
    R2CCL_TRY(deliver(stream, direct_, all_out, piece, 0));
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
        return stage(stream, direct_, {in, plan.counts}, piece, 0,
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
  std::array<void*, 7> arguments{&mailbox, &state, &direct_.device, &source, &rows, &none, &last};
  return launch(stage_kernel_, stream, bytes, arguments.data());
}

Status StreamCommunicator::deliver_sum(cuda::Stream stream, cuda::Address out, std::uint64_t bytes,
                                       Sum sum, std::uint32_t lag) {
  auto* mailbox = at<Mailbox>(mailbox_memory_.address());
  auto* state = at<DeviceState>(state_memory_.address());
  auto* target = at<std::byte>(out);
  std::array<void*, 7> arguments{&mailbox, &state, &direct_.device, &target, &bytes, &sum, &lag};
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
  const Inbox* inbox = plan.in_column ? exchange_.node.inboxes[exchange_.node.own] : nullptr;
  std::array<void*, 8> arguments{&mailbox, &state, &direct_.device, &inbox, &bytes,
                                 &offset,  &sum,   &number};
  return launch(combine_kernel_, stream, bytes * ranks, arguments.data());
}

}  // namespace r2ccl::device
