// Reduce-scatter with a size per rank: every rank sends each peer that peer's shard and folds its
// own shard.
#include "collectives/segments.hpp"

namespace r2ccl {

Status reduce_scatterv(Channel& channel, const std::byte* in, std::byte* out,
                       std::span<const std::size_t> counts, const Reducer& reducer) {
  const Shards shards(counts, size_of(reducer.dtype));
  R2CCL_TRY(for_each_peer(channel, [&](int peer) {
    return channel.send(peer, {in + shards.begin(peer), shards.size(peer)});
  }));

  const int rank = channel.rank();
  const std::byte* const own = in + shards.begin(rank);
  const Segments segments(shards.size(rank), channel.segment_bytes());
  SegmentFold fold(channel, reducer);
  for (std::size_t s = 0; s < segments.count(); ++s) {
    R2CCL_TRY(fold.receive(segments.size(s)));
    // In-place use needs no settle(): no send reads the own shard.
    R2CCL_TRY(fold.fold(own + segments.begin(s), out + segments.begin(s), segments.size(s)));
  }
  return channel.finish();
}

}  // namespace r2ccl
