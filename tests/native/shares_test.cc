// Shares for nodes of unequal bandwidth: sums, borders, and times against the closed form.
#include "plan/shares.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "plan/bandwidths.hpp"

namespace r2ccl {
namespace {

using Lost = std::vector<std::uint8_t>;
using Weights = std::vector<std::uint32_t>;

double bandwidth(std::uint8_t lost) { return (16.0 - lost) / 16.0; }

// The time of an all-reduce of one buffer: no order of messages is faster.
double optimum(const Lost& lost) {
  const double nodes = static_cast<double>(lost.size());
  double sum = 0, least = 1;
  for (const std::uint8_t each : lost) {
    sum += bandwidth(each);
    least = std::min(least, bandwidth(each));
  }
  return std::max(1 / least, 2 * (nodes - 1) / sum);
}

double modelled(const Weights& weights, const Lost& lost) {
  return static_cast<double>(exchange_time(weights, lost)) / (1 << 20);
}

Lost random_losses(std::size_t nodes, std::mt19937_64& random) {
  Lost lost(nodes);
  const bool few = random() % 2 == 0;
  for (std::uint8_t& each : lost)
    each = few && random() % 3 != 0 ? 0 : static_cast<std::uint8_t>(random() % (most_lost + 1));
  return lost;
}

std::vector<std::size_t> sizes_of(const Shares& shares, std::size_t bytes, std::size_t ranks) {
  std::vector<std::size_t> sizes;
  for (std::size_t rank = 0; rank < ranks; ++rank)
    sizes.push_back(shares.size(bytes, static_cast<int>(rank)));
  return sizes;
}

TEST(ShareWeights, AreEvenForAlikeNodesAndForTwo) {
  EXPECT_TRUE(share_weights(Lost{}).empty());
  EXPECT_TRUE(share_weights(Lost{3}).empty());
  EXPECT_TRUE(share_weights(Lost{0, 8}).empty());
  for (const std::uint8_t lost : {std::uint8_t{0}, std::uint8_t{7}, most_lost}) {
    EXPECT_TRUE(share_weights(Lost(3, lost)).empty());
    EXPECT_TRUE(share_weights(Lost(256, lost)).empty());
  }
}

// The published table: one node of n lacks X of its bandwidth.
TEST(ShareWeights, ReachTheTimesOfTheClosedForm) {
  struct Row {
    std::size_t nodes;
    std::uint8_t lost;
    double slowdown, slow_share;
  };
  for (const Row& row : {Row{4, 2, 1.032, 0.177}, Row{4, 8, 1.333, 0}, Row{8, 2, 1.016, 0.093},
                         Row{8, 4, 1.032, 0.059}, Row{8, 8, 1.143, 0}, Row{16, 2, 1.008, 0.047}}) {
    Lost lost(row.nodes);
    lost[1] = row.lost;
    const Weights weights = share_weights(lost);
    const double healthy = modelled({}, Lost(row.nodes));
    EXPECT_NEAR(modelled(weights, lost) / healthy, row.slowdown, 0.001);
    const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
    EXPECT_NEAR(weights[1] / sum, row.slow_share, 0.001) << row.nodes << ' ' << +row.lost;
  }
}

TEST(ShareWeights, AreOptimalForAnyLosses) {
  std::mt19937_64 random(1);
  for (const std::size_t nodes : {3U, 4U, 5U, 8U, 17U, 64U, 256U}) {
    for (int round = 0; round < 300; ++round) {
      const Lost lost = random_losses(nodes, random);
      const Weights weights = share_weights(lost);
      const double time = modelled(weights, lost);
      EXPECT_NEAR(time, optimum(lost), 1e-5 * optimum(lost));
      EXPECT_LE(time, modelled({}, lost) + 1e-5);
      if (weights.empty()) continue;
      // A node with the largest loss of all has the smallest share.
      const auto slowest = std::ranges::max_element(lost) - lost.begin();
      EXPECT_EQ(weights[static_cast<std::size_t>(slowest)], *std::ranges::min_element(weights));
    }
  }
}

TEST(Shares, CoverTheBufferWithBordersAtMultiplesOf64Bytes) {
  std::mt19937_64 random(2);
  for (int round = 0; round < 2000; ++round) {
    const std::size_t ranks = 3 + random() % 14;
    const Weights weights = share_weights(random_losses(ranks, random));
    if (weights.empty()) continue;
    const Shares shares(weights);
    EXPECT_FALSE(shares.even());
    const std::size_t bytes = random() % (std::size_t{1} << (random() % 34));
    const std::uint64_t total = std::accumulate(weights.begin(), weights.end(), std::uint64_t{0});
    std::size_t end = 0;
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      const std::size_t begin = shares.begin(bytes, static_cast<int>(rank));
      EXPECT_EQ(begin, end);
      EXPECT_TRUE(begin % 64 == 0 || begin == bytes) << begin << " of " << bytes;
      const std::size_t size = shares.size(bytes, static_cast<int>(rank));
      end = begin + size;
      ASSERT_LE(end, bytes);
      // Rounding moves each border by less than a unit, and the last unit may be short.
      const double exact = static_cast<double>(bytes) * weights[rank] / static_cast<double>(total);
      EXPECT_NEAR(static_cast<double>(size), exact, 128.0);
      if (weights[rank] == 0) {
        EXPECT_EQ(size, 0U);
      }
    }
    EXPECT_EQ(end, bytes);
  }
}

TEST(Shares, OfTheLargestBufferAreInProportion) {
  const std::size_t bytes = std::size_t{1} << 62;
  const Shares shares(Weights{1, 0, 2, 1});
  EXPECT_EQ(sizes_of(shares, bytes, 4),
            (std::vector<std::size_t>{bytes / 4, 0, bytes / 2, bytes / 4}));
  // 256 ranks with the largest weights.
  Weights weights(256, 8000);
  weights[255] = 1;
  const Shares many(weights);
  EXPECT_EQ(many.begin(bytes, 256), bytes);
  EXPECT_GT(many.size(bytes, 255), 0U);
  EXPECT_LT(many.size(bytes, 255), many.size(bytes, 0) / 7999);
}

TEST(Shares, OfFewBytesGoToFewRanks) {
  const Shares shares(Weights{0, 1, 1, 0});
  EXPECT_EQ(sizes_of(shares, 0, 4), (std::vector<std::size_t>{0, 0, 0, 0}));
  EXPECT_EQ(sizes_of(shares, 1, 4), (std::vector<std::size_t>{0, 0, 1, 0}));
  EXPECT_EQ(sizes_of(shares, 65, 4), (std::vector<std::size_t>{0, 64, 1, 0}));
}

// ---- the losses in use ----

TEST(NodeBandwidths, AreTheWorstOfTheRanksOfEachNode) {
  NodeBandwidths bandwidths({0, 1, 2, 0, 1, 2});
  ASSERT_TRUE(bandwidths.can_shift());
  EXPECT_TRUE(bandwidths.shares().even());
  EXPECT_EQ(bandwidths.hash(), 0);
  bandwidths.adopt(Lost{0, 2, 0, 0, 8, 0});
  EXPECT_TRUE(std::ranges::equal(bandwidths.lost(), Lost{0, 8, 0}));
  // Ranks of the same node have the same share; the slow node has none.
  EXPECT_EQ(sizes_of(bandwidths.shares(), 64 * 400, 6),
            (std::vector<std::size_t>{6400, 0, 6400, 6400, 0, 6400}));
  EXPECT_NE(bandwidths.hash(), 0);
  bandwidths.adopt(Lost(6, 3));  // alike nodes
  EXPECT_TRUE(bandwidths.shares().even());
  EXPECT_NE(bandwidths.hash(), 0);
  bandwidths.adopt(Lost(6, 0));
  EXPECT_EQ(bandwidths.hash(), 0);
}

TEST(NodeBandwidths, StayEvenForTwoNodesAndForNodesOfDifferentSize) {
  const std::vector<std::vector<std::uint16_t>> shapes{{}, {0}, {0, 1}, {0, 0, 1, 1}, {0, 1, 2, 2}};
  for (const auto& nodes : shapes) {
    NodeBandwidths bandwidths(nodes);
    EXPECT_FALSE(bandwidths.can_shift());
    bandwidths.adopt(Lost(nodes.size(), 8));
    EXPECT_TRUE(bandwidths.shares().even());
    EXPECT_TRUE(bandwidths.lost().empty());
    EXPECT_EQ(bandwidths.hash(), 0);
  }
}

TEST(NodeBandwidths, HaveAnotherHashIfOneNodeDiffers) {
  std::mt19937_64 random(3);
  std::vector<std::uint16_t> nodes(9);
  std::iota(nodes.begin(), nodes.end(), std::uint16_t{0});
  for (int round = 0; round < 200; ++round) {
    Lost lost = random_losses(nodes.size(), random);
    NodeBandwidths first(nodes), second(nodes);
    first.adopt(lost);
    std::uint8_t& changed = lost[random() % lost.size()];
    changed = static_cast<std::uint8_t>((changed + 1 + random() % most_lost) % 16);
    second.adopt(lost);
    EXPECT_NE(first.hash(), second.hash());
  }
}

TEST(NodeBandwidths, TakeMoreThanTheMostForTheMost) {
  NodeBandwidths bandwidths({0, 1, 2});
  bandwidths.adopt(Lost{0, 255, 0});
  EXPECT_TRUE(std::ranges::equal(bandwidths.lost(), Lost{0, most_lost, 0}));
}

// ---- announcements ----

constexpr TimeNs second = 1000 * ns_per_ms;

TEST(Announcer, TellsALossThatPaysAtOnce) {
  Announcer announcer;
  const Lost healthy(4);
  EXPECT_EQ(announcer.update(0, healthy, 1, 0), 0);
  EXPECT_EQ(announcer.update(2, healthy, 1, 1), 2);  // 1 of 8 rails
  EXPECT_EQ(announcer.update(8, Lost{0, 2, 0, 0}, 1, 2), 8);
}

TEST(Announcer, KeepsALossThatDoesNotPay) {
  Announcer announcer;
  const Lost healthy(4);
  EXPECT_EQ(announcer.update(8, healthy, 1, 0), 8);
  EXPECT_EQ(announcer.update(9, Lost{0, 8, 0, 0}, 1, 1), 8);  // its share is empty already
}

TEST(Announcer, TellsARecoveryAfterASecond) {
  Announcer announcer;
  Lost lost(3);
  lost[2] = announcer.update(8, lost, 2, 0);
  ASSERT_EQ(lost[2], 8);
  EXPECT_EQ(announcer.update(0, lost, 2, second), 8);
  EXPECT_EQ(announcer.update(0, lost, 2, 2 * second - 1), 8);
  EXPECT_EQ(announcer.update(0, lost, 2, 2 * second), 0);
}

TEST(Announcer, BeginsTheSecondAgainAfterARelapse) {
  Announcer announcer;
  Lost lost(3);
  lost[2] = announcer.update(8, lost, 2, 0);
  EXPECT_EQ(announcer.update(0, lost, 2, second), 8);
  EXPECT_EQ(announcer.update(8, lost, 2, second + second / 2), 8);
  EXPECT_EQ(announcer.update(0, lost, 2, 2 * second), 8);
  EXPECT_EQ(announcer.update(0, lost, 2, 3 * second - 1), 8);
  EXPECT_EQ(announcer.update(0, lost, 2, 3 * second), 0);
}

// A bandwidth that wanders by 10 %, quickly or slowly, for five minutes.
TEST(Announcer, DoesNotFlap) {
  for (const double mean : {14.0, 12.0, 8.0}) {
    for (const double period_s : {0.05, 1.0, 3.0, 10.0, 60.0}) {
      Announcer announcer;
      Lost lost(4);
      int changes = 0;
      for (TimeNs now = 0; now < 300 * second; now += 10 * ns_per_ms) {
        const double phase = static_cast<double>(now) / 1e9 / period_s * 2 * 3.14159265;
        const double present = std::min(16.0, mean * (1 + 0.1 * std::sin(phase)));
        const auto loss = static_cast<std::uint8_t>(std::lround(16 - present));
        const std::uint8_t announced = announcer.update(loss, lost, 1, now);
        changes += announced != lost[1] ? 1 : 0;
        lost[1] = announced;
      }
      EXPECT_LE(changes, 3) << mean << ' ' << period_s;
    }
  }
}

}  // namespace
}  // namespace r2ccl
