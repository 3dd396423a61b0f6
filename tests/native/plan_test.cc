// Cost model: its arithmetic and its choices.  Blocks of a two-shot all-reduce.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <vector>

#include "plan/blocks.hpp"
#include "plan/cost_model.hpp"
#include "plan/shares.hpp"

namespace r2ccl {
namespace {

using Nodes = std::vector<std::uint16_t>;

constexpr CostConstants plain_costs{
    .step_ps = 1000, .message_ps = 10, .wire_byte_ps = 7, .local_byte_ps = 3, .fold_byte_ps = 2};

TEST(CostModel, CountsStepsMessagesAndBytes) {
  // 2 nodes of 1 rank: each port carries the input once; 2 inputs are folded.
  EXPECT_EQ(one_shot_ps(100, Nodes{1, 1}, plain_costs), 1000u + 10 + 100 * (7 + 2 * 2));
  // 2 rounds with half of the bytes each: the own half of 2 inputs is folded, the other half
  // copied.
  EXPECT_EQ(two_shot_ps(100, Nodes{1, 1}, plain_costs), 2 * 1010u + 50 * (2 * 7 + 3 * 2));
  // The larger node decides: 2 of 3 ranks share a port and also exchange data with each other.
  EXPECT_EQ(one_shot_ps(100, Nodes{1, 2}, plain_costs), 1000u + 20 + 100 * (2 * 7 + 3 + 3 * 2));
  // Shards are rounded up.
  EXPECT_EQ(two_shot_ps(100, Nodes{1, 2}, plain_costs), 2 * 1020u + 34 * (2 * (2 * 7 + 3) + 5 * 2));
  // A single node uses no wire.
  EXPECT_EQ(one_shot_ps(100, Nodes{2}, plain_costs), 1000u + 10 + 100 * (3 + 2 * 2));
}

TEST(CostModel, OneRankHasOneShotOnly) {
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{1} << 20, std::size_t{1} << 50}) {
    EXPECT_EQ(choose_all_reduce(bytes, Nodes{1}), Algorithm::one_shot);
  }
}

TEST(CostModel, SmallIsOneShotAndLargeTwoShotWithOneCrossing) {
  for (const Nodes& nodes : {Nodes{1, 1}, Nodes{1, 1, 1}, Nodes{2, 2}, Nodes{3, 1}, Nodes{4},
                             Nodes(8, 1), Nodes{8, 8}, Nodes(64, 1), Nodes(8, 8)}) {
    EXPECT_EQ(choose_all_reduce(0, nodes), Algorithm::one_shot);
    EXPECT_EQ(choose_all_reduce(1024, nodes), Algorithm::one_shot);
    int crossings = 0;
    Algorithm last = Algorithm::one_shot;
    for (std::size_t bytes = 1; bytes <= std::size_t{1} << 40; bytes *= 2) {
      const Algorithm picked = choose_all_reduce(bytes, nodes);
      EXPECT_NE(picked, Algorithm::automatic);
      crossings += picked != last ? 1 : 0;
      last = picked;
    }
    EXPECT_EQ(crossings, 1) << nodes.size() << " nodes";
    EXPECT_EQ(last, Algorithm::two_shot);
  }
}

TEST(CostModel, MoreRanksCrossEarlier) {
  const auto crossing = [](const Nodes& nodes) {
    std::size_t bytes = 64;
    while (choose_all_reduce(bytes, nodes) == Algorithm::one_shot) bytes += 64;
    return bytes;
  };
  EXPECT_GT(crossing(Nodes{1, 1, 1}), crossing(Nodes(4, 1)));
  EXPECT_GT(crossing(Nodes(4, 1)), crossing(Nodes(8, 1)));
  // Bytes inside a node are cheap, so one-shot pays off up to larger sizes there.
  EXPECT_GT(crossing(Nodes{4}), crossing(Nodes(4, 1)));
}

TEST(CostModel, ConstantsDecide) {
  CostConstants slow_start = plain_costs, slow_wire = plain_costs;
  slow_start.step_ps = 1'000'000'000;
  slow_wire.wire_byte_ps = 10'000;
  EXPECT_EQ(choose_all_reduce(4096, Nodes(4, 1), slow_start), Algorithm::one_shot);
  EXPECT_EQ(choose_all_reduce(4096, Nodes(4, 1), slow_wire), Algorithm::two_shot);
  // A tie goes to the simpler algorithm.
  EXPECT_EQ(choose_all_reduce(4096, Nodes(4, 1), CostConstants{}), Algorithm::one_shot);
}

using Lost = std::vector<std::uint8_t>;

TEST(CostModel, ALossSlowsTheBytesThatLeaveItsNode) {
  // A quarter of the bandwidth is left: a byte on the wire takes 28 ps.
  EXPECT_EQ(one_shot_ps(100, Nodes{1, 1}, plain_costs, Lost{0, 12}),
            1000u + 10 + 100 * (28 + 2 * 2));
  EXPECT_EQ(two_shot_ps(100, Nodes{1, 1}, plain_costs, Lost{12, 0}),
            2 * 1010u + 50 * (2 * 28 + 3 * 2));
  // Bytes inside the node keep their time.  The slowest node decides, not the largest.
  EXPECT_EQ(one_shot_ps(100, Nodes{1, 2}, plain_costs, Lost{0, 8}),
            1000u + 20 + 100 * (2 * 14 + 3 + 3 * 2));
  EXPECT_EQ(one_shot_ps(100, Nodes{1, 2}, plain_costs, Lost{12, 0}),
            1000u + 20 + 100 * (2 * 28 + 3 * 2));
  EXPECT_EQ(one_shot_ps(100, Nodes{1, 2}, plain_costs, Lost{0, 0}),
            one_shot_ps(100, Nodes{1, 2}, plain_costs));
  // A node keeps at least a sixteenth.
  EXPECT_EQ(one_shot_ps(100, Nodes{1, 1}, plain_costs, Lost{0, 255}),
            one_shot_ps(100, Nodes{1, 1}, plain_costs, Lost{0, most_lost}));
}

TEST(CostModel, ALossMakesTwoShotWinEarlier) {
  for (const Nodes& nodes : {Nodes{1, 1, 1}, Nodes(4, 1), Nodes(8, 1), Nodes(4, 2)}) {
    std::size_t before = std::numeric_limits<std::size_t>::max();
    for (const int loss : {0, 4, 8, 12}) {
      Lost lost(nodes.size());
      lost[1] = static_cast<std::uint8_t>(loss);
      std::size_t crossing = 64;
      while (choose_all_reduce(crossing, nodes, loopback_costs, lost) == Algorithm::one_shot)
        crossing += 64;
      EXPECT_LT(crossing, before) << nodes.size() << " nodes, loss " << loss;
      before = crossing;
    }
  }
}

TEST(CostModel, DoesNotOverflow) {
  constexpr std::size_t huge = std::numeric_limits<std::size_t>::max();
  CostConstants slow = loopback_costs;
  slow.wire_byte_ps = 1u << 13;
  for (const Nodes& nodes : {Nodes{1, 1}, Nodes(64, 1), Nodes{256, 256}}) {
    const std::vector<std::uint8_t> lost(nodes.size(), most_lost);
    EXPECT_GT(one_shot_ps(huge, nodes, slow), one_shot_ps(1u << 29, nodes, slow));
    EXPECT_GT(two_shot_ps(huge, nodes, slow), two_shot_ps(1u << 29, nodes, slow));
    EXPECT_GT(one_shot_ps(huge, nodes, slow, lost), one_shot_ps(1u << 29, nodes, slow, lost));
    EXPECT_GT(one_shot_ps(huge, nodes, slow, lost), one_shot_ps(huge, nodes, slow));
    EXPECT_EQ(choose_all_reduce(huge, nodes, slow), Algorithm::two_shot);
    EXPECT_EQ(choose_all_reduce(huge, nodes, slow, lost), Algorithm::two_shot);
  }
}

TEST(Blocks, OfEvenSharesHaveTwoSegmentsOrSharesOfAQuarter) {
  EXPECT_EQ(even_block_bytes(2, 1U << 20), 2U << 20);
  EXPECT_EQ(even_block_bytes(3, 1U << 20), 3 * 699'072U);  // the next multiple of 64
  EXPECT_EQ(even_block_bytes(16, 1U << 20), 4U << 20);
}

TEST(Blocks, OfUnevenSharesAreFourTo32OrNone) {
  for (const std::size_t ranks : {3U, 4U, 16U}) {
    for (const std::size_t segment : {64U, 4096U, 1U << 20}) {
      const std::size_t least = ranks * std::max<std::size_t>(segment / 2, 64);
      EXPECT_EQ(overlapped_blocks(4 * least - 1, ranks, segment), 0U);
      EXPECT_EQ(overlapped_blocks(4 * least, ranks, segment), 4U);
      EXPECT_EQ(overlapped_blocks(12 * least + 1, ranks, segment), 12U);
      EXPECT_EQ(overlapped_blocks(std::size_t{1} << 40, ranks, segment), 32U);
    }
  }
}

}  // namespace
}  // namespace r2ccl
