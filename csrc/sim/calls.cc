#include "sim/calls.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>

#include "plan/cost_model.hpp"
#include "sim/memory.hpp"

namespace r2ccl::sim {
namespace {

using Bytes = std::vector<std::byte>;

constexpr std::array dtypes{DType::f16, DType::bf16, DType::f32, DType::f64,    DType::i8,
                            DType::u8,  DType::i32,  DType::i64, DType::boolean};
constexpr std::array collectives{Collective::all_reduce,     Collective::all_reduce,
                                 Collective::all_reduce,     Collective::all_gather,
                                 Collective::broadcast,      Collective::gather,
                                 Collective::reduce_scatter, Collective::all_to_all,
                                 Collective::send,           Collective::barrier};

std::size_t sum(const std::vector<std::size_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::size_t{0});
}

// Returns the input of rank `rank`: `count` elements of random bits.  NaNs are allowed, because a
// reduction yields the same NaN on every rank.
Bytes input_of(const Call& call, int rank, std::size_t count) {
  Bytes bytes(count * size_of(call.dtype));
  Random random(call.seed * 1'000'003 + static_cast<std::uint64_t>(rank));
  for (std::size_t i = 0; i < bytes.size(); i += sizeof(std::uint64_t)) {
    const std::uint64_t word = random.next();
    std::memcpy(bytes.data() + i, &word, std::min(sizeof(word), bytes.size() - i));
  }
  if (call.dtype == DType::boolean)
    for (std::byte& byte : bytes) byte &= std::byte{1};
  return bytes;
}

// Returns the loss that a rank announces in the call: none in half of all calls, else often so much
// that its share is empty.
std::uint8_t lost_bandwidth(const Call& call, int rank) {
  Random random(call.seed * 1'000'003 + static_cast<std::uint64_t>(rank) + 0xBA4D);
  if (call.seed % 2 == 0 || random.below(3) != 0) return 0;
  return static_cast<std::uint8_t>(1 + random.below(most_lost));
}

// Returns the reduction of `inputs`, which hold an input per rank.
Bytes folded(const Call& call, const std::vector<Bytes>& inputs, const ReductionTree& tree) {
  Bytes out(inputs[0].size());
  std::vector<const void*> from;
  from.reserve(inputs.size());
  for (const Bytes& input : inputs) from.push_back(input.data());
  reduce(call.dtype, call.op, out.data(), from, tree, out.size() / size_of(call.dtype),
         Simd::portable);
  return out;
}

// Returns `count` elements of `bytes` from element `begin`.
Bytes slice(const Call& call, const Bytes& bytes, std::size_t begin, std::size_t count) {
  const std::size_t size = size_of(call.dtype);
  const auto first = bytes.begin() + static_cast<std::ptrdiff_t>(begin * size);
  return {first, first + static_cast<std::ptrdiff_t>(count * size)};
}

std::size_t before(const Call& call, int rank) {
  return std::accumulate(call.counts.begin(), call.counts.begin() + rank, std::size_t{0});
}

}  // namespace

RankCall::RankCall(SimChannel& channel, const Call& call, const ReductionTree& tree)
    : channel_(channel),
      call_(call),
      tree_(tree),
      rank_(channel.rank()),
      ranks_(channel.size()),
      own_(call.counts[static_cast<std::size_t>(rank_)]) {
  prepare();
}

Status RankCall::run(std::string& wrong) {
  out_.assign(expected_.size(), garbage);
  const bool in_place = call_.collective == Collective::all_reduce && call_.in_place;
  if (in_place) out_ = in_;
  Status status = carry(in_place ? out_.data() : in_.data(), out_.data());
  // Any later read of the caller's memory sees garbage.
  std::fill(in_.begin(), in_.end(), garbage);
  if (status.ok() && out_ != expected_) wrong = describe(call_) + " returned wrong bytes";
  std::fill(out_.begin(), out_.end(), garbage);
  return status;
}

Status RankCall::carry(const std::byte* in, std::byte* out) {
  if (call_.kind == TagKind::end_of_step) return compare_positions();
  const std::span<const std::byte> target(out, expected_.size());
  if (call_.registered) channel_.register_buffer(target);
  Status status = channel_.call(tag(), [&] { return algorithm(in, out); });
  if (call_.registered) channel_.deregister_buffer(target);
  return status;
}

// Two calls with the same tag, as in Communicator.
Status RankCall::compare_positions() {
  R2CCL_TRY(channel_.call(tag(), [&] { return post_tags(channel_); }));
  return channel_.call(tag(), [&] { return receive_tags(channel_); });
}

CallTag RankCall::tag() const {
  return {.count = sum(call_.counts),
          .number = call_.number,
          .step = call_.step,
          .call = call_.call,
          .root = static_cast<std::uint16_t>(call_.root),
          .collective = call_.collective,
          .dtype = call_.dtype,
          .op = call_.op,
          .lost_bandwidth = lost_bandwidth(call_, rank_),
          .kind = call_.kind};
}

std::vector<RankCall::Bytes> RankCall::inputs(std::size_t count) const {
  std::vector<Bytes> all;
  all.reserve(static_cast<std::size_t>(ranks_));
  for (int rank = 0; rank < ranks_; ++rank) all.push_back(input_of(call_, rank, count));
  return all;
}

// Returns the inputs of all ranks, concatenated in rank order; each rank has its own count.
RankCall::Bytes RankCall::gathered() const {
  Bytes all;
  for (int rank = 0; rank < ranks_; ++rank) {
    const Bytes shard = input_of(call_, rank, call_.counts[static_cast<std::size_t>(rank)]);
    all.insert(all.end(), shard.begin(), shard.end());
  }
  return all;
}

void RankCall::prepare() {
  const std::size_t total = sum(call_.counts);
  const std::size_t size = size_of(call_.dtype);
  switch (call_.collective) {
    case Collective::all_reduce:
      in_ = input_of(call_, rank_, call_.counts[0]);
      expected_ = folded(call_, inputs(call_.counts[0]), tree_);
      break;
    case Collective::all_gather:
      in_ = input_of(call_, rank_, own_);
      expected_ = gathered();
      break;
    case Collective::gather:
      in_ = input_of(call_, rank_, own_);
      if (rank_ == call_.root) expected_ = gathered();
      break;
    case Collective::broadcast:
      expected_ = input_of(call_, call_.root, call_.counts[0]);
      if (rank_ == call_.root) in_ = expected_;
      break;
    case Collective::reduce_scatter:
      in_ = input_of(call_, rank_, total);
      expected_ = slice(call_, folded(call_, inputs(total), tree_), before(call_, rank_), own_);
      break;
    case Collective::all_to_all: {
      // Rank r sends counts[r] elements to every rank.
      in_ = input_of(call_, rank_, own_ * static_cast<std::size_t>(ranks_));
      for (int rank = 0; rank < ranks_; ++rank) {
        const std::size_t count = call_.counts[static_cast<std::size_t>(rank)];
        const Bytes all = input_of(call_, rank, count * static_cast<std::size_t>(ranks_));
        const Bytes shard = slice(call_, all, count * static_cast<std::size_t>(rank_), count);
        expected_.insert(expected_.end(), shard.begin(), shard.end());
      }
      break;
    }
    case Collective::send: {  // sends to the next rank of a ring
      in_ = input_of(call_, rank_, own_);
      const int previous = (rank_ + ranks_ - 1) % ranks_;
      expected_ = input_of(call_, previous, call_.counts[static_cast<std::size_t>(previous)]);
      break;
    }
    case Collective::recv:
    case Collective::barrier: break;
  }
  in_.reserve(size);  // gives an empty input an address
}

Status RankCall::algorithm(const std::byte* in, std::byte* out) {
  const Reducer reducer{call_.dtype, call_.op, tree_, Simd::portable};
  switch (call_.collective) {
    case Collective::all_reduce: return all_reduce(in, out, reducer);
    case Collective::all_gather: return all_gatherv(channel_, in, out, call_.counts, call_.dtype);
    case Collective::gather:
      return r2ccl::gather(channel_, in, out, call_.counts, call_.dtype, call_.root);
    case Collective::broadcast:
      std::copy_n(in, in_.size(), out);
      return r2ccl::broadcast(channel_, out, call_.counts[0], call_.dtype, call_.root);
    case Collective::reduce_scatter:
      return reduce_scatterv(channel_, in, out, call_.counts, reducer);
    case Collective::all_to_all: {
      const std::vector<std::size_t> mine(static_cast<std::size_t>(ranks_), own_);
      return all_to_allv(channel_, in, mine, out, call_.counts, call_.dtype);
    }
    case Collective::send: return ring(in, out);
    case Collective::recv: break;
    case Collective::barrier: return barrier(channel_);
  }
  return {};
}

// Each rank chooses the algorithm by itself, as in an engine.  Each rank of a channel is a node,
// also where the tree has larger nodes.
Status RankCall::all_reduce(const std::byte* in, std::byte* out, const Reducer& reducer) {
  const std::size_t count = call_.counts[0];
  Algorithm algorithm = call_.algorithm;
  if (algorithm == Algorithm::automatic) {
    const std::vector<std::uint16_t> nodes(static_cast<std::size_t>(ranks_), 1);
    algorithm = choose_all_reduce(count * size_of(call_.dtype), nodes, loopback_costs,
                                  channel_.lost_in_use());
  }
  channel_.set_algorithm(algorithm);
  return r2ccl::all_reduce(channel_, in, out, count, reducer, algorithm, channel_.shares());
}

// Even ranks send first and odd ranks receive first, which avoids a circular wait.  In a ring of
// odd size, both rank 0 and the last rank are even.  Rank 0 then sends to rank 1, and receives from
// the last rank afterwards.
Status RankCall::ring(const std::byte* in, std::byte* out) {
  const int next = (rank_ + 1) % ranks_;
  const int previous = (rank_ + ranks_ - 1) % ranks_;
  const std::size_t theirs = call_.counts[static_cast<std::size_t>(previous)];
  const auto give = [&] { return r2ccl::send(channel_, in, own_, call_.dtype, next); };
  const auto take = [&] { return r2ccl::recv(channel_, out, theirs, call_.dtype, previous); };
  if (rank_ % 2 == 0) {
    R2CCL_TRY(give());
    return take();
  }
  R2CCL_TRY(take());
  return give();
}

Call random_call(Random& random, std::uint32_t number, int ranks, std::size_t bytes) {
  Call call;
  call.seed = random.next();
  call.number = number;
  call.collective = collectives[random.below(collectives.size())];
  call.algorithm = Algorithm::automatic;
  if (random.below(2) != 0)
    call.algorithm = call.seed / 2 % 2 == 0 ? Algorithm::two_shot : Algorithm::two_shot_overlap;
  call.dtype = dtypes[random.below(dtypes.size())];
  call.op = static_cast<ReduceOp>(random.below(call.dtype == DType::boolean ? 4 : 5));
  call.root = static_cast<int>(random.below(static_cast<std::uint64_t>(ranks)));
  call.in_place = random.below(2) == 0;
  call.registered = random.below(2) == 0;
  // Every rank gets a share of a total, so the work of a call does not grow with the number of
  // ranks.
  const bool one = call.collective == Collective::all_reduce ||
                   call.collective == Collective::broadcast || call.collective == Collective::send;
  const std::size_t most =
      bytes / size_of(call.dtype) / (one ? 1 : static_cast<std::size_t>(ranks)) + 1;
  for (int rank = 0; rank < ranks; ++rank) call.counts.push_back(random.below(most + 1));
  return call;
}

std::string describe(const Call& call) {
  const CallTag tag{.count = sum(call.counts),
                    .number = call.number,
                    .step = call.step,
                    .call = call.call,
                    .root = static_cast<std::uint16_t>(call.root),
                    .collective = call.collective,
                    .dtype = call.dtype,
                    .op = call.op,
                    .kind = call.kind};
  return describe(tag);
}

}  // namespace r2ccl::sim
