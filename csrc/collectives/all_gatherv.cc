// All-gather with a size per rank: every rank sends its shard to every peer.
#include "collectives/segments.hpp"

namespace r2ccl {

Status all_gatherv(Channel& channel, const std::byte* in, std::byte* out,
                   std::span<const std::size_t> counts, DType dtype) {
  const Shards shards(counts, size_of(dtype));
  const int rank = channel.rank();
  const std::span own(in, shards.size(rank));
  R2CCL_TRY(expect_shards(channel, out, shards, channel.rendezvous()));
  R2CCL_TRY(for_each_peer(channel, [&](int peer) { return channel.send(peer, own); }));
  copy_unless_in_place(out + shards.begin(rank), in, shards.size(rank));

  // In-place use needs no settle(): writes go to the peers' shards, and sends read the own shard
  // only.
  return receive_shards(channel, out, shards);
}

}  // namespace r2ccl
