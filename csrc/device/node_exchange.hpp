// The exchange inside a node: the ranks of a node share GPU memory by CUDA IPC, and kernels
// exchange data through this memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "device/exchange_bodies.hpp"
#include "drivers/cuda_device.hpp"
#include "engine/communicator.hpp"

namespace r2ccl::device {

// Layout of the exchange; the same on all ranks.
struct NodeOptions {
  // The inter-node group: the ranks with this local rank on all nodes, in node order.  Null: no
  // exchange.  No other thread uses the group.  The group outlives StreamCommunicator::close().
  Communicator* inter_node = nullptr;
  // Ranks of each node, by local rank; each node has the same number of ranks.
  std::vector<std::vector<int>> nodes;
};

class NodeExchange {
 public:
  // Collective: shares this rank's GPU memory with the ranks of the node, and imports their memory.
  // `own`: the kernel arguments without `node`, which open() fills in.  After an error the ranks
  // are unusable.
  Status open(Communicator& communicator, const cuda::Device& device, const NodeOptions& node,
              const Exchange& own);
  // Returns why ranks of the node do not exchange; ok if the exchange is active.
  [[nodiscard]] const Status& failure() const { return failure_; }
  [[nodiscard]] bool active() const { return inter_node_ != nullptr; }
  [[nodiscard]] Communicator* inter_node() const { return inter_node_; }  // null if not active
  [[nodiscard]] const std::vector<std::vector<int>>& nodes() const { return nodes_; }
  [[nodiscard]] std::uint32_t own_local_rank() const { return exchange_.node.own; }
  // Returns the number of ranks on this node.
  [[nodiscard]] std::uint32_t ranks() const { return exchange_.node.ranks; }
  // Returns the ranks with this local rank, in node order.
  [[nodiscard]] std::vector<int> inter_node_ranks(std::size_t local_rank) const;

  // Returns the kernel arguments.  `direct`: staging is in GPU memory, as set by stage_directly().
  [[nodiscard]] Exchange& through(bool direct) { return direct ? direct_exchange_ : exchange_; }
  // Sets the staging entries in GPU memory.  Call after open().
  void stage_directly(const Staging& staging);

  // Keeps the shared memory until the process ends.  After a failure, local peers signal the loss
  // to this memory at a time that this rank does not know.
  void keep_memory();

 private:
  // Fills exchange_.node: shares own memory and imports the memory of local peers.  Collective.
  Status meet(Communicator& communicator, const cuda::Device& device, const NodeOptions& node);

  Status failure_{ErrorCode::invalid_argument, "no inter-node group is given"};
  Communicator* inter_node_ = nullptr;
  std::vector<std::vector<int>> nodes_;
  std::vector<cuda::Memory> memory_;  // own and imported memory
  Exchange exchange_{};
  Exchange direct_exchange_{};
};

}  // namespace r2ccl::device
