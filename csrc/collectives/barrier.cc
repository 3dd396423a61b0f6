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

Status compare_tags(Channel& channel) {
  const auto each_peer = [&channel](auto&& act) -> Status {
    for (int distance = 1; distance < channel.size(); ++distance)
      R2CCL_TRY(act((channel.rank() + distance) % channel.size()));
    return {};
  };
  R2CCL_TRY(each_peer([&](int peer) { return channel.send(peer, {}); }));
  R2CCL_TRY(each_peer([&](int peer) { return receive_into(channel, peer, nullptr, 0); }));
  return channel.finish();
}

}  // namespace r2ccl
