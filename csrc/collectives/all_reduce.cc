// All-reduce by a chosen algorithm.
#include <cstdint>
#include <vector>

#include "collectives/collectives.hpp"

namespace r2ccl {

Status all_reduce(Channel& channel, const std::byte* in, std::byte* out, std::size_t count,
                  const Reducer& reducer, Algorithm algorithm, const Shares& shares) {
  if (algorithm == Algorithm::one_shot)
    return all_reduce_one_shot(channel, in, out, count, reducer);
  if (algorithm != Algorithm::two_shot_overlap || !shares.even() || channel.size() < 2)
    return all_reduce_two_shot_uneven(channel, in, out, count, reducer, shares);
  const std::vector<std::uint32_t> alike(static_cast<std::size_t>(channel.size()), 1);
  return all_reduce_two_shot_uneven(channel, in, out, count, reducer, Shares(alike));
}

}  // namespace r2ccl
