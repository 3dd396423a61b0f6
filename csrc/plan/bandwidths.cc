#include "plan/bandwidths.hpp"

#include <algorithm>
#include <utility>

namespace r2ccl {
namespace {

// CRC-16 (polynomial 0x1021, initial value 0): detects every change of a node or of two adjacent
// nodes, and is 0 if no node has a loss.
std::uint16_t hash_of(std::span<const std::uint8_t> lost) {
  unsigned crc = 0;
  for (const std::uint8_t each : lost) {
    crc ^= unsigned{each} << 8U;
    for (int bit = 0; bit < 8; ++bit) crc = (crc << 1U) ^ ((crc & 0x8000U) != 0 ? 0x1021U : 0U);
    crc &= 0xFFFFU;
  }
  return static_cast<std::uint16_t>(crc);
}

// Returns true if each of at least three nodes has equally many ranks.
bool shiftable(std::span<const std::uint16_t> node_of_rank, std::size_t nodes) {
  if (nodes < 3) return false;
  std::vector<std::size_t> ranks(nodes);
  for (const std::uint16_t node : node_of_rank) ++ranks[node];
  return std::ranges::all_of(ranks, [&](std::size_t count) { return count == ranks[0]; });
}

}  // namespace

NodeBandwidths::NodeBandwidths(std::vector<std::uint16_t> node_of_rank) {
  if (node_of_rank.empty()) return;
  const std::size_t nodes = std::size_t{1} + *std::ranges::max_element(node_of_rank);
  if (!shiftable(node_of_rank, nodes)) return;
  node_of_rank_ = std::move(node_of_rank);
  announced_.resize(node_of_rank_.size());
  lost_.resize(nodes);
}

void NodeBandwidths::adopt(std::span<const std::uint8_t> announced) {
  if (!can_shift() || std::ranges::equal(announced, announced_)) return;
  announced_.assign(announced.begin(), announced.end());
  std::ranges::fill(lost_, std::uint8_t{0});
  for (std::size_t rank = 0; rank < announced_.size(); ++rank) {
    std::uint8_t& node = lost_[node_of_rank_[rank]];
    node = std::max(node, std::min(announced_[rank], most_lost));
  }
  hash_ = hash_of(lost_);
  const std::vector<std::uint32_t> weights = weights_in_use(lost_);
  shares_ = {};
  if (weights.empty()) return;
  std::vector<std::uint32_t> of_ranks;
  of_ranks.reserve(node_of_rank_.size());
  for (const std::uint16_t node : node_of_rank_) of_ranks.push_back(weights[node]);
  shares_ = Shares(of_ranks);
}

std::uint8_t Announcer::update(std::uint8_t lost, std::span<const std::uint8_t> lost_of_nodes,
                               std::size_t node, TimeNs now) {
  // Compares the shares for `announced` with those for `shares_for`, while the node lacks `truth`.
  const auto gains = [&](std::uint8_t shares_for, std::uint8_t truth) {
    std::vector<std::uint8_t> nodes(lost_of_nodes.begin(), lost_of_nodes.end());
    const auto weights_for = [&](std::uint8_t value) {
      nodes[node] = value;
      return weights_in_use(nodes);
    };
    const std::vector<std::uint32_t> before = weights_for(announced_);
    const std::vector<std::uint32_t> after = weights_for(shares_for);
    nodes[node] = truth;
    return exchange_time(before, nodes) * 100 >=
           exchange_time(after, nodes) * (100 + least_gain_percent);
  };

  if (lost >= announced_) {
    recovering_ = false;
    if (lost > announced_ && gains(lost, lost)) announced_ = lost;
    return announced_;
  }
  if (!recovering_) {
    recovering_ = true;
    recovering_since_ = now;
    worst_ = lost;
  }
  worst_ = std::max(worst_, lost);
  if (now - recovering_since_ < recovery_ns) return announced_;
  recovering_ = false;
  // A whole node always returns to even shares.  A part of a recovery has to pay.
  if (worst_ == 0 || gains(worst_, worst_)) announced_ = worst_;
  return announced_;
}

}  // namespace r2ccl
