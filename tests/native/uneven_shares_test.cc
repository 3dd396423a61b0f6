// Shares follow the bandwidths of the nodes while rails fail and return, in the real engine.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include "eventually.hpp"
#include "job.hpp"

namespace r2ccl {
namespace {

using testing::Job;
using Lost = std::vector<std::uint8_t>;

// Small slots, so that a small input has enough blocks for uneven shares.
Config small_slots() {
  Config config;
  config.slot_bytes = 64 * 1024;
  config.chunk_bytes = 16 * 1024;
  return config;
}

// Returns whether the sum over all ranks is right.
bool sum_is_right(Communicator& communicator, std::size_t count,
                  Algorithm algorithm = Algorithm::two_shot) {
  std::vector<float> data(count);
  for (std::size_t i = 0; i < count; ++i)
    data[i] = static_cast<float>(i % 1000) + static_cast<float>(communicator.rank());
  auto* bytes = reinterpret_cast<std::byte*>(data.data());
  const Status status =
      communicator.all_reduce(bytes, bytes, count, DType::f32, ReduceOp::sum, algorithm);
  EXPECT_TRUE(status.ok()) << status.message();
  const int ranks = communicator.size();
  for (std::size_t i = 0; status.ok() && i < count; ++i)
    if (data[i] != static_cast<float>(static_cast<int>(i % 1000) * ranks + ranks * (ranks - 1) / 2))
      return false;
  return status.ok();
}

void lose_a_rail_of_node_1(Job& job) {
  ASSERT_TRUE(job.engines[1]->inject(1, Fault::carrier_loss).ok());
  ASSERT_TRUE(testing::eventually(
      [&] {
        return std::ranges::none_of(job.engines[1]->rails(), [](const auto& rail) {
          return rail.index == 1 && rail.state == RailState::up;
        });
      },
      "the loss is known on its node"));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // the states are read again
}

TEST(UnevenShares, FollowALossWithinTwoCallsAndItsEndAfterASecond) {
  constexpr std::size_t count = 300'001;
  Job job({.ranks = 3, .rails = 2, .config = small_slots()});
  ASSERT_TRUE(job.all_up());
  const auto call = [&] {
    job.run(
        [&](int, Communicator& communicator) { EXPECT_TRUE(sum_is_right(communicator, count)); });
  };
  const auto all_use = [&](const Lost& lost) {
    return std::ranges::all_of(job.communicators, [&](const auto& communicator) {
      return communicator->lost_bandwidths() == lost;
    });
  };
  call();
  EXPECT_TRUE(all_use({0, 0, 0}));

  lose_a_rail_of_node_1(job);
  call();
  EXPECT_TRUE(all_use({0, 8, 0}));
  call();

  ASSERT_TRUE(job.engines[1]->inject(1, Fault::none).ok());
  ASSERT_TRUE(job.all_up());
  call();
  EXPECT_TRUE(all_use({0, 8, 0}));
  EXPECT_TRUE(testing::eventually(
      [&] {
        call();
        return all_use({0, 0, 0});
      },
      "the shares are even again"));
  call();
}

TEST(UnevenShares, AreInTheJournalWithTheReasons) {
  Job job({.ranks = 3, .rails = 2, .config = small_slots()});
  ASSERT_TRUE(job.all_up());
  const auto call = [&](std::size_t count, Algorithm algorithm) {
    job.run([&](int, Communicator& communicator) {
      EXPECT_TRUE(sum_is_right(communicator, count, algorithm));
    });
  };
  const auto expect = [&](Algorithm algorithm, AlgorithmReason why, SharesReason shares, int lost) {
    for (std::size_t rank = 0; rank < job.communicators.size(); ++rank) {
      const auto group = job.group(rank, job.communicators[rank]->id());
      ASSERT_TRUE(group.has_value());
      const JournalChoice& choice = group->choice;
      EXPECT_EQ(choice.algorithm, static_cast<std::uint8_t>(algorithm));
      EXPECT_EQ(choice.algorithm_reason, static_cast<std::uint8_t>(why));
      EXPECT_EQ(choice.shares_reason, static_cast<std::uint8_t>(shares));
      EXPECT_EQ(choice.lost, lost);
    }
  };
  constexpr std::size_t few = 8192;  // one_shot while healthy, two_shot with half of a node lost
  constexpr std::size_t many = 300'001;
  call(many, Algorithm::two_shot);
  expect(Algorithm::two_shot, AlgorithmReason::given, SharesReason::no_loss, 0);
  call(few, Algorithm::automatic);
  expect(Algorithm::one_shot, AlgorithmReason::size, SharesReason::none, 0);

  lose_a_rail_of_node_1(job);
  call(many, Algorithm::automatic);  // announces the loss
  call(many, Algorithm::automatic);
  expect(Algorithm::two_shot, AlgorithmReason::size, SharesReason::loss, 8);
  call(few, Algorithm::automatic);
  expect(Algorithm::two_shot, AlgorithmReason::loss, SharesReason::few_blocks, 8);
  call(few, Algorithm::one_shot);
  expect(Algorithm::one_shot, AlgorithmReason::given, SharesReason::none, 8);
}

TEST(UnevenShares, StayEvenOnTwoNodes) {
  Job job({.ranks = 2, .rails = 2, .config = small_slots()});
  ASSERT_TRUE(job.all_up());
  ASSERT_TRUE(job.engines[1]->inject(1, Fault::carrier_loss).ok());
  job.run([&](int, Communicator& communicator) {
    for (int call = 0; call < 3; ++call) EXPECT_TRUE(sum_is_right(communicator, 100'000));
    EXPECT_EQ(communicator.lost_bandwidths(), Lost());
  });
}

}  // namespace
}  // namespace r2ccl
