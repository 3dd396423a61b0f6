// NICs shared by the connections of a rank to all peers.
#include <cstddef>
#include <cstdint>

#include "sim/world.hpp"

namespace r2ccl::sim {

void World::share_nics() {
  const std::size_t rails = options_.rails.size();
  nics_.assign(ranks_.size() * rails, Nic{.ns_per_byte = options_.nic_ns_per_byte});
  for (int rank = 0; rank < options_.ranks; ++rank) {
    each_peer(rank, [&](int peer) {
      for (std::size_t rail = 0; rail < rails; ++rail)
        history(rank, peer, static_cast<RailId>(rail)).path.nics[side_of(rank, peer)] =
            &nics_[static_cast<std::size_t>(rank) * rails + rail];
    });
  }
}

std::uint64_t World::sent_bytes(int rank) const {
  std::uint64_t bytes = 0;
  const std::size_t rails = nics_.empty() ? 0 : options_.rails.size();
  for (std::size_t rail = 0; rail < rails; ++rail)
    bytes += nics_[static_cast<std::size_t>(rank) * rails + rail].sent_bytes;
  return bytes;
}

}  // namespace r2ccl::sim
