// All-reduce, algorithm two_shot with uneven shares: the reduce-scatter of a block overlaps with
// the all-gather of the block before.  A slow node then sends input and receives results at the
// same time.  Without the overlap, even shares would be optimal.
//
// Two blocks are under way at a time.  With more, the reduce-scatters run ahead, and the overlap is
// lost.  The messages of a stream, S for a share of the input and G for a folded share, are in the
// order S0 S1 G0 S2 G1 S3 G2 ….
#include <algorithm>
#include <array>
#include <vector>

#include "collectives/segments.hpp"
#include "link/mutants.hpp"
#include "plan/blocks.hpp"

namespace r2ccl {
namespace {

class Pipeline {
 public:
  Pipeline(Channel& channel, const std::byte* in, std::byte* out, std::size_t bytes,
           std::size_t blocks, const Reducer& reducer, const Shares& shares)
      : channel_(channel),
        in_(in),
        out_(out),
        bytes_(bytes),
        step_((bytes + blocks * Shares::border - 1) / (blocks * Shares::border) * Shares::border),
        blocks_((bytes + step_ - 1) / step_),
        shares_(shares),
        fold_(channel, reducer),
        sent_(static_cast<std::size_t>(channel.size())) {
    for (auto& begins : scattered_) begins.resize(sent_.size());
  }

  Status run() {
    R2CCL_TRY(scatter(0));
    for (std::size_t block = 0; block < blocks_; ++block) {
      if (block + 1 < blocks_) R2CCL_TRY(scatter(block + 1));
      R2CCL_TRY(fold(block));
      if (block > 0) R2CCL_TRY(gather(block - 1));
    }
    R2CCL_TRY(gather(blocks_ - 1));
    return channel_.finish();
  }

 private:
  struct Range {
    std::size_t begin;
    std::size_t size;
  };
  // Returns a rank's share of a block.
  [[nodiscard]] Range range(std::size_t block, int rank) const {
    const std::size_t begin = block * step_;
    const std::size_t size = std::min(step_, bytes_ - begin);
    const std::size_t size_of_share = shares_.size(size, rank);
    const bool off = planted(Mutant::share_border_off) && size_of_share >= Shares::border;
    return {begin + shares_.begin(size, rank) + (off ? 1 : 0), size_of_share - (off ? 1 : 0)};
  }
  [[nodiscard]] Segments segments(std::size_t bytes) const {
    return {bytes, channel_.segment_bytes()};
  }
  Status send(int peer, std::span<const std::byte> data) {
    sent_[static_cast<std::size_t>(peer)] += data.size();
    return channel_.send(peer, data);
  }

  // Sends each peer its share of the input.
  Status scatter(std::size_t block) {
    return for_each_peer(channel_, [&](int peer) -> Status {
      const Range share = range(block, peer);
      const auto index = static_cast<std::size_t>(peer);
      scattered_[block % scattered_.size()][index] = sent_[index];
      return send(peer, {in_ + share.begin, share.size});
    });
  }

  // Folds the own share and sends the result to all peers, segment by segment.
  Status fold(std::size_t block) {
    const Range own = range(block, channel_.rank());
    const Segments parts = segments(own.size);
    for (std::size_t s = 0; s < parts.count(); ++s) {
      R2CCL_TRY(fold_.receive(parts.size(s)));
      // In-place use needs no settle() here: no send reads the own share of the input.
      std::byte* const to = out_ + own.begin + parts.begin(s);
      R2CCL_TRY(fold_.fold(in_ + own.begin + parts.begin(s), to, parts.size(s)));
      const std::span<const std::byte> folded(to, parts.size(s));
      R2CCL_TRY(for_each_peer(channel_, [&](int peer) { return send(peer, folded); }));
    }
    return {};
  }

  // Receives the folded shares of the peers, a segment of each peer in turn.
  Status gather(std::size_t block) {
    bool more = true;
    for (std::size_t s = 0; more; ++s) {
      more = false;
      R2CCL_TRY(for_each_peer(channel_, [&](int peer) -> Status {
        const Range share = range(block, peer);
        const Segments parts = segments(share.size);
        if (s >= parts.count()) return {};
        more = more || s + 1 < parts.count();
        return receive_into(channel_, peer, out_ + share.begin + parts.begin(s), parts.size(s),
                            settle_bytes(block, peer, parts.end(s)));
      }));
    }
    return {};
  }

  // In place, a folded segment overwrites the input segment sent to the same peer.  Returns the end
  // of the input segment in the stream, for an end within the peer's share; 0: nothing to settle.
  [[nodiscard]] std::size_t settle_bytes(std::size_t block, int peer, std::size_t end) const {
    const Range share = range(block, peer);
    if (in_ != out_ || share.size == 0) return 0;
    return scattered_[block % scattered_.size()][static_cast<std::size_t>(peer)] + end;
  }

  Channel& channel_;
  const std::byte* const in_;
  std::byte* const out_;
  const std::size_t bytes_;
  const std::size_t step_;
  const std::size_t blocks_;
  const Shares& shares_;
  SegmentFold fold_;
  std::vector<std::size_t> sent_;  // bytes sent to each peer
  // Value of sent_ before the scatter of each of the last three blocks.
  std::array<std::vector<std::size_t>, 3> scattered_;
};

}  // namespace

Status all_reduce_two_shot_uneven(Channel& channel, const std::byte* in, std::byte* out,
                                  std::size_t count, const Reducer& reducer, const Shares& shares) {
  const std::size_t bytes = count * size_of(reducer.dtype);
  const auto ranks = static_cast<std::size_t>(channel.size());
  const std::size_t blocks =
      shares.even() ? 0 : overlapped_blocks(bytes, ranks, channel.segment_bytes());
  if (blocks == 0) return all_reduce_two_shot(channel, in, out, count, reducer);
  return Pipeline(channel, in, out, bytes, blocks, reducer, shares).run();
}

}  // namespace r2ccl
