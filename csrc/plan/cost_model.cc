#include "plan/cost_model.hpp"

#include <algorithm>

#include "plan/shares.hpp"

namespace r2ccl {
namespace {

// Size limit of the model, against overflow: 2^30 bytes * 2^16 rank pairs between nodes * 2^13 ps
// per byte * 2^4 for a loss = 2^63.
constexpr std::uint64_t most_planned_bytes = std::uint64_t{1} << 30;

struct Topology {
  std::uint64_t ranks = 0;
  // Time of the slowest node to carry 1 byte from each of its ranks to every other rank.  The ranks
  // of a node share the node's ports for remote bytes and exchange local bytes inside the node.
  std::uint64_t exchange_byte_ps = 0;
};

Topology describe_topology(std::span<const std::uint16_t> node_sizes, const CostConstants& costs,
                           std::span<const std::uint8_t> lost) {
  Topology topology;
  for (const std::uint64_t node : node_sizes) topology.ranks += node;
  for (std::size_t i = 0; i < node_sizes.size(); ++i) {
    const std::uint64_t node = node_sizes[i];
    const unsigned left = whole_bandwidth - (i < lost.size() ? std::min(lost[i], most_lost) : 0U);
    const std::uint64_t leaving = node * (topology.ranks - node);
    const std::uint64_t wire_ps = leaving * costs.wire_byte_ps * whole_bandwidth / left;
    const std::uint64_t local_ps = (node - 1) * costs.local_byte_ps;
    topology.exchange_byte_ps = std::max(topology.exchange_byte_ps, wire_ps + local_ps);
  }
  return topology;
}

// Returns the size-independent time of a round: a message to every peer and from every peer.
std::uint64_t round_ps(const Topology& topology, const CostConstants& costs) {
  if (topology.ranks < 2) return 0;
  return costs.step_ps + (topology.ranks - 1) * costs.message_ps;
}

}  // namespace

std::uint64_t one_shot_ps(std::size_t bytes, std::span<const std::uint16_t> node_sizes,
                          const CostConstants& costs, std::span<const std::uint8_t> lost) {
  const Topology topology = describe_topology(node_sizes, costs, lost);
  const std::uint64_t size = std::min<std::uint64_t>(bytes, most_planned_bytes);
  return round_ps(topology, costs) +
         size * (topology.exchange_byte_ps + topology.ranks * costs.fold_byte_ps);
}

std::uint64_t two_shot_ps(std::size_t bytes, std::span<const std::uint16_t> node_sizes,
                          const CostConstants& costs, std::span<const std::uint8_t> lost) {
  const Topology topology = describe_topology(node_sizes, costs, lost);
  if (topology.ranks == 0) return 0;
  const std::uint64_t shard =
      (std::min<std::uint64_t>(bytes, most_planned_bytes) + topology.ranks - 1) / topology.ranks;
  // Each rank folds a shard of every rank and copies in the folded shards of all peers.
  const std::uint64_t touched = topology.ranks + (topology.ranks - 1);
  return 2 * round_ps(topology, costs) +
         shard * (2 * topology.exchange_byte_ps + touched * costs.fold_byte_ps);
}

Algorithm choose_all_reduce(std::size_t bytes, std::span<const std::uint16_t> node_sizes,
                            const CostConstants& costs, std::span<const std::uint8_t> lost) {
  return two_shot_ps(bytes, node_sizes, costs, lost) < one_shot_ps(bytes, node_sizes, costs, lost)
             ? Algorithm::two_shot
             : Algorithm::one_shot;
}

}  // namespace r2ccl
