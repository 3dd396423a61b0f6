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
bool sum_is_right(Communicator& communicator, std::size_t count) {
  std::vector<float> data(count);
  for (std::size_t i = 0; i < count; ++i)
    data[i] = static_cast<float>(i % 1000) + static_cast<float>(communicator.rank());
  auto* bytes = reinterpret_cast<std::byte*>(data.data());
  const Status status =
      communicator.all_reduce(bytes, bytes, count, DType::f32, ReduceOp::sum, Algorithm::two_shot);
  EXPECT_TRUE(status.ok()) << status.message();
  const int ranks = communicator.size();
  for (std::size_t i = 0; status.ok() && i < count; ++i)
    if (data[i] != static_cast<float>(static_cast<int>(i % 1000) * ranks + ranks * (ranks - 1) / 2))
      return false;
  return status.ok();
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

  ASSERT_TRUE(job.engines[1]->inject(1, Fault::carrier_loss).ok());
  ASSERT_TRUE(testing::eventually(
      [&] {
        return std::ranges::none_of(job.engines[1]->rails(), [](const auto& rail) {
          return rail.index == 1 && rail.state == RailState::up;
        });
      },
      "the loss is known on its node"));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // the states are read again
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
