// Dissemination barrier: in round k a rank signals rank + 2^k and waits for rank - 2^k (mod n).
// After ceil(log2(n)) rounds every rank has heard from every other rank, directly or indirectly.
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

Status post_tags(Channel& channel) {
  for (int distance = 1; distance < channel.size(); ++distance)
    R2CCL_TRY(channel.send((channel.rank() + distance) % channel.size(), {}));
  return channel.finish();
}

Status receive_tags(Channel& channel) {
  for (int distance = 1; distance < channel.size(); ++distance)
    R2CCL_TRY(receive_into(channel, (channel.rank() + distance) % channel.size(), nullptr, 0));
  return {};
}

}  // namespace r2ccl
