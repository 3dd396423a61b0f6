// The ranks of a node give each other the memory of their GPUs, so that kernels exchange through
// it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "device/exchange_bodies.hpp"
#include "drivers/cuda_device.hpp"
#include "engine/communicator.hpp"

namespace r2ccl::device {

// How the ranks of a node work together; the same on all ranks, or nowhere.
struct NodeOptions {
  // Of the ranks that have this local rank on their nodes, in the order of the nodes; null: there
  // is no exchange.  Used by no other thread, and outlives close().
  Communicator* inter_node = nullptr;
  std::vector<std::vector<int>> nodes;  // the ranks of each, by their local ranks; as many on all
};

class NodeExchange {
 public:
  // Collective: gives this node's ranks the memory of this one, and imports theirs.  `own`: what
  // kernels need of this rank alone.  An error: the ranks are of no use any more.
  Status open(Communicator& communicator, const cuda::Device& device, const NodeOptions& node,
              const Exchange& own);
  // Why ranks of the node do not exchange what they have; ok if they do.
  [[nodiscard]] const Status& failure() const { return failure_; }
  [[nodiscard]] bool active() const { return inter_node_ != nullptr; }
  [[nodiscard]] Communicator* inter_node() const { return inter_node_; }  // null: not active
  [[nodiscard]] const std::vector<std::vector<int>>& nodes() const { return nodes_; }
  [[nodiscard]] std::uint32_t own_local_rank() const { return exchange_.node.own; }
  [[nodiscard]] std::uint32_t ranks() const { return exchange_.node.ranks; }
  // The ranks of a local rank, in the order of the nodes.
  [[nodiscard]] std::vector<int> inter_node_ranks(std::size_t local_rank) const;

  // What kernels are given.  `direct`: with what is staged in the GPU's own memory.
  [[nodiscard]] Exchange& through(bool direct) { return direct ? direct_exchange_ : exchange_; }
  void stage_directly(const Staging& staging);

 private:
  Status meet(Communicator& communicator, const cuda::Device& device, const NodeOptions& node);

  Status failure_{ErrorCode::invalid_argument, "no node's ranks were named"};
  Communicator* inter_node_ = nullptr;
  std::vector<std::vector<int>> nodes_;
  std::vector<cuda::Memory> memory_;  // own, and imported
  Exchange exchange_{};
  Exchange direct_exchange_{};
};

}  // namespace r2ccl::device
