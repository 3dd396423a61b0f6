// Gather with a size per rank: every rank sends its shard to root.
#include "collectives/segments.hpp"

namespace r2ccl {

Status gather(Channel& channel, const std::byte* in, std::byte* out,
              std::span<const std::size_t> counts, DType dtype, int root) {
  const Shards shards(counts, size_of(dtype));
  const int rank = channel.rank();
  if (rank != root) {
    R2CCL_TRY(channel.send(root, {in, shards.size(rank)}));
    return channel.finish();
  }
  R2CCL_TRY(expect_shards(channel, out, shards));
  copy_unless_in_place(out + shards.begin(rank), in, shards.size(rank));
  return receive_shards(channel, out, shards);
}

}  // namespace r2ccl
