#include "sim/played_all_reduce.hpp"

#include <algorithm>
#include <memory>
#include <numeric>
#include <string>

#include "collectives/collectives.hpp"
#include "plan/shares.hpp"
#include "sim/sim_channel.hpp"
#include "sim/world.hpp"

namespace r2ccl::sim {
namespace {

using Buffers = std::vector<std::vector<std::byte>>;

constexpr TimeNs rails_limit = 2000 * ns_per_ms;
constexpr TimeNs call_limit = 120'000 * ns_per_ms;
constexpr std::size_t most_ranks = 64;

Status check(const PlayedAllReduce& call) {
  const auto wrong = [](const char* text) { return Status(ErrorCode::invalid_argument, text); };
  const std::size_t ranks = call.inputs.size();
  if (ranks < 2 || ranks > most_ranks) return wrong("inputs: must be of 2 to 64 ranks");
  if (call.nodes.size() != ranks) return wrong("nodes: must have a label for each rank");
  if (!call.lost.empty() && call.lost.size() != ranks)
    return wrong("lost: must have a loss for each rank, or none");
  const std::size_t bytes = call.inputs[0].size();
  if (std::ranges::any_of(call.inputs, [&](const auto& input) { return input.size() != bytes; }) ||
      bytes % size_of(call.dtype) != 0)
    return wrong("inputs: must have whole elements, and all ranks equally many");
  if (call.op == ReduceOp::avg && call.dtype == DType::boolean)
    return wrong("op: avg is not defined for bool");
  if (call.algorithm == Algorithm::automatic) return wrong("algorithm: must not be automatic");
  if (call.chunk_bytes < 64 || call.slot_bytes < call.chunk_bytes ||
      call.slot_bytes % call.chunk_bytes != 0 || call.slot_bytes % 64 != 0)
    return wrong(
        "slot_bytes: must be a multiple of chunk_bytes and of 64; chunk_bytes: 64 or more");
  if (call.rails < 1 || call.rails > 8) return wrong("rails: must be from 1 to 8");
  const auto& cut = call.cut;
  if (cut && (call.rails < 2 || cut->rail < 0 || cut->rail >= call.rails || cut->rank < 0 ||
              static_cast<std::size_t>(cut->rank) >= ranks || cut->after_ns < 0))
    return wrong("cut: must name a rank and one of several rails, with a time of at least 0");
  return {};
}

World::Options options_of(const PlayedAllReduce& call) {
  World::Options options;
  options.ranks = static_cast<int>(call.inputs.size());
  options.rails.assign(static_cast<std::size_t>(call.rails), RailKind::tcp);
  options.link.shape.chunk_bytes = call.chunk_bytes;
  options.link.shape.slot_bytes = call.slot_bytes;
  options.link.small_message_bytes = call.chunk_bytes;
  options.seed = call.seed;
  return options;
}

}  // namespace

Result<Buffers> play(const PlayedAllReduce& call) {
  if (Status status = check(call); !status.ok()) return status;
  World world(options_of(call));
  const int ranks = world.options().ranks;
  std::vector<int> members(static_cast<std::size_t>(ranks));
  std::iota(members.begin(), members.end(), 0);
  std::vector<std::unique_ptr<SimChannel>> channels;
  channels.reserve(members.size());
  for (int rank = 0; rank < ranks; ++rank)
    channels.push_back(std::make_unique<SimChannel>(world, 1, members, rank));
  if (!world.run_until([&] { return world.all_rails_up(); }, rails_limit))
    return Status(ErrorCode::timeout, "not every rail came up");
  if (call.cut)
    world.events().after(call.cut->after_ns, [&] {
      world.cut(call.cut->rank, static_cast<RailId>(call.cut->rail), 1);
    });

  const ReductionTree tree = ReductionTree::from_nodes(call.nodes);
  const std::vector<std::uint32_t> weights = share_weights(call.lost);
  const Shares shares = weights.empty() ? Shares() : Shares(weights);
  const Reducer reducer{call.dtype, call.op, tree, best_simd()};
  const std::size_t bytes = call.inputs[0].size();
  const std::size_t count = bytes / size_of(call.dtype);
  const CallTag tag{.count = count,
                    .collective = Collective::all_reduce,
                    .dtype = call.dtype,
                    .op = call.op,
                    .algorithm = call.algorithm};
  Buffers inputs = call.inputs;
  Buffers results(inputs.size(), std::vector<std::byte>(call.in_place ? 0 : bytes));
  std::vector<Status> ends(inputs.size());
  const bool returned = world.run(
      [&](int rank) {
        const auto own = static_cast<std::size_t>(rank);
        std::byte* const in = inputs[own].data();
        std::byte* const out = call.in_place ? in : results[own].data();
        SimChannel& channel = *channels[own];
        ends[own] = channel.call(tag, [&] {
          return call.algorithm == Algorithm::one_shot
                     ? all_reduce_one_shot(channel, in, out, count, reducer)
                     : all_reduce_two_shot_uneven(channel, in, out, count, reducer, shares);
        });
      },
      call_limit);
  if (!returned) return Status(ErrorCode::timeout, "the call did not end");
  for (Status& end : ends)
    if (!end.ok()) return std::move(end);
  const auto& violations = world.shadow().violations();
  if (!violations.empty()) return Status(ErrorCode::internal, violations[0]);
  return call.in_place ? inputs : results;
}

}  // namespace r2ccl::sim
