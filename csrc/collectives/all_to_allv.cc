// All-to-all with a size per pair: every rank sends a shard to every peer.
#include "collectives/segments.hpp"

namespace r2ccl {

Status all_to_allv(Channel& channel, const std::byte* in, std::span<const std::size_t> in_counts,
                   std::byte* out, std::span<const std::size_t> out_counts, DType dtype) {
  const Shards sent(in_counts, size_of(dtype));
  const Shards received(out_counts, size_of(dtype));
  const int size = channel.size();
  const int rank = channel.rank();

  // In place with equal counts, a received shard replaces the shard sent to the same peer, so a
  // settle() per segment is enough.  With different counts, a received shard overlaps shards sent
  // to other peers.  A settle() for several peers could form a cycle of waiting ranks; a copy of
  // the input is sent instead.
  const bool in_place = in == out;
  const bool same_layout = std::ranges::equal(in_counts, out_counts);
  if (in_place && !same_layout) {
    channel.scratch().assign(in, in + sent.begin(size));
    in = channel.scratch().data();
  }
  if (in != out) R2CCL_TRY(expect_shards(channel, out, received, channel.rendezvous()));

  R2CCL_TRY(for_each_peer(channel, [&](int peer) {
    return channel.send(peer, {in + sent.begin(peer), sent.size(peer)});
  }));
  if (!channel.rendezvous())  // with rendezvous, the GPU copies its own shard
    copy_unless_in_place(out + received.begin(rank), in + sent.begin(rank), sent.size(rank));
  return receive_shards(channel, out, received, in_place && same_layout);
}

}  // namespace r2ccl
