// Helpers shared by the algorithms: cut buffers into segments, visit the peers, fold a segment
// received from all peers.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>
#include <vector>

#include "collectives/collectives.hpp"

namespace r2ccl {

// Segments of a buffer, cut like the messages of a Channel.  An empty buffer has a single empty
// segment, because an empty send is a message, too.
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

// Calls body(peer) for every other rank and stops at the first error.  In step k, ranks r and
// k - r (mod n) visit each other.  Each step forms disjoint pairs, so no rank is the first peer of
// all others.  A wait for the peer to reach the same step cannot form a cycle.
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

// Offsets and sizes in bytes of the shards of all ranks, stored back to back in rank order.
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

// Receives the next message of a peer and copies the message to `to`.  Before the copy, waits until
// the first settle_bytes bytes sent to the peer by this call may be overwritten.
Status receive_into(Channel& channel, int peer, std::byte* to, std::size_t bytes,
                    std::size_t settle_bytes = 0);

// Offers each peer's shard of out as a target.  `meet`: also waits until all peers have offered
// theirs.
Status expect_shards(Channel& channel, std::byte* out, const Shards& shards, bool meet = false);

// Receives the shard of every peer into out, a segment of each peer in turn, and calls finish().
// `settle`: the destination still holds bytes sent to the same peer by this call.
Status receive_shards(Channel& channel, std::byte* out, const Shards& shards, bool settle = false);

// Calls copy_bytes() unless `bytes` is 0 or both addresses are equal.
void copy_unless_in_place(std::byte* to, const std::byte* from, std::size_t bytes);

// The inputs of a fold: the own memory and a message view of each peer.  Up to 64 ranks need no
// allocation.
class SegmentFold {
 public:
  SegmentFold(Channel& channel, const Reducer& reducer);
  SegmentFold(const SegmentFold&) = delete;
  SegmentFold& operator=(const SegmentFold&) = delete;

  // Receives the next message, of `bytes` bytes, from every peer.
  Status receive(std::size_t bytes);
  // Folds the received messages and `bytes` bytes of own input into out.  Releases the messages.
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
