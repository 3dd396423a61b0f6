// Order of use of a link's rails: reserves, rails that share a port, and the nearest rail.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "link/link.hpp"
#include "link_pair.hpp"

namespace r2ccl {
namespace {

using testing::bytes_of;
using testing::LinkPair;

LinkOptions with_reserves(std::uint64_t reserves) {
  LinkOptions options = LinkPair::default_options();
  options.reserves = reserves;
  return options;
}

LinkOptions with_units(const std::vector<std::uint8_t>& units, std::uint64_t reserves = 0) {
  LinkOptions options = with_reserves(reserves);
  std::ranges::copy(units, options.units.begin());
  return options;
}

std::uint64_t data_on(const Link& link, RailId rail) { return link.counters(rail).data_tx_bytes; }

void lose(LinkPair& pair, RailId rail, Epoch epoch = 1) {
  pair.a.rail_failed(rail, epoch, RailCause::carrier_loss, pair.now);
}

// Pulls the control frames and the first chunk that are ready for the rail.
void pull_a_chunk(LinkPair& pair, RailId rail) {
  while (pair.pull_one(pair.a, rail).header.type != FrameType::data)
    if (::testing::Test::HasFailure()) return;
}

// Fences the lost epoch at both ends, and opens the next epoch.
void rejoin(LinkPair& pair, RailId rail, RailId over, Epoch epoch) {
  pair.close_rails(pair.a);
  pair.exchange(over);
  pair.close_rails(pair.b);
  pair.exchange(over);
  pair.open(rail, epoch);
}

// ---- reserves ----

TEST(LinkReserve, CarriesDataOnlyWhileNoOtherDataRailIsUp) {
  LinkPair pair(2, with_reserves(0b10));
  const auto data = bytes_of(384, 1);  // three chunks: striped over all rails in use
  pair.post(pair.a, data);
  EXPECT_TRUE(pair.pull(pair.a, 1, FrameType::data).empty());
  ASSERT_EQ(pair.pull(pair.a, 0, FrameType::data).size(), 3U);
  lose(pair, 0);
  EXPECT_FALSE(pair.a.has_no_rail());
  EXPECT_EQ(pair.a.best_rail(), 1);
  pair.exchange(1);  // the replay
  EXPECT_EQ(pair.in(pair.b).delivered(), 1U);
  rejoin(pair, 0, 1, 2);
  EXPECT_EQ(pair.a.best_rail(), 0);
  EXPECT_EQ(pair.b.best_rail(), 0);
  pair.post(pair.a, data);
  EXPECT_TRUE(pair.pull(pair.a, 1, FrameType::data).empty());
  EXPECT_EQ(pair.pull(pair.a, 0, FrameType::data).size(), 3U);
}

TEST(LinkReserve, ComesBeforeTheManagementRail) {
  LinkPair pair({RailKind::sim, RailKind::control, RailKind::sim}, with_reserves(0b100));
  lose(pair, 0);
  pair.post(pair.a, bytes_of(384, 1));
  EXPECT_TRUE(pair.pull(pair.a, 1, FrameType::data).empty());
  EXPECT_EQ(pair.pull(pair.a, 2, FrameType::data).size(), 3U);
  lose(pair, 2);
  EXPECT_EQ(pair.pull(pair.a, 1, FrameType::data).size(), 3U);
}

TEST(LinkReserve, ReservesShareLargeMessagesOnceTheyAreNeeded) {
  LinkPair pair(3, with_reserves(0b110));
  lose(pair, 0);
  pair.post(pair.a, bytes_of(384, 1));
  pull_a_chunk(pair, 1);
  pull_a_chunk(pair, 2);
  EXPECT_GT(data_on(pair.a, 1), 0U);
  EXPECT_GT(data_on(pair.a, 2), 0U);
}

TEST(LinkReserve, ASuspectedRailIsHedgedOnTheReserve) {
  LinkPair pair(2, with_reserves(0b10));
  pair.post(pair.a, bytes_of(100, 1));
  ASSERT_EQ(pair.pull(pair.a, 0, FrameType::data).size(), 1U);
  pair.pass(40 * ns_per_ms, [&] { pair.exchange(1); });
  ASSERT_EQ(pair.a.state(0), RailState::suspect);
  EXPECT_EQ(pair.in(pair.b).delivered(), 1U);
  EXPECT_EQ(pair.a.best_rail(), 1);
  pair.acknowledge(pair.a, 0);
  EXPECT_EQ(pair.a.state(0), RailState::up);
  EXPECT_EQ(pair.a.best_rail(), 0);
}

// The hedge is bound to the reserve; then a better rail returns before the reserve takes the hedge.
TEST(LinkReserve, AHedgeForAReserveMovesToABetterRail) {
  LinkPair pair(3, with_reserves(0b100));
  pair.pass(205 * ns_per_ms, [&] {
    pair.exchange(0);
    pair.exchange(2);
  });
  (void)pair.pull(pair.a, 1);  // a probe: rail 1 is suspected first
  pair.pass(10 * ns_per_ms);
  pair.post(pair.a, bytes_of(100, 1));
  ASSERT_EQ(pair.pull(pair.a, 0, FrameType::data).size(), 1U);
  pair.pass(105 * ns_per_ms);  // both rails are silent; the reserve's socket accepts no bytes
  ASSERT_EQ(pair.a.state(0), RailState::suspect);
  ASSERT_EQ(pair.a.state(1), RailState::suspect);
  pair.acknowledge(pair.a, 1);
  ASSERT_EQ(pair.a.state(1), RailState::up);
  lose(pair, 0);
  EXPECT_EQ(pair.pull(pair.a, 1, FrameType::data).size(), 1U);
}

TEST(LinkReserve, ThePeersUseOfAReserveIsNotFollowed) {
  LinkPair pair(2, with_reserves(0b10));
  lose(pair, 0);
  pair.post(pair.a, bytes_of(100, 1));
  pair.deliver(pair.b, 1, pair.pull(pair.a, 1, FrameType::data));  // before the notice of the loss
  EXPECT_EQ(pair.b.state(0), RailState::up);
  EXPECT_EQ(pair.b.best_rail(), 0);
}

TEST(LinkReserve, TheLossOfAnIdleReserveDisturbsNoCall) {
  LinkPair pair(2, with_reserves(0b10));
  const std::uint64_t before = pair.a.disturbances();
  lose(pair, 1);
  EXPECT_EQ(pair.a.disturbances(), before);
  lose(pair, 0);
  EXPECT_EQ(pair.a.disturbances(), before + 1);
}

// A flapping rail is damped while it is not needed: a rail as good is UP.
TEST(LinkReserve, ABetterRailReturnsAtOnceWhileOnlyAReserveIsUp) {
  for (const std::uint64_t reserves : {0b10U, 0b00U}) {
    LinkPair pair(2, with_reserves(reserves));
    lose(pair, 0);
    pair.close_rails(pair.a);
    pair.a.actions().clear();
    pair.a.connect_soon(0, pair.now);
    const bool at_once = std::ranges::any_of(pair.a.actions(), [&](const LinkAction& action) {
      return action.kind == LinkAction::Kind::connect && action.at == pair.now;
    });
    EXPECT_EQ(at_once, reserves != 0);
  }
}

// ---- shared fate ----

TEST(LinkUnit, AReplayPrefersAnIndependentRail) {
  LinkPair pair(3, with_units({1, 1, 0}));
  const auto data = bytes_of(384, 1);
  pair.post(pair.a, data);
  ASSERT_EQ(pair.pull(pair.a, 0, FrameType::data).size(), 3U);
  lose(pair, 0);
  EXPECT_EQ(pair.a.best_rail(), 2);
  EXPECT_TRUE(pair.pull(pair.a, 1, FrameType::data).empty());
  EXPECT_EQ(pair.pull(pair.a, 2, FrameType::data).size(), 3U);
}

TEST(LinkUnit, TheOtherRailCarriesDataAgainAfterSomeTime) {
  LinkOptions options = with_units({1, 1, 0});
  options.shared_fate_ns = 100 * ns_per_ms;
  LinkPair pair(3, options);
  lose(pair, 0);
  const auto healthy = [&] {
    pair.exchange(1);
    pair.exchange(2);
  };
  pair.pass(99 * ns_per_ms, healthy);
  EXPECT_EQ(pair.a.tier(1), RailTier::data_endangered);
  pair.pass(2 * ns_per_ms, healthy);
  EXPECT_EQ(pair.a.tier(1), RailTier::data);
  pair.post(pair.a, bytes_of(384, 1));
  pull_a_chunk(pair, 1);
  EXPECT_GT(data_on(pair.a, 1), 0U);
}

TEST(LinkUnit, AHedgePrefersAnIndependentRail) {
  LinkPair pair(3, with_units({1, 1, 0}));
  pair.post(pair.a, bytes_of(100, 1));
  ASSERT_EQ(pair.pull(pair.a, 0, FrameType::data).size(), 1U);
  pair.pass(40 * ns_per_ms, [&] {
    pair.exchange(1);
    pair.exchange(2);
  });
  ASSERT_EQ(pair.a.state(0), RailState::suspect);
  EXPECT_EQ(data_on(pair.a, 1), 0U);
  EXPECT_GT(data_on(pair.a, 2), 0U);
  pair.acknowledge(pair.a, 0);  // the suspicion clears: no loss, so no rail is in danger
  ASSERT_EQ(pair.a.state(0), RailState::up);
  EXPECT_EQ(pair.a.tier(1), RailTier::data);
}

// A hedge is bound to each of the rails 1 to 3, which take no bytes.  Then rail 2 is lost, and rail
// 1 is in danger.
TEST(LinkUnit, AHedgeForAnEndangeredRailMovesToAnIndependentRail) {
  LinkPair pair(4, with_units({0, 1, 1, 0}));
  pair.post(pair.a, bytes_of(100, 1));
  ASSERT_EQ(pair.pull(pair.a, 0, FrameType::data).size(), 1U);
  pair.pass(105 * ns_per_ms);
  ASSERT_EQ(pair.a.state(0), RailState::suspect);
  lose(pair, 2);
  ASSERT_EQ(pair.a.tier(), RailTier::data);
  ASSERT_EQ(pair.a.tier(1), RailTier::data_endangered);
  EXPECT_TRUE(pair.pull(pair.a, 1, FrameType::data).empty());
  EXPECT_EQ(pair.pull(pair.a, 3, FrameType::data).size(), 3U);
}

TEST(LinkUnit, WithoutAnIndependentRailTheOtherRailOfTheUnitCarriesData) {
  LinkPair pair(2, with_units({1, 1}));
  pair.post(pair.a, bytes_of(384, 1));
  ASSERT_EQ(pair.pull(pair.a, 0, FrameType::data).size(), 3U);
  lose(pair, 0);
  EXPECT_EQ(pair.pull(pair.a, 1, FrameType::data).size(), 3U);
}

TEST(LinkUnit, AnEndangeredRailComesBeforeAReserve) {
  LinkPair pair(3, with_units({1, 1, 0}, 0b100));
  lose(pair, 0);
  pair.post(pair.a, bytes_of(384, 1));
  EXPECT_TRUE(pair.pull(pair.a, 2, FrameType::data).empty());
  EXPECT_EQ(pair.pull(pair.a, 1, FrameType::data).size(), 3U);
}

TEST(LinkUnit, ARecalledRailEndangersNoOther) {
  LinkPair pair(3, with_units({1, 1, 0}));
  pair.a.rail_failed(0, 1, RailCause::recalled, pair.now);
  EXPECT_EQ(pair.a.tier(1), RailTier::data);
}

TEST(LinkUnit, RailsWithoutAUnitAreIndependent) {
  LinkPair pair(3, with_units({0, 0, 2}));
  lose(pair, 0);
  for (const RailId rail : {RailId{1}, RailId{2}}) EXPECT_EQ(pair.a.tier(rail), RailTier::data);
}

// ---- the nearest rail ----

// Rail `nearest` is the nearest, the rail behind it the second, and so on.
LinkOptions with_nearest(std::size_t nearest, std::size_t rails, std::uint64_t reserves = 0) {
  LinkOptions options = with_reserves(reserves);
  for (std::size_t rail = 0; rail < rails; ++rail)
    options.distances[rail] = static_cast<std::uint8_t>((rail + rails - nearest) % rails);
  return options;
}

TEST(LinkNearest, CarriesSmallMessagesWhicheverRailCameUpFirst) {
  for (RailId nearest = 0; nearest < 8; ++nearest) {
    LinkPair pair(8, with_nearest(nearest, 8));  // rail 0 comes up first
    EXPECT_EQ(pair.a.best_rail(), nearest);
    EXPECT_EQ(pair.b.best_rail(), nearest);
    pair.post(pair.a, bytes_of(100, 1));
    EXPECT_EQ(pair.pull(pair.a, nearest, FrameType::data).size(), 1U);
  }
}

TEST(LinkNearest, IsReplacedByTheNextOneAndReturns) {
  LinkPair pair(4, with_nearest(2, 4));
  pair.post(pair.a, bytes_of(100, 1));
  ASSERT_EQ(pair.pull(pair.a, 2, FrameType::data).size(), 1U);
  lose(pair, 2);
  EXPECT_EQ(pair.a.best_rail(), 3);
  pair.exchange(3);  // the replay
  EXPECT_EQ(pair.in(pair.b).delivered(), 1U);
  EXPECT_EQ(pair.b.best_rail(), 3);
  rejoin(pair, 2, 3, 2);
  EXPECT_EQ(pair.a.best_rail(), 2);
  pair.post(pair.a, bytes_of(100, 2));
  pair.exchange(2);
  EXPECT_EQ(pair.in(pair.b).delivered(), 2U);
  EXPECT_EQ(pair.b.best_rail(), 2);
}

TEST(LinkNearest, IsNotUsedWhileClearlySlower) {
  LinkPair pair(3, with_nearest(1, 3));
  const auto measure = [&pair](RailId rail, TimeNs time) {
    pair.a.path_round_trip(rail, time, time, 0);
  };
  for (RailId rail = 0; rail < 3; ++rail) measure(rail, 10'000);
  EXPECT_EQ(pair.a.best_rail(), 1);
  measure(1, 1000'000);
  EXPECT_EQ(pair.a.best_rail(), 2);
  measure(1, 100'000);
  EXPECT_EQ(pair.a.best_rail(), 1);
}

TEST(LinkNearest, IsUsedAfterBetterTiers) {
  LinkPair pair(3, with_nearest(1, 3, /*reserves=*/0b10));
  EXPECT_EQ(pair.a.best_rail(), 2);
}

// The connecting end has lost its nearest rail, and the accepting end does not know it yet.
TEST(LinkNearest, TheAcceptingEndStaysOnTheRailOfThePeer) {
  LinkPair pair(2, with_nearest(0, 2));
  ASSERT_EQ(pair.b.best_rail(), 0);
  lose(pair, 0);
  pair.post(pair.a, bytes_of(100, 1));
  pair.deliver(pair.b, 1, pair.pull(pair.a, 1, FrameType::data));  // before the notice of the loss
  ASSERT_EQ(pair.b.state(0), RailState::up);
  pair.b.path_round_trip(0, 10'000, 10'000, 0);
  EXPECT_EQ(pair.b.best_rail(), 1);
}

}  // namespace
}  // namespace r2ccl
