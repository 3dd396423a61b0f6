#include "sim/exchange_calls.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "collectives/reduce.hpp"

namespace r2ccl::sim {
namespace {

using Bytes = ExchangeCall::Bytes;
using device::Rows;

constexpr std::array exchange_dtypes{DType::f16, DType::bf16, DType::f32, DType::f64,    DType::i8,
                                     DType::u8,  DType::i32,  DType::i64, DType::boolean};
constexpr std::array exchange_collectives{Collective::all_reduce, Collective::all_reduce,
                                          Collective::all_gather, Collective::reduce_scatter};
constexpr std::size_t most_bytes = 1024;  // limit of an input or an output

Bytes folded(const ExchangeCall& call, const std::vector<Bytes>& inputs,
             const std::vector<int>& nodes) {
  Bytes out(inputs[0].size());
  std::vector<const void*> from;
  from.reserve(inputs.size());
  for (const Bytes& input : inputs) from.push_back(input.data());
  reduce(call.dtype, call.op, out.data(), from, ReductionTree::from_nodes(nodes),
         out.size() / size_of(call.dtype), Simd::portable);
  return out;
}

}  // namespace

std::size_t ExchangeCall::input_bytes() const {
  return bytes() * (collective == Collective::reduce_scatter ? nodes * local_ranks : 1);
}

std::size_t ExchangeCall::output_bytes() const {
  return bytes() * (collective == Collective::all_gather ? nodes * local_ranks : 1);
}

Rows ExchangeCall::rows_of(std::uint32_t local_rank) const {
  if (collective != Collective::all_reduce)
    return {nodes, bytes(), local_ranks * bytes(), 0, local_rank * bytes()};
  // The static analyser does not know that every dtype has a nonzero size.
  const std::size_t element = std::max<std::size_t>(size_of(dtype), 1);
  const auto even = device::EvenShards::of(count, element, local_ranks);
  const std::uint64_t shard_bytes = even.size(local_rank) * even.element;
  return {1, shard_bytes, shard_bytes, 0, even.first(local_rank) * even.element};
}

Call ExchangeCall::inter_node_call(std::uint32_t number, std::uint32_t local_rank) const {
  Call call;
  call.seed = seed;
  call.number = number;
  call.collective = collective;
  call.dtype = dtype;
  call.op = op;
  const std::size_t elements = rows_of(local_rank).bytes / size_of(dtype);
  call.counts.assign(nodes, elements);
  call.algorithm = seed % 2 == 0 ? Algorithm::automatic : Algorithm::two_shot;
  call.registered = seed % 3 == 0;
  return call;
}

Bytes ExchangeCall::input(std::uint32_t node, std::uint32_t local_rank) const {
  Bytes bytes(input_bytes());
  Random random(seed * 1'000'003 + node * local_ranks + local_rank);
  for (std::byte& byte : bytes) {
    byte = static_cast<std::byte>(random.next());
    if (dtype == DType::boolean) byte &= std::byte{1};
  }
  return bytes;
}

Bytes ExchangeCall::posted(std::uint32_t node, std::uint32_t local_rank) const {
  if (collective == Collective::all_gather) return input(node, local_rank);
  std::vector<Bytes> inputs;
  for (std::uint32_t each = 0; each < local_ranks; ++each) inputs.push_back(input(node, each));
  return rows_in(folded(*this, inputs, std::vector<int>(local_ranks, 0)), rows_of(local_rank));
}

Bytes ExchangeCall::output(std::uint32_t node, std::uint32_t local_rank) const {
  std::vector<Bytes> inputs;
  std::vector<int> nodes_of;
  for (std::uint32_t each = 0; each < nodes; ++each)
    for (std::uint32_t other = 0; other < local_ranks; ++other) {
      inputs.push_back(input(each, other));
      nodes_of.push_back(static_cast<int>(each));
    }
  if (collective == Collective::all_gather) {
    Bytes all;
    for (const Bytes& shard : inputs) all.insert(all.end(), shard.begin(), shard.end());
    return all;
  }
  Bytes sum = folded(*this, inputs, nodes_of);
  if (collective == Collective::all_reduce) return sum;
  return rows_in(sum, {1, bytes(), bytes(), 0, (node * local_ranks + local_rank) * bytes()});
}

ExchangeCall random_exchange(Random& random, std::uint32_t nodes, std::uint32_t local_ranks) {
  ExchangeCall call;
  call.seed = random.next();
  call.collective = exchange_collectives[random.below(exchange_collectives.size())];
  call.dtype = exchange_dtypes[random.below(exchange_dtypes.size())];
  call.op = static_cast<ReduceOp>(random.below(4));
  call.nodes = nodes;
  call.local_ranks = local_ranks;
  const std::size_t shards = call.collective == Collective::all_reduce ? 1 : nodes * local_ranks;
  call.count = 1 + random.below(most_bytes / shards / size_of(call.dtype));
  call.ahead = random.below(2) == 0;
  return call;
}

std::string describe(const ExchangeCall& call) {
  return std::string(name_of(call.collective)) + " of " + std::to_string(call.count) + " " +
         std::string(name_of(call.dtype)) + " among " + std::to_string(call.nodes) + " nodes of " +
         std::to_string(call.local_ranks) + " GPUs";
}

Bytes rows_in(const Bytes& all, const Rows& rows) {
  Bytes made;
  for (std::uint64_t row = 0; row < rows.count; ++row) {
    const auto first = all.begin() + static_cast<std::ptrdiff_t>(rows.first + row * rows.pitch);
    made.insert(made.end(), first, first + static_cast<std::ptrdiff_t>(rows.bytes));
  }
  return made;
}

}  // namespace r2ccl::sim
