// Broadcast: root sends to every rank directly.  Beyond largest_flat_broadcast ranks, the ranks
// form a binomial tree, and a rank forwards each segment on arrival.
#include "collectives/segments.hpp"

namespace r2ccl {
namespace {

// Calls body(child) for each child of a rank in the binomial tree, with ranks numbered from root.
// The parent of v is v with its lowest set bit cleared.  The child with the most descendants is
// first.
template <typename Body>
Status for_each_child(int from_root, int size, Body&& body) {
  int limit = 1;
  while (limit < size && (from_root & limit) == 0) limit <<= 1;
  for (int bit = limit >> 1; bit > 0; bit >>= 1) {
    if (from_root + bit < size) R2CCL_TRY(body(from_root + bit));
  }
  return {};
}

}  // namespace

Status broadcast(Channel& channel, std::byte* data, std::size_t count, DType dtype, int root) {
  const int size = channel.size();
  const std::size_t bytes = count * size_of(dtype);
  const int from_root = (channel.rank() - root + size) % size;
  const bool flat = size <= largest_flat_broadcast;

  const auto pass_on = [&](std::span<const std::byte> part) {
    const auto send = [&](int child) { return channel.send((root + child) % size, part); };
    if (!flat) return for_each_child(from_root, size, send);
    if (from_root != 0) return Status();
    return for_each_peer(channel, [&](int peer) { return channel.send(peer, part); });
  };

  if (from_root == 0) {
    R2CCL_TRY(pass_on({data, bytes}));
    return channel.finish();
  }
  const int parent = flat ? root : (root + (from_root & (from_root - 1))) % size;
  const Segments segments(bytes, channel.segment_bytes());
  R2CCL_TRY(channel.expect(parent, 0, {data, bytes}));
  for (std::size_t s = 0; s < segments.count(); ++s) {
    std::byte* const part = data + segments.begin(s);
    R2CCL_TRY(receive_into(channel, parent, part, segments.size(s)));
    R2CCL_TRY(pass_on({part, segments.size(s)}));
  }
  return channel.finish();
}

}  // namespace r2ccl
