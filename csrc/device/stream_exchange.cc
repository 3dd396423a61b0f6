// A StreamCommunicator's part in the exchange inside its node.
#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "device/addresses.hpp"
#include "device/stream_communicator.hpp"
#include "engine/clock.hpp"

namespace r2ccl::device {

Result<bool> StreamCommunicator::agree(const Status& own) {
  const std::vector<std::size_t> one(static_cast<std::size_t>(communicator_.size()), 1);
  const auto mine = static_cast<std::byte>(own.ok());
  std::vector<std::byte> all(one.size());
  if (Status status = communicator_.all_gatherv(&mine, all.data(), one, DType::u8); !status.ok())
    return status;
  return std::ranges::all_of(all, [](std::byte said) { return said == std::byte{1}; });
}

Status StreamCommunicator::open_exchange(const NodeOptions& node) {
  if (node.ranks.size() > most_neighbours)
    no_exchange_ = {ErrorCode::invalid_argument, std::to_string(node.ranks.size()) +
                                                     " ranks on a node; at most " +
                                                     std::to_string(most_neighbours)};
  else
    no_exchange_ = meet(node);
  auto all = agree(no_exchange_);
  if (!all.ok()) return all.take_status();
  if (all.value()) {
    column_ = node.column;
  } else {
    if (no_exchange_.ok()) no_exchange_ = {ErrorCode::internal, "another rank cannot"};
    node_memory_.clear();
  }
  return {};
}

// Every rank says what it has to say in each round, or the others would wait for it.
Status StreamCommunicator::meet(const NodeOptions& node) {
  constexpr std::uint64_t inbox_bytes = rounded_up(sizeof(Inbox));
  const std::uint64_t entry_bytes = 2 * staging_bytes_;
  cuda::IpcHandle given{};
  Status made;
  if (auto own = device_->allocate(inbox_bytes + ring * entry_bytes); own.ok()) {
    node_memory_.push_back(std::move(own.value()));
    if (auto handle = device_->give(node_memory_.back()); handle.ok())
      given = handle.value();
    else
      made = handle.take_status();
  } else {
    made = own.take_status();
  }
  auto all = agree(made);
  if (!all.ok()) return all.take_status();
  if (!all.value())
    return made.ok() ? Status(ErrorCode::internal, "another rank cannot") : std::move(made);

  const std::vector<std::size_t> counts(static_cast<std::size_t>(communicator_.size()),
                                        sizeof(given));
  std::vector<cuda::IpcHandle> handles(counts.size());
  R2CCL_TRY(communicator_.all_gatherv(reinterpret_cast<const std::byte*>(&given),
                                      reinterpret_cast<std::byte*>(handles.data()), counts,
                                      DType::u8));
  exchange_.mailbox = at<Mailbox>(mailbox_memory_.address());
  exchange_.state = at<DeviceState>(state_memory_.address());
  exchange_.staging = staging_;
  Neighbours& neighbours = exchange_.node;
  neighbours.ranks = static_cast<std::uint32_t>(node.ranks.size());
  neighbours.entry_bytes = entry_bytes;
  neighbours.result_offset = staging_bytes_;
  for (std::uint32_t place = 0; place < neighbours.ranks; ++place) {
    cuda::Address address = node_memory_.front().address();
    if (node.ranks[place] == communicator_.rank()) {
      neighbours.own = place;
    } else {
      auto taken = device_->take(handles[static_cast<std::size_t>(node.ranks[place])]);
      if (!taken.ok()) return taken.take_status();
      address = taken.value().address();
      node_memory_.push_back(std::move(taken.value()));
    }
    neighbours.inboxes[place] = at<Inbox>(address);
    neighbours.memory[place] = at<std::byte>(address + inbox_bytes);
  }
  return {};
}

Status StreamCommunicator::enqueue_exchange(cuda::Stream stream, const Plan& plan, cuda::Address in,
                                            cuda::Address out) {
  const std::lock_guard guard(call_mutex_);
  auto capturing = begin(stream);
  if (!capturing.ok()) return capturing.take_status();
  const std::size_t element = size_of(plan.dtype);
  const std::size_t count = plan.counts.front();
  const std::size_t most = staging_bytes_ / element;
  DType dtype = plan.dtype;
  ReduceOp op = plan.op;
  Shares before;
  for (std::size_t first = 0; first == 0 || first < count; first += most) {
    Shares shares = Shares::of(std::min(count - first, most), element, exchange_.node.ranks);
    Plan own = plan;
    own.in_column = true;
    own.counts = {shares.size(exchange_.node.own)};
    std::uint32_t number = add_plan(own, capturing.value(), 0, own.counts.front());
    const auto* source = at<const std::byte>(in + first * element);
    std::uint64_t bytes = shares.count * element;
    std::array<void*, 3> sharing{&exchange_, &source, &bytes};
    R2CCL_TRY(launch(share_kernel_, stream, bytes, sharing.data()));
    std::array<void*, 5> summing{&exchange_, &shares, &dtype, &op, &number};
    R2CCL_TRY(launch(sum_up_kernel_, stream, bytes, summing.data()));
    if (first > 0) R2CCL_TRY(spread_and_collect(stream, before, out + (first - most) * element, 1));
    before = shares;
  }
  const std::size_t last = count == 0 ? 0 : (count - 1) / most * most;
  return spread_and_collect(stream, before, out + last * element, 0);
}

Status StreamCommunicator::spread_and_collect(cuda::Stream stream, const Shares& shares,
                                              cuda::Address out, std::uint32_t lag) {
  Shares given = shares;
  const std::uint64_t bytes = shares.count * shares.element;
  std::array<void*, 3> spreading{&exchange_, &given, &lag};
  R2CCL_TRY(launch(spread_kernel_, stream, bytes / exchange_.node.ranks, spreading.data()));
  auto* target = at<std::byte>(out);
  std::array<void*, 4> collecting{&exchange_, &given, &target, &lag};
  return launch(collect_kernel_, stream, bytes, collecting.data());
}

Status StreamCommunicator::depart() {
  std::array<void*, 1> departing{&exchange_};
  R2CCL_TRY(launch(depart_kernel_, nullptr, 0, departing.data()));
  return device_->synchronise();
}

// Nobody of the host waits for the ranks of this node, so it is looked whether they are there.
Status StreamCommunicator::watch() {
  if (load_acquire(mailbox().entered) == load_acquire(mailbox().left)) {
    inside_since_ = 0;
    return {};
  }
  if (inside_since_ == 0) inside_since_ = now_ns();
  Status status = communicator_.check_waiting(inside_since_);
  // Ranks of other nodes wait for what this one will not post any more.
  if (!status.ok()) column_->abort(status.message());
  return status;
}

}  // namespace r2ccl::device
