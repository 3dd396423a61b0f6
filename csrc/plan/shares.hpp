// Shares of a two-shot all-reduce while some nodes have lost bandwidth.
//
// A node that owns the share s of D bytes sends and receives D + (n-2)s bytes, for n nodes with a
// rank each.  The shares here minimise the time of the slowest node: D * max(1/b_min, 2(n-1)/sum b)
// for bandwidths b.  No order of additions changes, so no bit of a result depends on the shares.
//
// Every rank must compute the same shares from the same bandwidths, so the arithmetic uses integers
// only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace r2ccl {

// The loss of a node is stated in sixteenths of its bandwidth, from 0 to most_lost.
inline constexpr unsigned whole_bandwidth = 16;
inline constexpr std::uint8_t most_lost = whole_bandwidth - 1;

// Returns the optimal weights of the nodes' shares by the closed form.  Empty: even shares are
// optimal, which is always so for fewer than three nodes.
[[nodiscard]] std::vector<std::uint32_t> share_weights(std::span<const std::uint8_t> lost);

// Returns the time of an all-reduce with these weights while the nodes lack `lost`.  The unit is
// the time of a whole node to move the buffer once, divided by 2^20.
[[nodiscard]] std::uint64_t exchange_time(std::span<const std::uint32_t> weights,
                                          std::span<const std::uint8_t> lost);

// Returns share_weights(lost) if the slowest nodes have empty shares, or if more than half of the
// nodes have more than an even share.  Else returns no weights: few nodes have large shares, the
// others wait for their folds, and the flow model can be slower than with even shares.
[[nodiscard]] std::vector<std::uint32_t> weights_in_use(std::span<const std::uint8_t> lost);

// Shares of the ranks in a buffer, back to back in rank order.  Borders are multiples of 64 bytes,
// except the end of the buffer.  A share may be empty.
class Shares {
 public:
  static constexpr std::size_t border = 64;

  Shares() = default;
  // Shares of ranks with these weights; the sum of all weights is above 0.
  explicit Shares(std::span<const std::uint32_t> rank_weights);

  // Returns true if no weights were given: callers then divide evenly.
  [[nodiscard]] bool even() const { return before_.empty(); }
  // Return offset and size in bytes of a rank's share of `bytes` bytes.
  [[nodiscard]] std::size_t begin(std::size_t bytes, int rank) const;
  [[nodiscard]] std::size_t size(std::size_t bytes, int rank) const {
    return begin(bytes, rank + 1) - begin(bytes, rank);
  }

 private:
  std::vector<std::uint64_t> before_;  // sums of the weights before each rank, then of all
};

}  // namespace r2ccl
