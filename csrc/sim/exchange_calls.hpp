// The collectives that a simulated job's GPUs exchange inside their nodes: made from the seed, the
// same on every GPU, and what each of them brings and must get.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "device/exchange_bodies.hpp"
#include "sim/calls.hpp"
#include "sim/random.hpp"

namespace r2ccl::sim {

// One collective of `nodes` nodes with `local_ranks` GPUs each.  Ranks are in the order of nodes,
// and of local ranks inside a node; an inter-node group is the GPUs of one local rank.
struct ExchangeCall {
  std::uint64_t seed = 0;                          // of the inputs
  Collective collective = Collective::all_reduce;  // all_reduce, all_gather or reduce_scatter
  DType dtype = DType::f32;
  ReduceOp op = ReduceOp::sum;
  std::uint32_t nodes = 0;
  std::uint32_t local_ranks = 0;
  std::size_t count = 0;  // elements of a shard, where there are shards
  bool ahead = false;     // the next call is posted before this one's result is awaited

  [[nodiscard]] std::size_t bytes() const { return count * size_of(dtype); }
  [[nodiscard]] std::size_t input_bytes() const;
  [[nodiscard]] std::size_t output_bytes() const;
  // What a local rank adds up of an input, or publishes of the output: rows of the caller's buffer.
  [[nodiscard]] device::Rows rows_of(std::uint32_t local_rank) const;
  // The collective of the inter-node group over the rails.
  [[nodiscard]] Call inter_node_call(std::uint32_t number, std::uint32_t local_rank) const;

  using Bytes = std::vector<std::byte>;
  [[nodiscard]] Bytes input(std::uint32_t node, std::uint32_t local_rank) const;
  // What the GPU of that local rank posts: its rows of the sum over its node, or its own shard.
  [[nodiscard]] Bytes posted(std::uint32_t node, std::uint32_t local_rank) const;
  [[nodiscard]] Bytes output(std::uint32_t node, std::uint32_t local_rank) const;
};

[[nodiscard]] ExchangeCall random_exchange(Random& random, std::uint32_t nodes,
                                           std::uint32_t local_ranks);
[[nodiscard]] std::string describe(const ExchangeCall& call);

// The rows of `all`, one after the other.
[[nodiscard]] ExchangeCall::Bytes rows_in(const ExchangeCall::Bytes& all, const device::Rows& rows);

}  // namespace r2ccl::sim
