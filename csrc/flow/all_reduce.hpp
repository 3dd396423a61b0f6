// The two-shot all-reduce as flows between nodes with a rank each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/errors.hpp"
#include "flow/network.hpp"

namespace r2ccl::flow {

struct AllReduce {
  std::vector<double> node_bytes_per_s = {};  // all NICs of a node, in each direction
  double latency_s = 0;                       // of a message
  double bytes = 0;                           // of the buffer
  std::vector<std::uint32_t> weights = {};    // of the nodes' shares; empty: even shares
  std::size_t blocks = 1;
  // The reduce-scatter of a block overlaps with the all-gather of the block before.  Else each
  // block begins after the end of the block before.
  bool overlapped = false;
};

// Returns the time in seconds.  All messages between two nodes are a stream, in the order of
// all_reduce_two_shot_uneven.cc if the blocks overlap.  Folds and copies take no time.  Needs
// positive bandwidths, at least one block, and a weight for each node or none.
[[nodiscard]] Result<double> time_of(const AllReduce& call);

}  // namespace r2ccl::flow
