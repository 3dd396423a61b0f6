// Point-to-point send and receive between two ranks.
#include "collectives/segments.hpp"

namespace r2ccl {

Status send(Channel& channel, const std::byte* data, std::size_t count, DType dtype, int peer) {
  R2CCL_TRY(channel.send(peer, {data, count * size_of(dtype)}));
  return channel.finish();
}

Status recv(Channel& channel, std::byte* data, std::size_t count, DType dtype, int peer) {
  const Segments segments(count * size_of(dtype), channel.segment_bytes());
  R2CCL_TRY(channel.expect(peer, 0, {data, count * size_of(dtype)}));
  for (std::size_t s = 0; s < segments.count(); ++s) {
    R2CCL_TRY(receive_into(channel, peer, data + segments.begin(s), segments.size(s)));
  }
  return channel.finish();
}

}  // namespace r2ccl
