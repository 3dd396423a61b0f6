#include "plan/cost_model.hpp"

#include <algorithm>

namespace r2ccl {
namespace {

// With 2^32 bytes, 2^16 pairs of ranks between nodes and 2^14 ps a byte, times stay below 2^63.
constexpr std::uint64_t most_planned_bytes = std::uint64_t{1} << 32;

struct Topology {
  std::uint64_t ranks = 0;
  // Time of the slowest node to carry one byte from each of its ranks to each other rank: ranks of
  // a node share its ports for what leaves it, and exchange the rest inside it.
  std::uint64_t exchange_byte_ps = 0;
};

Topology describe_topology(std::span<const std::uint16_t> node_sizes, const CostConstants& costs) {
  Topology topology;
  for (const std::uint64_t node : node_sizes) topology.ranks += node;
  for (const std::uint64_t node : node_sizes) {
    const std::uint64_t leaving = node * (topology.ranks - node);
    const std::uint64_t staying = node - 1;
    topology.exchange_byte_ps = std::max(
        topology.exchange_byte_ps, leaving * costs.wire_byte_ps + staying * costs.local_byte_ps);
  }
  return topology;
}

// One round of messages with every peer, whatever their size.
std::uint64_t round_ps(const Topology& topology, const CostConstants& costs) {
  if (topology.ranks < 2) return 0;
  return costs.step_ps + (topology.ranks - 1) * costs.message_ps;
}

}  // namespace

std::uint64_t one_shot_ps(std::size_t bytes, std::span<const std::uint16_t> node_sizes,
                          const CostConstants& costs) {
  const Topology topology = describe_topology(node_sizes, costs);
  const std::uint64_t size = std::min<std::uint64_t>(bytes, most_planned_bytes);
  return round_ps(topology, costs) +
         size * (topology.exchange_byte_ps + topology.ranks * costs.fold_byte_ps);
}

std::uint64_t two_shot_ps(std::size_t bytes, std::span<const std::uint16_t> node_sizes,
                          const CostConstants& costs) {
  const Topology topology = describe_topology(node_sizes, costs);
  if (topology.ranks == 0) return 0;
  const std::uint64_t shard =
      (std::min<std::uint64_t>(bytes, most_planned_bytes) + topology.ranks - 1) / topology.ranks;
  // A shard of each rank is folded here and the folded shards of the others are copied in.
  const std::uint64_t touched = topology.ranks + (topology.ranks - 1);
  return 2 * round_ps(topology, costs) +
         shard * (2 * topology.exchange_byte_ps + touched * costs.fold_byte_ps);
}

Algorithm choose_all_reduce(std::size_t bytes, std::span<const std::uint16_t> node_sizes,
                            const CostConstants& costs) {
  return two_shot_ps(bytes, node_sizes, costs) < one_shot_ps(bytes, node_sizes, costs)
             ? Algorithm::two_shot
             : Algorithm::one_shot;
}

}  // namespace r2ccl
