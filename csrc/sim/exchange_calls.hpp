// Collectives of simulated GPUs with an exchange inside each node: generated from the seed, equal
// on every GPU, with the input and the expected result of each GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "device/exchange_bodies.hpp"
#include "sim/calls.hpp"
#include "sim/random.hpp"

namespace r2ccl::sim {

// A collective of `nodes` nodes with `local_ranks` GPUs each.  Ranks are ordered by node, then by
// local rank.  An inter-node group consists of the GPUs with the same local rank.
struct ExchangeCall {
  std::uint64_t seed = 0;                          // seed of the inputs
  Collective collective = Collective::all_reduce;  // all_reduce, all_gather or reduce_scatter
  DType dtype = DType::f32;
  ReduceOp op = ReduceOp::sum;
  std::uint32_t nodes = 0;
  std::uint32_t local_ranks = 0;
  std::size_t count = 0;  // elements per shard; all_reduce: of the whole buffer
  bool ahead = false;     // posts the next call before waiting for this result

  [[nodiscard]] std::size_t bytes() const { return count * size_of(dtype); }
  [[nodiscard]] std::size_t input_bytes() const;
  [[nodiscard]] std::size_t output_bytes() const;
  // Returns the rows of the caller's buffer that belong to a local rank: rows of the input to
  // reduce, or rows of the output to publish.
  [[nodiscard]] device::Rows rows_of(std::uint32_t local_rank) const;
  // Returns the collective of the inter-node group over the rails.
  [[nodiscard]] Call inter_node_call(std::uint32_t number, std::uint32_t local_rank) const;

  using Bytes = std::vector<std::byte>;
  [[nodiscard]] Bytes input(std::uint32_t node, std::uint32_t local_rank) const;
  // Returns the data posted by the GPU of a local rank: its rows of the node's sum, or its own
  // shard.
  [[nodiscard]] Bytes posted(std::uint32_t node, std::uint32_t local_rank) const;
  [[nodiscard]] Bytes output(std::uint32_t node, std::uint32_t local_rank) const;
};

[[nodiscard]] ExchangeCall random_exchange(Random& random, std::uint32_t nodes,
                                           std::uint32_t local_ranks);
[[nodiscard]] std::string describe(const ExchangeCall& call);

// Returns the rows of `all`, concatenated.
[[nodiscard]] ExchangeCall::Bytes rows_in(const ExchangeCall::Bytes& all, const device::Rows& rows);

}  // namespace r2ccl::sim
