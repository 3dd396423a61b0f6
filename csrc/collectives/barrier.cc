// Barrier by dissemination: in round k, tell the rank 2^k above and hear from the rank 2^k below;
// after log2(n) rounds everybody has heard, at some remove, from everybody.
#include "collectives/segments.hpp"

namespace r2ccl {

Status barrier(Channel& channel) {
  const int size = channel.size();
  for (int distance = 1; distance < size; distance *= 2) {
    R2CCL_TRY(channel.send((channel.rank() + distance) % size, {}));
    const int below = (channel.rank() - distance + size) % size;
    R2CCL_TRY(receive_into(channel, below, nullptr, 0));
  }
  return channel.finish();
}

}  // namespace r2ccl
