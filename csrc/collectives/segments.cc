#include "collectives/segments.hpp"

#include "link/device_memory.hpp"

namespace r2ccl {

Status receive_into(Channel& channel, int peer, std::byte* to, std::size_t bytes,
                    std::size_t settle_bytes) {
  auto message = channel.receive(peer, bytes);
  if (!message.ok()) return message.take_status();
  if (settle_bytes != 0) R2CCL_TRY(channel.settle(peer, settle_bytes));
  copy_unless_in_place(to, message.value().data(), bytes);
  return channel.release(peer);
}

Status expect_shards(Channel& channel, std::byte* out, const Shards& shards, bool meet) {
  R2CCL_TRY(for_each_peer(channel, [&](int peer) {
    return channel.expect(peer, meet ? 1 : 0, {out + shards.begin(peer), shards.size(peer)});
  }));
  if (!meet) return {};
  R2CCL_TRY(for_each_peer(channel, [&](int peer) { return channel.send(peer, {}); }));
  return for_each_peer(channel, [&](int peer) -> Status {
    auto met = channel.receive(peer, 0);
    if (!met.ok()) return met.take_status();
    return channel.release(peer);
  });
}

Status receive_shards(Channel& channel, std::byte* out, const Shards& shards, bool settle) {
  bool more = true;
  for (std::size_t s = 0; more; ++s) {
    more = false;
    R2CCL_TRY(for_each_peer(channel, [&](int peer) -> Status {
      const Segments segments(shards.size(peer), channel.segment_bytes());
      if (s >= segments.count()) return {};
      more = more || s + 1 < segments.count();
      return receive_into(channel, peer, out + shards.begin(peer) + segments.begin(s),
                          segments.size(s), settle ? segments.end(s) : 0);
    }));
  }
  return channel.finish();
}

void copy_unless_in_place(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes != 0 && to != from) copy_bytes(to, from, bytes);
}

SegmentFold::SegmentFold(Channel& channel, const Reducer& reducer)
    : channel_(channel), reducer_(reducer) {
  const auto size = static_cast<std::size_t>(channel.size());
  if (size <= near_count) {
    inputs_ = std::span(near_).first(size);
  } else {
    far_.resize(size);
    inputs_ = far_;
  }
}

Status SegmentFold::receive(std::size_t bytes) {
  return for_each_peer(channel_, [&](int peer) -> Status {
    auto message = channel_.receive(peer, bytes);
    if (!message.ok()) return message.take_status();
    inputs_[static_cast<std::size_t>(peer)] = message.value().data();
    return {};
  });
}

Status SegmentFold::fold(const std::byte* own, std::byte* out, std::size_t bytes) {
  inputs_[static_cast<std::size_t>(channel_.rank())] = own;
  reduce(reducer_.dtype, reducer_.op, out, inputs_, reducer_.tree, bytes / size_of(reducer_.dtype),
         reducer_.simd);
  return for_each_peer(channel_, [&](int peer) { return channel_.release(peer); });
}

}  // namespace r2ccl
