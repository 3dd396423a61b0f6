// Localisation of faults: the findings of each end and the verdict of its peer.
#include <gtest/gtest.h>

#include "link_pair.hpp"

namespace r2ccl {
namespace {

using testing::LinkPair;

constexpr auto works = PortEvidence::works;
constexpr auto broken = PortEvidence::broken;
constexpr auto unknown = PortEvidence::unknown;

TEST(Verdict, ASingleBrokenPortIsTheFaultAndTwoMeanThePath) {
  EXPECT_EQ(judge({.own = broken, .peer = works}), Verdict::local_nic);
  EXPECT_EQ(judge({.own = works, .peer = broken}), Verdict::remote_nic);
  EXPECT_EQ(judge({.own = broken, .peer = broken}), Verdict::path);
}

TEST(Verdict, WithoutABrokenPortTheVerdictWaitsForCompleteEvidence) {
  EXPECT_EQ(judge({.own = works, .peer = works}), Verdict::none);
  EXPECT_EQ(judge({.own = works, .peer = works, .complete = true}), Verdict::path);
  EXPECT_EQ(judge({.own = unknown, .peer = unknown, .complete = true}), Verdict::path);
  EXPECT_EQ(judge({.own = works, .peer = works, .answered = true, .complete = true}),
            Verdict::transient);
}

TEST(Verdict, ALostCarrierIsLocalNicHereAndRemoteNicAtThePeer) {
  LinkPair pair(2);
  pair.a.rail_failed(0, 1, RailCause::carrier_loss, pair.now);
  EXPECT_EQ(pair.a.verdict(0), Verdict::local_nic);
  pair.exchange(1);
  EXPECT_EQ(pair.b.verdict(0), Verdict::remote_nic);
  EXPECT_EQ(pair.b.cause(0), RailCause::peer_notice);
  EXPECT_FALSE(pair.a.wants_location(0));
  EXPECT_FALSE(pair.b.wants_location(0));
}

// Each end loses its own port, and the notice of the peer is faster than the own event.
TEST(Verdict, APortLostAfterThePeersNoticeIsToldToThePeer) {
  LinkPair pair(2);
  pair.a.rail_failed(0, 1, RailCause::carrier_loss, pair.now);
  pair.exchange(1);
  pair.b.rail_failed(0, 1, RailCause::carrier_loss, pair.now);
  EXPECT_EQ(pair.b.cause(0), RailCause::peer_notice);
  EXPECT_EQ(pair.b.verdict(0), Verdict::path);
  pair.exchange(1);
  EXPECT_EQ(pair.a.verdict(0), Verdict::path);
}

TEST(Verdict, LaterFindingsAreSentToThePeer) {
  LinkPair pair(2);
  pair.a.rail_failed(0, 1, RailCause::dead_deadline, pair.now);
  pair.exchange(1);
  EXPECT_TRUE(pair.a.wants_location(0));
  EXPECT_TRUE(pair.b.wants_location(0));
  pair.b.located(0, 1, {.own = unknown, .peer = unknown, .complete = true});
  EXPECT_EQ(pair.b.verdict(0), Verdict::path);
  pair.a.located(0, 1, {.own = broken, .peer = unknown, .complete = true});
  EXPECT_EQ(pair.a.verdict(0), Verdict::local_nic);
  pair.exchange(1);
  EXPECT_EQ(pair.b.verdict(0), Verdict::remote_nic);
}

// The epoch is fenced at both ends, so that no repeated RAIL_DOWN carries the finding.
TEST(Verdict, AFindingAfterTheFenceIsRepeatedUntilThePeerConfirmsIt) {
  for (const bool carrier : {true, false}) {
    LinkPair pair(2);
    pair.a.rail_failed(0, 1, RailCause::dead_deadline, pair.now);
    pair.exchange(1);
    for (Link* end : {&pair.a, &pair.b}) pair.close_rails(*end);
    pair.exchange(1);
    ASSERT_EQ(pair.a.state(0), RailState::connecting);
    if (carrier)
      pair.a.rail_failed(0, 1, RailCause::carrier_loss, pair.now);
    else
      pair.a.located(0, 1, {.own = broken, .peer = unknown, .complete = true});
    EXPECT_EQ(pair.pull(pair.a, 1, FrameType::rail_down).size(), 1U);  // lost
    pair.acknowledge(pair.a, 1);
    EXPECT_EQ(pair.b.verdict(0), Verdict::none);
    pair.pass(50 * ns_per_ms, [&] { pair.exchange(1); });
    EXPECT_EQ(pair.b.verdict(0), Verdict::remote_nic);
    std::size_t notices = 0;
    pair.pass(1000 * ns_per_ms, [&] {
      notices += pair.pull(pair.a, 1, FrameType::rail_down).size();
      pair.acknowledge(pair.a, 1);
    });
    EXPECT_EQ(notices, 0U) << "confirmed";
  }
}

// The confirmation of an earlier finding is under way while the finding changes.
TEST(Verdict, TheConfirmationOfAnEarlierFindingLeavesTheNewOneUntold) {
  LinkPair pair(2);
  pair.a.rail_failed(0, 1, RailCause::dead_deadline, pair.now);
  pair.exchange(1);
  for (Link* end : {&pair.a, &pair.b}) pair.close_rails(*end);
  pair.exchange(1);
  pair.a.located(0, 1, {.own = works, .peer = unknown, .complete = true});
  pair.deliver(pair.b, 1, pair.pull(pair.a, 1));
  const auto answers = pair.pull(pair.b, 1);
  pair.a.rail_failed(0, 1, RailCause::carrier_loss, pair.now);
  (void)pair.pull(pair.a, 1);  // lost
  for (Link* end : {&pair.a, &pair.b}) pair.acknowledge(*end, 1);
  pair.deliver(pair.a, 1, answers);
  pair.pass(50 * ns_per_ms, [&] { pair.exchange(1); });
  EXPECT_EQ(pair.b.verdict(0), Verdict::remote_nic);
}

TEST(Verdict, ThePeersReportOfItsPortOverridesLocalEvidence) {
  LinkPair pair(2);
  pair.a.rail_failed(0, 1, RailCause::carrier_loss, pair.now);
  pair.exchange(1);
  pair.b.located(0, 1, {.own = works, .peer = works, .complete = true});
  EXPECT_EQ(pair.b.verdict(0), Verdict::remote_nic);
}

TEST(Verdict, ARailReopenedBeforeLocalisationIsTransient) {
  struct Observer final : LinkObserver {
    void on_rail_moved(RailId, RailState, RailState, RailCause) override {}
    void on_replay(RailId, std::uint32_t, bool) override {}
    void on_located(RailId, Verdict verdict) override { verdicts.push_back(verdict); }
    std::vector<Verdict> verdicts;
  };
  LinkPair pair(2);
  Observer observer;
  pair.a.set_observer(&observer);
  pair.a.rail_failed(0, 1, RailCause::socket_error, pair.now);
  pair.close_rails(pair.a);
  pair.exchange(1);
  pair.close_rails(pair.b);
  pair.exchange(1);
  pair.open(0, 2);
  EXPECT_EQ(observer.verdicts, (std::vector{Verdict::transient}));
  EXPECT_EQ(pair.a.verdict(0), Verdict::none);
  pair.a.located(0, 1, {.own = broken, .peer = unknown, .complete = true});  // old epoch
  EXPECT_EQ(pair.a.verdict(0), Verdict::none);
  pair.a.set_observer(nullptr);
}

TEST(Verdict, ALinkWithoutRailsBlamesThePeerUnlessAllPortsOfASideAreBroken) {
  LinkPair pair(2);
  pair.a.rail_failed(0, 1, RailCause::carrier_loss, pair.now);
  EXPECT_EQ(pair.a.overall_verdict(), Verdict::peer);
  pair.a.rail_failed(1, 1, RailCause::carrier_loss, pair.now);
  EXPECT_EQ(pair.a.overall_verdict(), Verdict::local_nic);
}

}  // namespace
}  // namespace r2ccl
