// The choice of an all-reduce's algorithm follows the losses that all ranks have agreed on, and the
// bits of the result depend on neither.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "collectives/collectives.hpp"
#include "plan/cost_model.hpp"
#include "sim/sim_channel.hpp"
#include "sim/world.hpp"

namespace r2ccl {
namespace {

constexpr int ranks = 3;
constexpr TimeNs second = 1000 * ns_per_ms;
// 32 KiB: one_shot for three healthy nodes, two_shot once a node has lost half of its bandwidth.
constexpr std::size_t count = 8192;

class Ranks {
 public:
  Ranks() : world_(options()) {
    for (int rank = 0; rank < ranks; ++rank)
      channels_.push_back(std::make_unique<sim::SimChannel>(world_, 7, std::vector{0, 1, 2}, rank));
  }

  // Runs body(rank, channel) on each rank.
  template <typename Body>
  void run(Body body) {
    const auto on_rank = [&](int rank) { body(rank, *channels_[static_cast<std::size_t>(rank)]); };
    EXPECT_TRUE(world_.run(on_rank, 60 * second));
  }

 private:
  static sim::World::Options options() {
    sim::World::Options made;
    made.ranks = ranks;
    return made;
  }

  sim::World world_;
  std::vector<std::unique_ptr<sim::SimChannel>> channels_;
};

CallTag tag_of(std::uint32_t number) {
  return {
      .count = count, .number = number, .collective = Collective::all_reduce, .dtype = DType::f32};
}

// Inputs whose sum depends on the order of additions.
std::vector<float> input_of(int rank) {
  std::vector<float> data(count);
  for (std::size_t i = 0; i < count; ++i)
    data[i] = std::ldexp(1.0F + static_cast<float>(i % 977) / 977.0F, 9 * ((rank + 1) % ranks));
  return data;
}

TEST(ChoiceByState, FollowsTheLossesOfTheCallBeforeOnAllRanks) {
  Ranks job;
  std::array<std::array<std::vector<float>, ranks>, 3> results;
  std::array<std::array<Algorithm, ranks>, 3> chosen{};
  job.run([&](int rank, sim::SimChannel& channel) {
    const auto own = static_cast<std::size_t>(rank);
    const ReductionTree tree = ReductionTree::from_nodes(std::array{0, 1, 2});
    const Reducer reducer{DType::f32, ReduceOp::sum, tree, Simd::portable};
    for (std::uint32_t call = 0; call < 3; ++call) {
      CallTag tag = tag_of(call);
      // The loss of the first call is in use in the second call only.
      if (call == 0 && rank == 1) tag.lost_bandwidth = 8;
      std::vector<float> data = input_of(rank);
      auto* bytes = reinterpret_cast<std::byte*>(data.data());
      const Status status = channel.call(tag, [&] {
        const Algorithm algorithm = choose_all_reduce(count * sizeof(float), tree.node_sizes,
                                                      loopback_costs, channel.lost_in_use());
        chosen[call][own] = algorithm;
        channel.set_algorithm(algorithm);
        return algorithm == Algorithm::one_shot
                   ? all_reduce_one_shot(channel, bytes, bytes, count, reducer)
                   : all_reduce_two_shot_uneven(channel, bytes, bytes, count, reducer,
                                                channel.shares());
      });
      EXPECT_TRUE(status.ok()) << status.message();
      results[call][own] = data;
    }
  });
  const std::array expected{Algorithm::one_shot, Algorithm::two_shot, Algorithm::one_shot};
  for (std::size_t call = 0; call < 3; ++call) {
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      EXPECT_EQ(chosen[call][rank], expected[call]) << call << ", rank " << rank;
      ASSERT_EQ(results[call][rank].size(), count);
      EXPECT_EQ(
          std::memcmp(results[call][rank].data(), results[0][0].data(), count * sizeof(float)), 0)
          << call << ", rank " << rank;
    }
  }
}

TEST(ChoiceByState, ThatDiffersBetweenRanksIsAnErrorOnEachRank) {
  Ranks job;
  std::array<Status, ranks> ends;
  job.run([&](int rank, sim::SimChannel& channel) {
    ends[static_cast<std::size_t>(rank)] = channel.call(tag_of(0), [&] {
      channel.set_algorithm(rank == 1 ? Algorithm::two_shot : Algorithm::one_shot);
      Status status = post_tags(channel);
      if (status.ok()) status = receive_tags(channel);
      return status;
    });
  });
  for (const Status& end : ends) EXPECT_EQ(end.code(), ErrorCode::order_mismatch);
}

}  // namespace
}  // namespace r2ccl
