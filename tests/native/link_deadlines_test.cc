// Time rules of the link: suspicion, hedges, charges, probes and back-off.
#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "link/link.hpp"
#include "link_pair.hpp"

namespace r2ccl {
namespace {

using testing::bytes_of;
using testing::Frame;
using testing::LinkPair;

// Passes `time` while rail 1 answers and rail 0 is silent.
void pass_with_rail_1(LinkPair& pair, TimeNs time) {
  pair.pass(time, [&] { pair.exchange(1); });
}

TEST(LinkDeadlines, ASilentRailIsHedgedOnAnotherRail) {
  LinkPair pair(2);
  const auto data = bytes_of(100, 1);
  pair.post(pair.a, data);
  ASSERT_EQ(pair.pull(pair.a, 0, FrameType::data).size(), 1U);
  pass_with_rail_1(pair, 9 * ns_per_ms);
  EXPECT_EQ(pair.a.state(0), RailState::up);
  EXPECT_EQ(pair.in(pair.b).delivered(), 0U);
  pass_with_rail_1(pair, 3 * ns_per_ms);
  EXPECT_EQ(pair.a.state(0), RailState::suspect);
  EXPECT_EQ(pair.in(pair.b).delivered(), 1U);
  EXPECT_EQ(pair.a.counters(0).hedged_chunks, 1U);
  EXPECT_EQ(pair.a.counters(0).replayed_chunks, 1U);
  // A suspect rail carries no new data.
  pair.post(pair.a, data);
  EXPECT_TRUE(pair.pull(pair.a, 0, FrameType::data).empty());
}

TEST(LinkDeadlines, ASmallMessageIsHedgedOnAllOtherRailsAtOnce) {
  LinkPair pair(3);
  pair.post(pair.a, bytes_of(100, 1));
  ASSERT_EQ(pair.pull(pair.a, 0, FrameType::data).size(), 1U);
  for (int ms = 0; ms < 20 && pair.a.state(0) == RailState::up; ++ms)
    pass_with_rail_1(pair, ns_per_ms);
  ASSERT_EQ(pair.a.state(0), RailState::suspect);
  EXPECT_EQ(pair.pull(pair.a, 1, FrameType::data).size(), 1U);
  EXPECT_EQ(pair.pull(pair.a, 2, FrameType::data).size(), 1U);
}

TEST(LinkDeadlines, SuspectRailsAreHedgedAsSoonAsARailAnswers) {
  LinkPair pair(2);
  const auto answer_on_rail_0 = [&] { pair.exchange(0); };
  pair.pass(205 * ns_per_ms, answer_on_rail_0);
  ASSERT_EQ(pair.pull(pair.a, 1, FrameType::ping).size(), 1U);  // stays unanswered
  pair.pass(20 * ns_per_ms, answer_on_rail_0);
  ASSERT_EQ(pair.a.state(1), RailState::suspect);
  pair.post(pair.a, bytes_of(100, 1));
  ASSERT_EQ(pair.pull(pair.a, 0, FrameType::data).size(), 1U);
  pair.pass(105 * ns_per_ms);
  ASSERT_EQ(pair.a.state(0), RailState::suspect);  // no other rail was UP for a hedge
  pair.acknowledge(pair.a, 1);
  ASSERT_EQ(pair.a.state(1), RailState::up);
  EXPECT_EQ(pair.pull(pair.a, 1, FrameType::data).size(), 1U);
}

TEST(LinkDeadlines, AHedgeMovesOnIfItsRailTakesNoData) {
  LinkPair pair(3);
  pair.a.rail_failed(2, 1, RailCause::carrier_loss, pair.now);
  pair.close_rails(pair.a);
  pair.a.peer_fenced(2, 1, pair.now);
  pair.pass(205 * ns_per_ms, [&] { pair.exchange(0); });  // leaves a probe due on rail 1
  pair.post(pair.a, bytes_of(100, 1));
  ASSERT_EQ(pair.pull(pair.a, 0, FrameType::data).size(), 1U);
  pair.pass(5 * ns_per_ms);
  ASSERT_EQ(pair.pull(pair.a, 1, FrameType::ping).size(), 1U);
  pair.pass(97 * ns_per_ms);
  ASSERT_EQ(pair.a.state(0), RailState::suspect);
  ASSERT_EQ(pair.a.state(1), RailState::up);  // the hedge is queued for rail 1
  pair.pass(7 * ns_per_ms);
  ASSERT_EQ(pair.a.state(1), RailState::suspect);
  pair.b.rail_failed(2, 1, RailCause::carrier_loss, pair.now);
  pair.close_rails(pair.b);
  pair.b.peer_fenced(2, 1, pair.now);
  pair.open(2, 2);
  EXPECT_EQ(pair.in(pair.b).delivered(), 1U);
}

// A peer without CPU time: its host acknowledges late, and its process answers nothing.
TEST(LinkDeadlines, ABusyPeerIsNoEvidenceAgainstARail) {
  LinkPair pair(2);
  for (int i = 0; i < 20; ++i) {
    pair.post(pair.a, bytes_of(100, 1));
    const auto sent = pair.pull(pair.a, 0);
    std::vector<Frame> probes;
    pair.pass(40 * ns_per_ms, [&] {
      for (Frame& probe : pair.pull(pair.a, 1)) probes.push_back(std::move(probe));
    });
    EXPECT_EQ(pair.a.state(0), RailState::up);
    // The process runs again: it reads and acknowledges both rails, then answers.
    pair.deliver(pair.b, 0, sent);
    pair.deliver(pair.b, 1, probes);
    pair.acknowledge(pair.a, 0);
    pair.acknowledge(pair.a, 1);
    pair.exchange(1);
    pair.exchange(0);
    pair.pass(5 * ns_per_ms);
    EXPECT_EQ(pair.a.state(0), RailState::up);
  }
  EXPECT_EQ(pair.a.counters(0).hedged_chunks, 0U);
}

TEST(LinkDeadlines, ARailBehindAPathThatAdvancesIsSuspectedWithoutAnAnswer) {
  LinkPair pair(2);
  pair.post(pair.a, bytes_of(100, 1));
  (void)pair.pull(pair.a, 0);
  // The probe on rail 1 waits behind bulk data, which the path takes bit by bit.
  std::uint64_t taken = pair.a.counters(1).tx_bytes;
  const auto bulk = [&] {
    (void)pair.pull(pair.a, 1);
    if (pair.a.counters(1).tx_bytes > taken + 1) pair.a.path_acked(1, 1, ++taken, false, pair.now);
  };
  pair.pass(28 * ns_per_ms, bulk);
  EXPECT_EQ(pair.a.state(0), RailState::up);
  pair.pass(4 * ns_per_ms, bulk);
  EXPECT_EQ(pair.a.state(0), RailState::suspect);
}

// The kernel of a stopped process acknowledges the probe, and the process answers nothing.
TEST(LinkDeadlines, AnAcknowledgedProbeAloneIsNoEvidence) {
  LinkPair pair(2);
  pair.post(pair.a, bytes_of(100, 1));
  (void)pair.pull(pair.a, 0);
  pair.pass(90 * ns_per_ms, [&] {
    (void)pair.pull(pair.a, 1);
    pair.acknowledge(pair.a, 1);
  });
  EXPECT_EQ(pair.a.state(0), RailState::up);
}

TEST(LinkDeadlines, ALatePathAckClearsSuspicion) {
  LinkPair pair(2);
  pair.post(pair.a, bytes_of(100, 1));
  const auto sent = pair.pull(pair.a, 0);
  pass_with_rail_1(pair, 20 * ns_per_ms);
  ASSERT_EQ(pair.a.state(0), RailState::suspect);
  pair.acknowledge(pair.a, 0);
  EXPECT_EQ(pair.a.state(0), RailState::up);
  pass_with_rail_1(pair, 150 * ns_per_ms);
  EXPECT_EQ(pair.a.state(0), RailState::up);
}

TEST(LinkDeadlines, ARailSilentUntilTheDeadDeadlineGoesDownIfAnotherAnswers) {
  LinkPair pair(2);
  pair.post(pair.a, bytes_of(100, 1));
  (void)pair.pull(pair.a, 0);
  pass_with_rail_1(pair, 190 * ns_per_ms);
  EXPECT_EQ(pair.a.state(0), RailState::suspect);
  pass_with_rail_1(pair, 30 * ns_per_ms);
  EXPECT_EQ(pair.a.state(0), RailState::down);
  EXPECT_EQ(pair.a.cause(0), RailCause::dead_deadline);
}

TEST(LinkDeadlines, NoRailIsChargedWhenAllAreSilent) {
  LinkPair pair(3);
  pair.post(pair.a, bytes_of(384, 1));
  const auto pull_all = [&] {
    for (RailId rail = 0; rail < 3; ++rail) (void)pair.pull(pair.a, rail);
  };
  pair.pass(5000 * ns_per_ms, pull_all);
  for (RailId rail = 0; rail < 3; ++rail) EXPECT_EQ(pair.a.state(rail), RailState::suspect);
  EXPECT_TRUE(pair.a.has_no_rail());
  // The peer was stopped and resumes: all rails recover.
  for (RailId rail = 0; rail < 3; ++rail) pair.acknowledge(pair.a, rail);
  for (RailId rail = 0; rail < 3; ++rail) EXPECT_EQ(pair.a.state(rail), RailState::up);
  EXPECT_FALSE(pair.a.has_no_rail());
}

// Leaves the only rail silent until the connecting end inquires on another connection.
void fall_silent(LinkPair& pair) {
  pair.post(pair.a, bytes_of(100, 1));
  (void)pair.pull(pair.a, 0);
  pair.pass(190 * ns_per_ms, [&] { (void)pair.pull(pair.a, 0); });
  EXPECT_EQ(pair.a.state(0), RailState::suspect);
  EXPECT_TRUE(pair.a.actions().empty());
  pair.pass(20 * ns_per_ms, [&] { (void)pair.pull(pair.a, 0); });
  EXPECT_EQ(pair.a.state(0), RailState::suspect);
}

TEST(LinkDeadlines, ASilentLastRailCausesInquiriesWithBackOff) {
  LinkPair pair(1);
  fall_silent(pair);
  ASSERT_EQ(pair.a.actions().size(), 1U);
  EXPECT_EQ(pair.a.actions()[0].kind, LinkAction::Kind::connect);
  pair.pass(10'000 * ns_per_ms, [&] { (void)pair.pull(pair.a, 0); });
  EXPECT_EQ(pair.a.actions().size(), 12U);  // after 200, 400 and 800 ms, then every 1000 ms
  EXPECT_EQ(pair.a.state(0), RailState::suspect);
  pair.acknowledge(pair.a, 0);
  EXPECT_EQ(pair.a.state(0), RailState::up);
}

TEST(LinkDeadlines, AnInquiryLearnsThatThePeerFencedTheEpoch) {
  LinkPair pair(1);
  fall_silent(pair);
  pair.a.connect_refused(0, /*peer_fenced=*/1, pair.now);
  EXPECT_EQ(pair.a.state(0), RailState::down);
  EXPECT_EQ(pair.a.cause(0), RailCause::peer_notice);
}

TEST(LinkDeadlines, AnAnsweredInquiryShowsADeadEpochAndALivePeer) {
  LinkPair pair(1);
  fall_silent(pair);
  pair.a.connect_refused(0, /*peer_fenced=*/0, pair.now);
  EXPECT_EQ(pair.a.state(0), RailState::suspect);
  pair.pass(8 * ns_per_ms, [&] { (void)pair.pull(pair.a, 0); });
  EXPECT_EQ(pair.a.state(0), RailState::suspect);  // the answer starts another deadline
  pair.pass(6 * ns_per_ms, [&] { (void)pair.pull(pair.a, 0); });
  EXPECT_EQ(pair.a.state(0), RailState::down);
  EXPECT_EQ(pair.a.cause(0), RailCause::dead_deadline);
}

TEST(LinkDeadlines, ADelayedFrameIsNoAnswer) {
  LinkPair pair(2);
  pair.pass(205 * ns_per_ms, [&] {
    pair.exchange(0);
    pair.exchange(1);
  });
  pair.post(pair.b, bytes_of(100, 1));
  const auto held_up = pair.pull(pair.b, 0);  // sent before the peer was stopped
  pair.post(pair.a, bytes_of(100, 1));
  (void)pair.pull(pair.a, 0);
  const auto pull_all = [&] {
    (void)pair.pull(pair.a, 0);
    (void)pair.pull(pair.a, 1);
  };
  pair.pass(100 * ns_per_ms, pull_all);
  pair.deliver(pair.a, 1, held_up);
  pair.pass(500 * ns_per_ms, pull_all);
  EXPECT_NE(pair.a.state(0), RailState::down);
}

TEST(LinkDeadlines, AnAckedButUnansweredRailIsChargedOnlyIfAnotherAnswers) {
  LinkPair pair(2);
  const auto take_0 = [&] {
    (void)pair.pull(pair.a, 0);
    pair.acknowledge(pair.a, 0);
  };
  pair.pass(3000 * ns_per_ms, [&] {
    take_0();
    (void)pair.pull(pair.a, 1);
    pair.acknowledge(pair.a, 1);
  });
  EXPECT_EQ(pair.a.state(0), RailState::up);  // the peer's process is stopped
  EXPECT_GE(pair.a.unheard(), 2000 * ns_per_ms);
  pair.pass(800 * ns_per_ms, [&] {
    take_0();
    pair.exchange(1);
  });
  EXPECT_EQ(pair.a.state(0), RailState::down);
  EXPECT_EQ(pair.a.state(1), RailState::up);
  EXPECT_LT(pair.a.unheard(), 300 * ns_per_ms);
}

// The peer's process stops after its answer on one rail, before its answer on the other.
TEST(LinkDeadlines, OneAnswerElsewhereDoesNotChargeAnUnansweredRail) {
  LinkPair pair(2);
  const auto unanswered = [&] {
    for (RailId rail = 0; rail < 2; ++rail) {
      (void)pair.pull(pair.a, rail);
      pair.acknowledge(pair.a, rail);
    }
  };
  pair.pass(200 * ns_per_ms, [&] { pair.exchange(1); });  // a probe is due on rail 0
  pair.pass(215 * ns_per_ms, unanswered);                 // overdue
  pair.pass(2 * ns_per_ms, [&] { pair.exchange(1); });
  pair.pass(1000 * ns_per_ms, unanswered);
  EXPECT_EQ(pair.a.state(0), RailState::up);
  pair.pass(300 * ns_per_ms, [&] {
    (void)pair.pull(pair.a, 0);
    pair.acknowledge(pair.a, 0);
    pair.exchange(1);
  });
  EXPECT_EQ(pair.a.state(0), RailState::down);
}

TEST(LinkDeadlines, APeerThatDoesNotReadCostsNoRail) {
  LinkPair pair(2);
  pair.post(pair.a, bytes_of(100, 1));
  (void)pair.pull(pair.a, 0);
  pair.pass(3000 * ns_per_ms, [&] {
    pair.exchange(1);
    pair.a.path_acked(0, 1, 0, /*peer_limited=*/true, pair.now);
  });
  EXPECT_EQ(pair.a.state(0), RailState::up);
}

TEST(LinkDeadlines, PathProgressBehindAGapIsNoSilence) {
  LinkPair pair(2);
  pair.post(pair.a, bytes_of(100, 1));
  (void)pair.pull(pair.a, 0);
  pair.pass(1000 * ns_per_ms, [&] {
    pair.exchange(1);
    pair.a.path_advanced(0, 1, pair.now);
  });
  EXPECT_EQ(pair.a.state(0), RailState::up);
  pass_with_rail_1(pair, 15 * ns_per_ms);
  EXPECT_EQ(pair.a.state(0), RailState::suspect);
  pair.a.path_advanced(0, 1, pair.now);
  EXPECT_EQ(pair.a.state(0), RailState::up);
}

TEST(LinkDeadlines, APauseOfOurOwnLoopChargesNoRail) {
  LinkPair pair(2);
  pair.post(pair.a, bytes_of(100, 1));
  const auto sent = pair.pull(pair.a, 0);
  pair.now += 60'000 * ns_per_ms;  // process stopped, machine suspended, or a jump of the clock
  pair.a.tick(pair.now);
  EXPECT_EQ(pair.a.state(0), RailState::up);
  pair.acknowledge(pair.a, 0);
  pair.deliver(pair.b, 0, sent);
  pass_with_rail_1(pair, 100 * ns_per_ms);
  EXPECT_EQ(pair.a.state(0), RailState::up);
}

// If both ends use the same rail, messages acknowledge each other. The connecting end chooses the
// rail.
TEST(LinkDeadlines, TheAcceptingEndFollowsThePeersRailForSmallMessages) {
  LinkPair pair(2);
  const RailId first = pair.a.best_rail();
  ASSERT_EQ(pair.b.best_rail(), first);
  const RailId other = first == 0 ? 1 : 0;
  const auto prefer = [first](Link& link) {
    link.path_round_trip(first, ns_per_ms, ns_per_ms, 0);
    link.path_round_trip(first, 1000, 1000, 0);  // neither worse nor better than the other rail
  };
  prefer(pair.b);
  ASSERT_EQ(pair.b.best_rail(), other);
  pair.post(pair.b, bytes_of(64, 1));
  pair.exchange(other);
  EXPECT_EQ(pair.a.best_rail(), first);
  pair.post(pair.a, bytes_of(384, 2));  // large: striped over both rails
  pair.deliver(pair.b, first, pair.pull(pair.a, first));
  EXPECT_EQ(pair.b.best_rail(), other);
  pair.exchange(other);
  pair.exchange(first);
  pair.post(pair.a, bytes_of(64, 3));
  pair.exchange(first);
  EXPECT_EQ(pair.b.best_rail(), first);
  // The accepting end does not follow to a clearly worse rail.
  pair.b.path_round_trip(first, ns_per_ms, ns_per_ms, 0);
  ASSERT_EQ(pair.b.best_rail(), other);
  pair.post(pair.a, bytes_of(64, 4));
  pair.exchange(first);
  EXPECT_EQ(pair.b.best_rail(), other);
}

TEST(LinkDeadlines, TheLastUsableRailCarriesDataAlsoWhileSuspect) {
  LinkPair pair(2);
  pair.post(pair.a, bytes_of(384, 1));
  pair.pass(120 * ns_per_ms, [&] {
    for (RailId rail = 0; rail < 2; ++rail) (void)pair.pull(pair.a, rail);
  });
  const RailId best = pair.a.best_rail();
  const RailId last = best == 0 ? 1 : 0;
  ASSERT_EQ(pair.a.state(0), RailState::suspect);
  ASSERT_EQ(pair.a.state(1), RailState::suspect);
  pair.a.rail_failed(best, 1, RailCause::socket_error, pair.now);
  EXPECT_EQ(pair.a.best_rail(), last);
  pair.post(pair.a, bytes_of(64, 2));
  EXPECT_FALSE(pair.pull(pair.a, last, FrameType::data).empty());
}

TEST(LinkDeadlines, AnIdleRailThatDiedIsFoundByItsProbe) {
  LinkPair pair(2);
  pass_with_rail_1(pair, 190 * ns_per_ms);
  EXPECT_TRUE(pair.pull(pair.a, 0).empty());
  pass_with_rail_1(pair, 20 * ns_per_ms);
  ASSERT_EQ(pair.pull(pair.a, 0, FrameType::ping).size(), 1U);
  pass_with_rail_1(pair, 230 * ns_per_ms);
  EXPECT_EQ(pair.a.state(0), RailState::down);
}

TEST(LinkDeadlines, APeerThatFallsAsleepBetweenTwoAnswersCostsNoRail) {
  LinkPair pair(2);
  std::array<std::vector<Frame>, 2> unread;
  const auto take = [&](RailId rail) {
    for (Frame& frame : pair.pull(pair.a, rail)) unread.at(rail).push_back(std::move(frame));
    pair.acknowledge(pair.a, rail);  // by the peer's kernel
  };
  // Both rails are probed, and a single rail is answered before the peer falls asleep.
  pair.pass(205 * ns_per_ms, [&] {
    pair.exchange(1);
    take(0);
  });
  ASSERT_FALSE(unread[0].empty());
  pair.pass(60'000 * ns_per_ms, [&] {
    take(0);
    take(1);
  });
  EXPECT_EQ(pair.a.state(0), RailState::up);
  // The peer wakes up and answers on rail 1 some milliseconds before rail 0.
  pair.deliver(pair.b, 1, unread[1]);
  pair.pass(8 * ns_per_ms, [&] {
    pair.exchange(1);
    take(0);
  });
  EXPECT_EQ(pair.a.state(0), RailState::up);
  pair.deliver(pair.b, 0, unread[0]);
  pair.pass(300 * ns_per_ms, [&] {
    pair.exchange(0);
    pair.exchange(1);
  });
  EXPECT_EQ(pair.a.state(0), RailState::up);
}

TEST(LinkDeadlines, ARailAckedByTheKernelButNotByThePeerGoesDown) {
  LinkPair pair(2);
  pair.pass(700 * ns_per_ms, [&] {
    pair.exchange(1);
    (void)pair.pull(pair.a, 0);
    pair.acknowledge(pair.a, 0);
  });
  EXPECT_EQ(pair.a.state(0), RailState::down);
}

TEST(LinkDeadlines, WithoutResilienceNothingIsProbedOrHedged) {
  LinkOptions options = LinkPair::default_options();
  options.shape.resilience = false;
  LinkPair pair(2, options);
  pair.post(pair.a, bytes_of(100, 1));
  (void)pair.pull(pair.a, 0);
  pair.pass(3000 * ns_per_ms);
  EXPECT_EQ(pair.a.state(0), RailState::up);
  EXPECT_TRUE(pair.pull(pair.a, 0).empty());
  EXPECT_TRUE(pair.pull(pair.a, 1).empty());
  EXPECT_FALSE(pair.a.lost_bytes());
  pair.a.rail_failed(0, 1, RailCause::socket_error, pair.now);
  EXPECT_TRUE(pair.a.lost_bytes());
}

// ---- rejoin ----

void take_down(LinkPair& pair, Epoch epoch) {
  for (Link* end : {&pair.a, &pair.b}) {
    end->rail_failed(0, epoch, RailCause::carrier_loss, pair.now);
    pair.close_rails(*end);
  }
  for (Link* end : {&pair.a, &pair.b}) end->peer_fenced(0, epoch, pair.now);
}

TimeNs next_connect(LinkPair& pair) {
  const auto actions = std::exchange(pair.a.actions(), {});
  EXPECT_EQ(actions.size(), 1U);
  if (actions.empty()) return 0;
  EXPECT_EQ(actions.back().kind, LinkAction::Kind::connect);
  EXPECT_TRUE(pair.b.actions().empty());  // the lower process accepts
  return actions.back().at - pair.now;
}

TEST(LinkDeadlines, ReconnectionsBackOffUpToTheLimit) {
  LinkOptions options = LinkPair::default_options();
  options.rejoin_backoff_min_ns = 10 * ns_per_ms;
  options.rejoin_backoff_max_ns = 100 * ns_per_ms;
  LinkPair pair(2, options);
  take_down(pair, 1);
  TimeNs expected = 10 * ns_per_ms;
  for (int attempt = 0; attempt < 50; ++attempt) {
    const TimeNs delay = next_connect(pair);
    EXPECT_GE(delay, expected * 3 / 4);
    EXPECT_LE(delay, expected * 5 / 4);
    expected = std::min(2 * expected, options.rejoin_backoff_max_ns);
    pair.a.connect_failed(0, pair.now);
  }
}

TEST(LinkDeadlines, BackOffAndDampingCanBeSetToZero) {
  LinkOptions options = LinkPair::default_options();
  options.rejoin_backoff_min_ns = 0;
  options.flap_half_life_s = 0;
  LinkPair pair(2, options);
  for (Epoch epoch = 1; epoch < 50; ++epoch) {
    take_down(pair, epoch);
    EXPECT_EQ(next_connect(pair), 0);
    pair.a.connect_failed(0, pair.now);
    EXPECT_EQ(next_connect(pair), 0);
    pair.open(0, epoch + 1);
  }
}

TEST(LinkDeadlines, AFlappingRailIsDampedAndForgiven) {
  LinkOptions options = LinkPair::default_options();
  options.rejoin_backoff_min_ns = 10 * ns_per_ms;
  options.flap_half_life_s = 1.0;
  LinkPair pair(2, options);
  Epoch epoch = 1;
  TimeNs delay = 0;
  for (; epoch <= 6; ++epoch) {
    take_down(pair, epoch);
    delay = next_connect(pair);
    pair.open(0, epoch + 1);
  }
  EXPECT_GE(delay, 10 * ns_per_ms * 24);  // 2^5, less the jitter
  pair.now += 20'000 * ns_per_ms;
  take_down(pair, epoch);
  EXPECT_LE(next_connect(pair), 10 * ns_per_ms * 5 / 4 + ns_per_ms);
}

TEST(LinkDeadlines, ARailOnProbationIsNotUpBeforeItsFullSizeProbeIsAnswered) {
  LinkPair pair(2);
  take_down(pair, 1);
  pair.a.actions().clear();
  ASSERT_TRUE(pair.b.rail_established(0, 2, pair.now));
  ASSERT_TRUE(pair.a.rail_established(0, 2, pair.now));
  const auto probes = pair.pull(pair.a, 0);
  ASSERT_EQ(probes.size(), 1U);
  EXPECT_EQ(probes[0].header.type, FrameType::ping);
  EXPECT_EQ(probes[0].header.payload_bytes, max_probe_bytes);
  // A rail on probation carries no data. A small answer to another probe does not end the
  // probation.
  pair.post(pair.a, bytes_of(384, 1));
  EXPECT_TRUE(pair.pull(pair.a, 0).empty());
  pass_with_rail_1(pair, 2900 * ns_per_ms);
  EXPECT_EQ(pair.a.state(0), RailState::probation);
  pass_with_rail_1(pair, 200 * ns_per_ms);
  EXPECT_EQ(pair.a.state(0), RailState::down);
  EXPECT_EQ(pair.a.cause(0), RailCause::probation);
}

// Ranks that start on few cores answer late.
TEST(LinkDeadlines, AFirstStartHasMoreTimeAfterEachLateProbation) {
  LinkOptions options = LinkPair::default_options();
  options.connects = true;
  Link link(options, std::array{RailKind::tcp, RailKind::tcp}, 1);
  TimeNs now = 1;
  link.start(now);
  std::vector<TimeNs> limits;
  for (Epoch epoch = 1; epoch <= 7; ++epoch) {  // the peer's kernel has each probe
    ASSERT_TRUE(link.rail_established(0, epoch, now));
    const TimeNs began = now;
    OutFrame probe;
    EXPECT_TRUE(link.next_frame(0, probe, now));
    link.path_acked(0, epoch, link.counters(0).tx_bytes / epoch, false, now);
    while (link.state(0) == RailState::probation) link.tick(now += 10 * ns_per_ms);
    limits.push_back((now - began) / options.probation_timeout_ns);
    EXPECT_EQ(link.wants_location(0), epoch >= 3);
    link.rail_closed(0, epoch, now);
    link.peer_fenced(0, epoch, now);
  }
  EXPECT_EQ(limits, (std::vector<TimeNs>{1, 2, 4, 8, 16, 16, 16}));
  link.handshake_late(1);
  EXPECT_EQ(link.patience(1, 100), 200);
}

// Nothing arrives, so the peer is not late: a new connection is needed soon.
TEST(LinkDeadlines, ALostProbeGetsNoMoreTime) {
  LinkPair pair(2);
  take_down(pair, 1);
  ASSERT_TRUE(pair.a.rail_established(0, 2, pair.now));
  ASSERT_EQ(pair.pull(pair.a, 0, FrameType::ping).size(), 1U);
  pass_with_rail_1(pair, 3100 * ns_per_ms);
  ASSERT_EQ(pair.a.cause(0), RailCause::probation);
  EXPECT_EQ(pair.a.patience(0, 100), 100);
}

TEST(LinkDeadlines, APauseOfOurOwnDoesNotEndAProbation) {
  LinkPair pair(2);
  take_down(pair, 1);
  ASSERT_TRUE(pair.a.rail_established(0, 2, pair.now));
  pair.now += 60'000 * ns_per_ms;
  pair.a.tick(pair.now);
  EXPECT_EQ(pair.a.state(0), RailState::probation);
}

// A peer whose fences do not complete refuses every connection, answers on no rail, and cannot say
// which of its rails are down.
TEST(LinkDeadlines, RefusalsOfConnectionsBlameARailWithoutAnswers) {
  for (const bool refuses : {true, false}) {
    LinkPair pair(2);
    pair.a.rail_failed(0, pair.a.epoch(0), RailCause::socket_error, pair.now);
    pair.close_rails(pair.a);
    pair.post(pair.a, bytes_of(100, 1));
    int passed_ms = 0;
    pair.pass(3000 * ns_per_ms, [&] {
      (void)pair.pull(pair.a, 1);
      pair.acknowledge(pair.a, 1);
      if (++passed_ms % 60 != 0) return;
      if (refuses) pair.a.connect_refused(0, 0, pair.now);
      pair.a.connect_failed(0, pair.now);
    });
    EXPECT_EQ(pair.a.cause(1), refuses ? RailCause::dead_deadline : RailCause::none);
  }
}

}  // namespace
}  // namespace r2ccl
