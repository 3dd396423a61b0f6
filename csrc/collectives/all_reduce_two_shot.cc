// All-reduce, algorithm two_shot: a reduce-scatter of even shards overlapped with an all-gather of
// the folded shards.  A rank sends a folded segment while later segments still arrive.  A stream
// carries the segments of the receiver's shard first, then the folded segments of the sender's
// shard.
//
// A large input is split into blocks, and a block starts after the end of the previous block.  The
// data in flight then stays in the caches, which gains more than the pauses between blocks cost.
#include "collectives/segments.hpp"
#include "plan/blocks.hpp"

namespace r2ccl {
namespace {

constexpr std::size_t segment_border = 64;

// Even shards with borders at multiples of 64 bytes.  The last shards may be shorter or empty.
class EvenShards {
 public:
  EvenShards(std::size_t bytes, int ranks) : bytes_(bytes) {
    const auto count = static_cast<std::size_t>(ranks);
    const std::size_t blocks = (bytes + segment_border - 1) / segment_border;
    step_ = (blocks + count - 1) / count * segment_border;
  }
  [[nodiscard]] std::size_t begin(int rank) const {
    return std::min(bytes_, static_cast<std::size_t>(rank) * step_);
  }
  [[nodiscard]] std::size_t size(int rank) const { return begin(rank + 1) - begin(rank); }

 private:
  std::size_t bytes_;
  std::size_t step_;
};

// Phase 1: folds the own shard into out, segment by segment, and sends each result to all peers.
Status fold_own_shard(Channel& channel, const std::byte* own_in, std::byte* own_out,
                      const Segments& segments, const Reducer& reducer) {
  SegmentFold fold(channel, reducer);
  for (std::size_t s = 0; s < segments.count(); ++s) {
    R2CCL_TRY(fold.receive(segments.size(s)));
    // In-place use needs no settle() here: no send reads the own shard of the input.
    std::byte* const to = own_out + segments.begin(s);
    R2CCL_TRY(fold.fold(own_in + segments.begin(s), to, segments.size(s)));
    const std::span<const std::byte> folded(to, segments.size(s));
    R2CCL_TRY(for_each_peer(channel, [&](int peer) { return channel.send(peer, folded); }));
  }
  return {};
}

// Runs the all-reduce of a block.  Earlier blocks have sent `sent_before` bytes to each peer.
Status reduce_block(Channel& channel, const std::byte* in, std::byte* out, std::size_t bytes,
                    std::size_t sent_before, const Reducer& reducer) {
  const std::size_t segment_bytes = channel.segment_bytes();
  const EvenShards shards(bytes, channel.size());
  const auto segments_of = [&](int rank) { return Segments(shards.size(rank), segment_bytes); };

  // In place there are no targets, because the memory still holds unsent input.
  const int rank = channel.rank();
  if (in != out) {
    R2CCL_TRY(for_each_peer(channel, [&](int peer) {
      return channel.expect(peer, segments_of(rank).count(),
                            {out + shards.begin(peer), shards.size(peer)});
    }));
  }
  R2CCL_TRY(for_each_peer(channel, [&](int peer) {
    return channel.send(peer, {in + shards.begin(peer), shards.size(peer)});
  }));

  const std::size_t own = shards.begin(rank);
  R2CCL_TRY(fold_own_shard(channel, in + own, out + own, segments_of(rank), reducer));

  // Phase 2: receives the folded shards of the peers.  The shard of rank 0 is the longest.
  const std::size_t rounds = segments_of(0).count();
  for (std::size_t s = 0; s < rounds; ++s) {
    R2CCL_TRY(for_each_peer(channel, [&](int peer) -> Status {
      const Segments segments = segments_of(peer);
      if (s >= segments.count()) return {};
      // In place, the folded segment overwrites the input shard sent to the same peer in phase 1.
      return receive_into(channel, peer, out + shards.begin(peer) + segments.begin(s),
                          segments.size(s), in == out ? sent_before + segments.end(s) : 0);
    }));
  }
  return channel.finish();
}

}  // namespace

Status all_reduce_two_shot(Channel& channel, const std::byte* in, std::byte* out, std::size_t count,
                           const Reducer& reducer) {
  const std::size_t bytes = count * size_of(reducer.dtype);
  const auto ranks = static_cast<std::size_t>(channel.size());
  const std::size_t block = even_block_bytes(ranks, channel.segment_bytes());
  std::size_t done = 0;
  do {
    const std::size_t size = std::min(block, bytes - done);
    // All earlier blocks are whole and have shards of equal size.  Each block sent two shards to
    // each peer: a shard of the input and a folded shard.
    const std::size_t sent = 2 * done / ranks;
    R2CCL_TRY(reduce_block(channel, in + done, out + done, size, sent, reducer));
    done += size;
  } while (done < bytes);
  return {};
}

}  // namespace r2ccl
