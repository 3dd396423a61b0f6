// Gather with a size for each rank: everybody sends its part to root.
#include "collectives/segments.hpp"

namespace r2ccl {

Status gather(Channel& channel, const std::byte* in, std::byte* out,
              std::span<const std::size_t> counts, DType dtype, int root) {
  const Parts parts(counts, size_of(dtype));
  const int rank = channel.rank();
  if (rank != root) {
    R2CCL_TRY(channel.send(root, {in, parts.size(rank)}));
    return channel.finish();
  }
  R2CCL_TRY(expect_parts(channel, out, parts));
  copy_part(out + parts.begin(rank), in, parts.size(rank));
  return receive_parts(channel, out, parts);
}

}  // namespace r2ccl
