// All-gather with a size for each rank: everybody sends its part to everybody.
#include "collectives/segments.hpp"

namespace r2ccl {

Status all_gatherv(Channel& channel, const std::byte* in, std::byte* out,
                   std::span<const std::size_t> counts, DType dtype) {
  const Parts parts(counts, size_of(dtype));
  const int rank = channel.rank();
  const std::span own(in, parts.size(rank));
  R2CCL_TRY(expect_parts(channel, out, parts, channel.rendezvous()));
  R2CCL_TRY(for_each_peer(channel, [&](int peer) { return channel.send(peer, own); }));
  copy_part(out + parts.begin(rank), in, parts.size(rank));

  // In place needs no settling: only the parts of others are written, only the own was sent.
  return receive_parts(channel, out, parts);
}

}  // namespace r2ccl
