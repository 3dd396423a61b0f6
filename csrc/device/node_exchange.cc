#include "device/node_exchange.hpp"

#include <algorithm>
#include <iterator>
#include <mutex>
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
    inter_node_ = node.inter_node;
    nodes_ = node.nodes;
  } else {
    if (failure_.ok()) failure_ = {ErrorCode::internal, "not possible on another rank"};
    memory_.clear();
  }
  return {};
}

// A rank that fails still takes part in every round, because the other ranks wait for it.
Status NodeExchange::meet(Communicator& communicator, const cuda::Device& device,
                          const NodeOptions& node) {
  constexpr std::uint64_t inbox_bytes = rounded_up(sizeof(Inbox));
  const std::uint64_t entry_bytes = exchange_.staging.entry_bytes;
  cuda::IpcHandle handle{};
  Status made;
  if (auto own = device.allocate(inbox_bytes + ring * entry_bytes); own.ok()) {
    memory_.push_back(std::move(own.value()));
    if (auto exported = device.export_ipc(memory_.back()); exported.ok())
      handle = exported.value();
    else
      made = exported.take_status();
  } else {
    made = own.take_status();
  }
  auto all = agree(communicator, made);
  if (!all.ok()) return all.take_status();
  if (!all.value())
    return made.ok() ? Status(ErrorCode::internal, "not possible on another rank")
                     : std::move(made);

  const std::vector<std::size_t> counts(static_cast<std::size_t>(communicator.size()),
                                        sizeof(handle));
  std::vector<cuda::IpcHandle> handles(counts.size());
  R2CCL_TRY(communicator.all_gatherv(reinterpret_cast<const std::byte*>(&handle),
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
  for (std::uint32_t local_rank = 0; local_rank < local_peers.ranks; ++local_rank) {
    cuda::Address address = memory_.front().address();
    if (ranks[local_rank] == communicator.rank()) {
      local_peers.own = local_rank;
    } else {
      auto imported = device.import_ipc(handles[static_cast<std::size_t>(ranks[local_rank])]);
      if (!imported.ok()) return imported.take_status();
      address = imported.value().address();
      memory_.push_back(std::move(imported.value()));
    }
    local_peers.inboxes[local_rank] = at<Inbox>(address);
    local_peers.memory[local_rank] = at<std::byte>(address + inbox_bytes);
  }
  return {};
}

void NodeExchange::keep_memory() {
  static std::mutex mutex;
  static auto* const kept = new std::vector<cuda::Memory>;  // until the process ends
  const std::lock_guard guard(mutex);
  std::ranges::move(memory_, std::back_inserter(*kept));
  memory_.clear();
}

std::vector<int> NodeExchange::inter_node_ranks(std::size_t local_rank) const {
  std::vector<int> ranks;
  for (const std::vector<int>& node : nodes_) ranks.push_back(node[local_rank]);
  return ranks;
}

void NodeExchange::stage_directly(const Staging& staging) {
  direct_exchange_ = exchange_;
  direct_exchange_.staging = staging;
}

}  // namespace r2ccl::device
