#include "plan/cost_model.hpp"

#include <algorithm>

namespace r2ccl {
namespace {

// With 2^32 bytes, 2^16 pairs of ranks between nodes and 2^14 ps a byte, times stay below 2^63.
constexpr std::uint64_t most_planned_bytes = std::uint64_t{1} << 32;

struct World {
  std::uint64_t ranks = 0;
  // Time of the slowest node to carry one byte from each of its ranks to each other rank: ranks of
  // a node share its ports for what leaves it, and exchange the rest inside it.
  std::uint64_t exchange_byte_ps = 0;
};

World describe_world(std::span<const std::uint16_t> node_sizes, const CostConstants& costs) {
  World world;
  for (const std::uint64_t node : node_sizes) world.ranks += node;
  for (const std::uint64_t node : node_sizes) {
    const std::uint64_t leaving = node * (world.ranks - node);
    const std::uint64_t staying = node - 1;
    world.exchange_byte_ps = std::max(world.exchange_byte_ps,
                                      leaving * costs.wire_byte_ps + staying * costs.local_byte_ps);
  }
  return world;
}

// One round of messages with every peer, whatever their size.
std::uint64_t round_ps(const World& world, const CostConstants& costs) {
  if (world.ranks < 2) return 0;
  return costs.step_ps + (world.ranks - 1) * costs.message_ps;
}

}  // namespace

std::uint64_t one_shot_ps(std::size_t bytes, std::span<const std::uint16_t> node_sizes,
                          const CostConstants& costs) {
  const World world = describe_world(node_sizes, costs);
  const std::uint64_t size = std::min<std::uint64_t>(bytes, most_planned_bytes);
  return round_ps(world, costs) +
         size * (world.exchange_byte_ps + world.ranks * costs.fold_byte_ps);
}

std::uint64_t two_shot_ps(std::size_t bytes, std::span<const std::uint16_t> node_sizes,
                          const CostConstants& costs) {
  const World world = describe_world(node_sizes, costs);
  if (world.ranks == 0) return 0;
  const std::uint64_t share =
      (std::min<std::uint64_t>(bytes, most_planned_bytes) + world.ranks - 1) / world.ranks;
  // A share of each rank is folded here and the folded shares of the others are copied in.
  const std::uint64_t touched = world.ranks + (world.ranks - 1);
  return 2 * round_ps(world, costs) +
         share * (2 * world.exchange_byte_ps + touched * costs.fold_byte_ps);
}

Algorithm choose_all_reduce(std::size_t bytes, std::span<const std::uint16_t> node_sizes,
                            const CostConstants& costs) {
  return two_shot_ps(bytes, node_sizes, costs) < one_shot_ps(bytes, node_sizes, costs)
             ? Algorithm::two_shot
             : Algorithm::one_shot;
}

}  // namespace r2ccl
