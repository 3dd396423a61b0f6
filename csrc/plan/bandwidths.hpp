// The bandwidths of the nodes, which all ranks of a communicator know without messages of their
// own.  Each message of a full exchange carries the loss announced by its sender, and each rank
// hears every other rank.  After the call, all ranks therefore know the same losses, and use them
// from the next call on.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/units.hpp"
#include "plan/shares.hpp"

namespace r2ccl {

// The losses in use, and the shares for them.
class NodeBandwidths {
 public:
  NodeBandwidths() = default;  // shares stay even
  // node_of_rank has the index of each rank's node, counted from 0.
  explicit NodeBandwidths(std::vector<std::uint16_t> node_of_rank);

  // Returns true if uneven shares can help: three nodes or more, with equally many ranks each.
  [[nodiscard]] bool can_shift() const { return !node_of_rank_.empty(); }
  // Returns the index of a rank's node; needs can_shift().
  [[nodiscard]] std::uint16_t node_of(int rank) const {
    return node_of_rank_[static_cast<std::size_t>(rank)];
  }
  // Takes the announced loss of each rank into use.  The loss of a node is the largest of its
  // ranks.
  void adopt(std::span<const std::uint8_t> announced);
  // Returns the losses in use by node.
  [[nodiscard]] std::span<const std::uint8_t> lost() const { return lost_; }
  [[nodiscard]] const Shares& shares() const { return shares_; }
  // Returns the hash of the losses in use; 0 without a loss.  Losses that differ in one node never
  // have the same hash.
  [[nodiscard]] std::uint16_t hash() const { return hash_; }

 private:
  std::vector<std::uint16_t> node_of_rank_;
  std::vector<std::uint8_t> announced_;  // by rank
  std::vector<std::uint8_t> lost_;       // by node
  Shares shares_;
  std::uint16_t hash_ = 0;
};

// Decides which loss a rank announces.  Only this rank keeps state about changes; all others use
// what is announced.
class Announcer {
 public:
  // A loss is announced if the new shares make calls faster by this part.
  static constexpr std::uint64_t least_gain_percent = 5;
  // A recovery is announced after this time.
  static constexpr TimeNs recovery_ns = 1000 * ns_per_ms;

  // Returns the loss to announce.  `lost` is the present loss of the rank's node, `lost_of_nodes`
  // the losses in use, and `node` the index of the rank's node.
  std::uint8_t update(std::uint8_t lost, std::span<const std::uint8_t> lost_of_nodes,
                      std::size_t node, TimeNs now);
  [[nodiscard]] std::uint8_t announced() const { return announced_; }

 private:
  std::uint8_t announced_ = 0;
  bool recovering_ = false;
  std::uint8_t worst_ = 0;  // largest loss since recovering_since_
  TimeNs recovering_since_ = 0;
};

}  // namespace r2ccl
