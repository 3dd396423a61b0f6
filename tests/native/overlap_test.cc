// The algorithm two_shot_overlap: its bits are those of two_shot, and its blocks have no pauses
// between them while NICs are the bottleneck.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iostream>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "collectives/collectives.hpp"
#include "plan/blocks.hpp"
#include "sim/sim_channel.hpp"
#include "sim/world.hpp"

namespace r2ccl::sim {
namespace {

constexpr TimeNs second = 1000 * ns_per_ms;
constexpr TimeNs node_ns_per_byte = 25;

class Job {
 public:
  Job(int nodes, std::uint32_t slot_bytes, bool shared_nics)
      : world_(options(nodes, slot_bytes, shared_nics)) {
    std::vector<int> all(static_cast<std::size_t>(nodes));
    std::iota(all.begin(), all.end(), 0);
    tree_ = ReductionTree::from_nodes(all);
    for (int rank = 0; rank < nodes; ++rank)
      channels_.push_back(std::make_unique<SimChannel>(world_, 7, all, rank));
    EXPECT_TRUE(world_.run_until([this] { return world_.all_rails_up(); }, second));
  }

  // Returns the results of a call by rank, and its time in ns.
  std::pair<std::vector<std::vector<float>>, TimeNs> run(Algorithm algorithm, std::size_t count,
                                                         bool in_place) {
    std::vector<std::vector<float>> results(channels_.size());
    const TimeNs begin = world_.now();
    TimeNs end = begin;
    const auto on_rank = [&](int rank) {
      const auto own = static_cast<std::size_t>(rank);
      std::vector<float> in(count);
      for (std::size_t i = 0; i < count; ++i)
        in[i] = static_cast<float>(i % 1013) * 0.37F + static_cast<float>(rank) * 1e6F;
      std::vector<float>& out = results[own];
      out = in;
      const auto* from = reinterpret_cast<const std::byte*>(in_place ? out.data() : in.data());
      auto* to = reinterpret_cast<std::byte*>(out.data());
      const Reducer reducer{DType::f32, ReduceOp::sum, tree_, best_simd()};
      const CallTag tag{.count = count,
                        .number = number_,
                        .collective = Collective::all_reduce,
                        .dtype = DType::f32,
                        .algorithm = algorithm};
      SimChannel& channel = *channels_[own];
      const Status status = channel.call(tag, [&] {
        return all_reduce(channel, from, to, count, reducer, algorithm, channel.shares());
      });
      EXPECT_TRUE(status.ok()) << status.message();
      end = std::max(end, world_.now());
    };
    EXPECT_TRUE(world_.run(on_rank, 600 * second));
    ++number_;
    return {std::move(results), end - begin};
  }

 private:
  static World::Options options(int nodes, std::uint32_t slot_bytes, bool shared_nics) {
    World::Options made;
    made.ranks = nodes;
    made.rails.assign(1, RailKind::tcp);
    made.link.shape.slot_bytes = slot_bytes;
    made.link.shape.chunk_bytes = std::min(made.link.shape.chunk_bytes, slot_bytes);
    if (shared_nics) made.nic_ns_per_byte = node_ns_per_byte;
    made.delays.latency_ns = 5'000;
    made.delays.jitter_ns = 1'000;
    return made;
  }

  World world_;
  ReductionTree tree_;
  std::vector<std::unique_ptr<SimChannel>> channels_;
  std::uint32_t number_ = 0;
};

TEST(Overlap, HasTheBitsOfTwoShot) {
  constexpr std::uint32_t slot = 4096;
  for (const int nodes : {2, 3, 5}) {
    Job job(nodes, slot, /*shared_nics=*/false);
    // Two nodes have no blocks, 10 and 24, five nodes none, four and nine.
    for (const std::size_t bytes : {400U, 40'960U, 99'980U}) {
      const std::size_t count = bytes / sizeof(float);
      const auto expected = job.run(Algorithm::two_shot, count, /*in_place=*/false).first;
      for (const bool in_place : {false, true})
        EXPECT_TRUE(job.run(Algorithm::two_shot_overlap, count, in_place).first == expected)
            << nodes << " nodes, " << bytes << " bytes, in place " << in_place;
    }
  }
}

TEST(Overlap, HasNoPausesBetweenBlocks) {
  constexpr std::uint32_t slot = 64U << 10;
  constexpr std::size_t bytes = 2U << 20;
  for (const int nodes : {3, 4}) {
    Job job(nodes, slot, /*shared_nics=*/true);
    constexpr std::size_t count = bytes / sizeof(float);
    const double ideal = static_cast<double>(bytes * node_ns_per_byte) * 2 * (nodes - 1) / nodes;
    (void)job.run(Algorithm::two_shot, count, /*in_place=*/true);  // rates become known
    const auto plain = static_cast<double>(job.run(Algorithm::two_shot, count, true).second);
    const auto overlap =
        static_cast<double>(job.run(Algorithm::two_shot_overlap, count, true).second);
    std::cout << nodes << " nodes, 2 MiB: two_shot " << plain / ideal << ", overlap "
              << overlap / ideal << " of the ideal time\n";
    EXPECT_LT(overlap, plain);
  }
}

}  // namespace
}  // namespace r2ccl::sim
