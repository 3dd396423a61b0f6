// Small parts that the algorithms share: cutting into segments, walking the peers, folding one
// segment that came from all of them.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>
#include <vector>

#include "collectives/collectives.hpp"

namespace r2ccl {

// A run of bytes as the channel cuts it: at least one segment, so that nothing is still a message.
class Segments {
 public:
  Segments(std::size_t bytes, std::size_t segment_bytes) : bytes_(bytes), step_(segment_bytes) {}

  [[nodiscard]] std::size_t count() const { return bytes_ == 0 ? 1 : (bytes_ + step_ - 1) / step_; }
  [[nodiscard]] std::size_t begin(std::size_t index) const { return index * step_; }
  [[nodiscard]] std::size_t size(std::size_t index) const {
    return std::min(step_, bytes_ - begin(index));
  }
  [[nodiscard]] std::size_t end(std::size_t index) const { return begin(index) + size(index); }

 private:
  std::size_t bytes_;
  std::size_t step_;
};

// Calls body(peer) for every other rank and stops at the first error.  In step k, ranks r and k-r
// (mod n) turn to each other: every step pairs ranks off, so nobody is everybody's first peer, and
// a step that waits for its peer to reach the same step cannot close a circle.
template <typename Body>
Status for_each_peer(const Channel& channel, Body&& body) {
  const int size = channel.size();
  for (int step = 0; step < size; ++step) {
    const int peer = (step - channel.rank() + size) % size;
    if (peer == channel.rank()) continue;
    if (Status status = body(peer); !status.ok()) return status;
  }
  return {};
}

// Where the shards of the ranks begin when they lie one after another, in bytes.
class Shards {
 public:
  Shards(std::span<const std::size_t> counts, std::size_t element_bytes)
      : counts_(counts), element_bytes_(element_bytes) {}

  [[nodiscard]] std::size_t size(int rank) const {
    return counts_[static_cast<std::size_t>(rank)] * element_bytes_;
  }
  [[nodiscard]] std::size_t begin(int rank) const {
    std::size_t elements = 0;
    for (int before = 0; before < rank; ++before) {
      elements += counts_[static_cast<std::size_t>(before)];
    }
    return elements * element_bytes_;
  }

 private:
  std::span<const std::size_t> counts_;
  std::size_t element_bytes_;
};

// Copies the next message of a peer to `to`, once the first settle_bytes that this call sent to
// that peer may be overwritten.
Status receive_into(Channel& channel, int peer, std::byte* to, std::size_t bytes,
                    std::size_t settle_bytes = 0);

// Lets every peer's shard land in its place in out.  `meet`: and waits until all peers have, too.
Status expect_shards(Channel& channel, std::byte* out, const Shards& shards, bool meet = false);

// Receives every peer's shard into its place in out, a segment of each in turn, and finishes.
// settle: that place still holds what this call sent to the same peer.
Status receive_shards(Channel& channel, std::byte* out, const Shards& shards, bool settle = false);

// copy_bytes() that allows no memory at all and one and the same place.
void copy_unless_in_place(std::byte* to, const std::byte* from, std::size_t bytes);

// The inputs of one fold: the own memory, and a slot view of each peer.  Up to 64 ranks without
// allocating.
class SegmentFold {
 public:
  SegmentFold(Channel& channel, const Reducer& reducer);
  SegmentFold(const SegmentFold&) = delete;
  SegmentFold& operator=(const SegmentFold&) = delete;

  // Receives the next message, of `bytes` bytes, from every peer.
  Status receive(std::size_t bytes);
  // Folds them with `bytes` bytes of own input into out, and releases the messages.
  Status fold(const std::byte* own, std::byte* out, std::size_t bytes);

 private:
  static constexpr std::size_t near_count = 64;

  Channel& channel_;
  const Reducer& reducer_;
  std::array<const void*, near_count> near_;
  std::vector<const void*> far_;
  std::span<const void*> inputs_;
};

}  // namespace r2ccl
