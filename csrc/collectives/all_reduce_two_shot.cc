// All-reduce, two-shot: a reduce-scatter of even shards and an all-gather of the folded shards, run
// together.  A folded segment leaves while later ones still arrive.  On each stream lie first the
// segments of the receiver's shard, then the folded segments of the sender's shard.
//
// Large inputs go block by block, each done before the next is begun: what is under way then stays
// in the caches, which gains more than the idle moments between blocks cost.
#include "collectives/segments.hpp"

namespace r2ccl {
namespace {

constexpr std::size_t segment_border = 64;

// Two segments, but of every rank a quarter of one at least, and even shards of whole borders.
std::size_t block_bytes_of(const Channel& channel) {
  const auto ranks = static_cast<std::size_t>(channel.size());
  const std::size_t segment = channel.segment_bytes();
  const std::size_t shard = std::max(2 * segment / ranks, segment / 4);
  return (shard + segment_border - 1) / segment_border * segment_border * ranks;
}

// Even shards with borders at multiples of 64 bytes; the last ones may be shorter or empty.
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

// Phase 1: folds the own shard into out, segment by segment, and passes each on.
Status fold_own_shard(Channel& channel, const std::byte* own_in, std::byte* own_out,
                      const Segments& segments, const Reducer& reducer) {
  SegmentFold fold(channel, reducer);
  for (std::size_t s = 0; s < segments.count(); ++s) {
    R2CCL_TRY(fold.receive(segments.size(s)));
    // In place needs no settling here: nobody was sent the own shard of the input.
    std::byte* const to = own_out + segments.begin(s);
    R2CCL_TRY(fold.fold(own_in + segments.begin(s), to, segments.size(s)));
    const std::span<const std::byte> folded(to, segments.size(s));
    R2CCL_TRY(for_each_peer(channel, [&](int peer) { return channel.send(peer, folded); }));
  }
  return {};
}

// Before, the call has sent so many bytes to each peer.
Status reduce_block(Channel& channel, const std::byte* in, std::byte* out, std::size_t bytes,
                    std::size_t sent_before, const Reducer& reducer) {
  const std::size_t segment_bytes = channel.segment_bytes();
  const EvenShards shards(bytes, channel.size());
  const auto segments_of = [&](int rank) { return Segments(shards.size(rank), segment_bytes); };

  // In place, what would land there is not sent yet.
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

  // Phase 2.  The first rank's shard is the longest.
  const std::size_t rounds = segments_of(0).count();
  for (std::size_t s = 0; s < rounds; ++s) {
    R2CCL_TRY(for_each_peer(channel, [&](int peer) -> Status {
      const Segments segments = segments_of(peer);
      if (s >= segments.count()) return {};
      // In place, this overwrites what was sent to the same peer first thing in this block.
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
  const std::size_t block = block_bytes_of(channel);
  std::size_t done = 0;
  do {
    const std::size_t size = std::min(block, bytes - done);
    // Of a whole block all shards are of one size, and go once as input and once folded.
    const std::size_t sent = 2 * done / ranks;
    R2CCL_TRY(reduce_block(channel, in + done, out + done, size, sent, reducer));
    done += size;
  } while (done < bytes);
  return {};
}

}  // namespace r2ccl
