#include "plan/shares.hpp"

#include <algorithm>
#include <numeric>

namespace r2ccl {
namespace {

std::uint32_t bandwidth_of(std::uint8_t lost) {
  return whole_bandwidth - std::min(lost, most_lost);
}

}  // namespace

// With T = 2(n-1) D / sum b, every node is busy all the time if s_i = D (2(n-1) b_i - sum b) /
// ((n-2) sum b).  If a node is too slow for a share of at least 0, then T = D / b_min, and the
// others have time for shares in proportion to b_i - b_min.
std::vector<std::uint32_t> share_weights(std::span<const std::uint8_t> lost) {
  const auto nodes = static_cast<std::uint32_t>(lost.size());
  if (nodes < 3) return {};
  std::uint32_t sum = 0;
  std::uint32_t least = whole_bandwidth;
  std::uint32_t most = 0;
  for (const std::uint8_t each : lost) {
    const std::uint32_t bandwidth = bandwidth_of(each);
    sum += bandwidth;
    least = std::min(least, bandwidth);
    most = std::max(most, bandwidth);
  }
  if (least == most) return {};
  const std::uint32_t factor = 2 * (nodes - 1);
  const bool all_busy = factor * least >= sum;
  std::vector<std::uint32_t> weights;
  weights.reserve(nodes);
  for (const std::uint8_t each : lost) {
    const std::uint32_t bandwidth = bandwidth_of(each);
    weights.push_back(all_busy ? factor * bandwidth - sum : bandwidth - least);
  }
  return weights;
}

std::uint64_t exchange_time(std::span<const std::uint32_t> weights,
                            std::span<const std::uint8_t> lost) {
  const std::uint64_t nodes = lost.size();
  const std::uint64_t total =
      weights.empty() ? nodes : std::accumulate(weights.begin(), weights.end(), std::uint64_t{0});
  std::uint64_t longest = 0;
  for (std::size_t node = 0; node < nodes; ++node) {
    const std::uint64_t weight = weights.empty() ? 1 : weights[node];
    const std::uint64_t load = total + (nodes < 2 ? 0 : nodes - 2) * weight;
    longest =
        std::max(longest, (load << 20U) * whole_bandwidth / (total * bandwidth_of(lost[node])));
  }
  return longest;
}

std::vector<std::uint32_t> weights_in_use(std::span<const std::uint8_t> lost) {
  std::vector<std::uint32_t> weights = share_weights(lost);
  if (weights.empty()) return weights;
  const std::uint64_t total = std::accumulate(weights.begin(), weights.end(), std::uint64_t{0});
  const auto large = static_cast<std::uint64_t>(std::ranges::count_if(
      weights, [&](std::uint64_t weight) { return weight * lost.size() > total; }));
  const bool spread = 2 * large > lost.size();
  const bool some_empty = *std::ranges::min_element(weights) == 0;
  if (spread || some_empty) return weights;
  return {};
}

Shares::Shares(std::span<const std::uint32_t> rank_weights) {
  before_.reserve(rank_weights.size() + 1);
  before_.push_back(0);
  for (const std::uint32_t weight : rank_weights) before_.push_back(before_.back() + weight);
}

std::size_t Shares::begin(std::size_t bytes, int rank) const {
  const std::uint64_t part = before_[static_cast<std::size_t>(rank)];
  const std::uint64_t total = before_.back();
  if (part == total) return bytes;
  // units * part / total, without an overflow of the product.
  const std::uint64_t units = (bytes + border - 1) / border;
  const std::uint64_t whole = units / total * part + units % total * part / total;
  return std::min<std::size_t>(bytes, whole * border);
}

}  // namespace r2ccl
