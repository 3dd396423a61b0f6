// The choice of an all-reduce by size and by the losses in use, with its reasons for the journal.
#include <algorithm>
#include <cstdint>
#include <span>

#include "engine/communicator.hpp"
#include "journal/journal.hpp"
#include "plan/blocks.hpp"
#include "plan/cost_model.hpp"

namespace r2ccl {

Algorithm Communicator::choose(Algorithm given, std::size_t bytes) {
  const std::span<const std::uint8_t> lost = channel_->lost_in_use();
  const std::uint8_t most = lost.empty() ? std::uint8_t{0} : *std::ranges::max_element(lost);
  Algorithm algorithm = given;
  AlgorithmReason reason = AlgorithmReason::given;
  if (given == Algorithm::automatic) {
    const Algorithm by_size = choose_all_reduce(bytes, tree_.node_sizes);
    algorithm =
        most == 0 ? by_size : choose_all_reduce(bytes, tree_.node_sizes, loopback_costs, lost);
    reason = algorithm == by_size ? AlgorithmReason::size : AlgorithmReason::loss;
    channel_->set_algorithm(algorithm);
  }
  channel_->note_choice(
      {.algorithm = static_cast<std::uint8_t>(algorithm),
       .algorithm_reason = static_cast<std::uint8_t>(reason),
       .shares_reason = static_cast<std::uint8_t>(shares_reason(algorithm, bytes, most > 0)),
       .lost = most});
  return algorithm;
}

// The same conditions as in all_reduce_two_shot_uneven().
SharesReason Communicator::shares_reason(Algorithm algorithm, std::size_t bytes,
                                         bool any_lost) const {
  if (algorithm == Algorithm::one_shot) return SharesReason::none;
  if (!any_lost) return SharesReason::no_loss;
  if (channel_->shares().even()) return SharesReason::no_gain;
  const auto ranks = static_cast<std::size_t>(size());
  return overlapped_blocks(bytes, ranks, channel_->segment_bytes()) == 0 ? SharesReason::few_blocks
                                                                         : SharesReason::loss;
}

}  // namespace r2ccl
