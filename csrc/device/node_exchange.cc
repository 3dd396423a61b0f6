#include "device/node_exchange.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "device/addresses.hpp"
#include "device/agreement.hpp"

namespace r2ccl::device {

Status NodeExchange::open(Communicator& communicator, const cuda::Device& device,
                          const NodeOptions& node, const Exchange& own) {
  exchange_ = own;
  if (node.nodes.front().size() > most_local_peers)
    failure_ = {ErrorCode::invalid_argument, std::to_string(node.nodes.front().size()) +
                                                 " ranks on a node; at most " +
                                                 std::to_string(most_local_peers)};
  else
    failure_ = meet(communicator, device, node);
  auto all = agree(communicator, failure_);
  if (!all.ok()) return all.take_status();
  if (all.value()) {
    column_ = node.column;
    nodes_ = node.nodes;
  } else {
    if (failure_.ok()) failure_ = {ErrorCode::internal, "another rank cannot"};
    memory_.clear();
  }
  return {};
}

// Every rank says what it has to say in each round, or the others would wait for it.
Status NodeExchange::meet(Communicator& communicator, const cuda::Device& device,
                          const NodeOptions& node) {
  constexpr std::uint64_t inbox_bytes = rounded_up(sizeof(Inbox));
  const std::uint64_t entry_bytes = exchange_.staging.entry_bytes;
  cuda::IpcHandle given{};
  Status made;
  if (auto own = device.allocate(inbox_bytes + ring * entry_bytes); own.ok()) {
    memory_.push_back(std::move(own.value()));
    if (auto handle = device.give(memory_.back()); handle.ok())
      given = handle.value();
    else
      made = handle.take_status();
  } else {
    made = own.take_status();
  }
  auto all = agree(communicator, made);
  if (!all.ok()) return all.take_status();
  if (!all.value())
    return made.ok() ? Status(ErrorCode::internal, "another rank cannot") : std::move(made);

  const std::vector<std::size_t> counts(static_cast<std::size_t>(communicator.size()),
                                        sizeof(given));
  std::vector<cuda::IpcHandle> handles(counts.size());
  R2CCL_TRY(communicator.all_gatherv(reinterpret_cast<const std::byte*>(&given),
                                     reinterpret_cast<std::byte*>(handles.data()), counts,
                                     DType::u8));
  LocalPeers& local_peers = exchange_.node;
  const auto& ranks =
      *std::ranges::find_if(node.nodes, [&communicator](const std::vector<int>& each) {
        return std::ranges::find(each, communicator.rank()) != each.end();
      });
  local_peers.ranks = static_cast<std::uint32_t>(ranks.size());
  local_peers.entry_bytes = entry_bytes;
  local_peers.result_offset = exchange_.staging.result_offset;
  for (std::uint32_t place = 0; place < local_peers.ranks; ++place) {
    cuda::Address address = memory_.front().address();
    if (ranks[place] == communicator.rank()) {
      local_peers.own = place;
    } else {
      auto taken = device.take(handles[static_cast<std::size_t>(ranks[place])]);
      if (!taken.ok()) return taken.take_status();
      address = taken.value().address();
      memory_.push_back(std::move(taken.value()));
    }
    local_peers.inboxes[place] = at<Inbox>(address);
    local_peers.memory[place] = at<std::byte>(address + inbox_bytes);
  }
  return {};
}

std::vector<int> NodeExchange::column_of(std::size_t place) const {
  std::vector<int> ranks;
  for (const std::vector<int>& node : nodes_) ranks.push_back(node[place]);
  return ranks;
}

void NodeExchange::stage_directly(const Staging& staging) {
  direct_exchange_ = exchange_;
  direct_exchange_.staging = staging;
}

}  // namespace r2ccl::device
