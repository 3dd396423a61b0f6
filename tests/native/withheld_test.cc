// A hop (proxy, offload engine) acknowledges bytes that the peer does not get.  The path looks
// healthy, so only the peer's own answer shows that bytes are missing.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "link/link.hpp"
#include "link_pair.hpp"

namespace r2ccl {
namespace {

using testing::bytes_of;
using testing::Frame;
using testing::LinkPair;

// Lets time pass while the path of rail 0 acknowledges all frames of `a`, and delivers nothing.
void pass_with_hop(LinkPair& pair, TimeNs time) {
  pair.pass(time, [&] {
    (void)pair.pull(pair.a, 0);
    pair.acknowledge(pair.a, 0);
    pair.exchange(1);
  });
}

TEST(Withheld, BytesThatAHopWithholdsAreSentAgainElsewhere) {
  LinkPair pair(2);
  pair.post(pair.a, bytes_of(300, 1));
  pass_with_hop(pair, 30 * ns_per_ms);
  EXPECT_EQ(pair.a.state(0), RailState::suspect);
  EXPECT_EQ(pair.out(pair.a).delivered(), 1U);
  EXPECT_GE(pair.a.counters(0).hedged_chunks, 1U);
  EXPECT_EQ(pair.a.counters(0).withheld_chunks, 3U);
}

TEST(Withheld, AHedgeOfASilentRailIsNotCountedAsWithheld) {
  LinkPair pair(2);
  pair.post(pair.a, bytes_of(300, 1));
  pair.pass(30 * ns_per_ms, [&] {
    (void)pair.pull(pair.a, 0);
    pair.exchange(1);
  });
  EXPECT_GE(pair.a.counters(0).hedged_chunks, 1U);
  EXPECT_EQ(pair.a.counters(0).withheld_chunks, 0U);
}

TEST(Withheld, TheNextMessagesAvoidTheRail) {
  LinkPair pair(2);
  pair.post(pair.a, bytes_of(64, 1));
  pass_with_hop(pair, 30 * ns_per_ms);
  ASSERT_EQ(pair.a.state(0), RailState::suspect);
  (void)pair.b.consume(pair.in(pair.b), pair.now);
  pair.post(pair.a, bytes_of(64, 2));
  pass_with_hop(pair, 6 * ns_per_ms);
  EXPECT_EQ(pair.out(pair.a).delivered(), 2U);
}

TEST(Withheld, AnAnsweredProbeEndsTheSuspicion) {
  LinkPair pair(2);
  pair.post(pair.a, bytes_of(64, 1));
  pass_with_hop(pair, 40 * ns_per_ms);  // with path acks meanwhile
  ASSERT_EQ(pair.a.state(0), RailState::suspect);
  pair.pass(450 * ns_per_ms, [&] {
    pair.exchange(0);
    pair.exchange(1);
  });
  EXPECT_EQ(pair.a.state(0), RailState::up);
}

TEST(Withheld, ARailWithoutAnAnswerGoesDown) {
  LinkPair pair(2);
  pair.post(pair.a, bytes_of(64, 1));
  pass_with_hop(pair, 30 * ns_per_ms);
  ASSERT_EQ(pair.a.state(0), RailState::suspect);
  pass_with_hop(pair, 400 * ns_per_ms);
  EXPECT_EQ(pair.a.state(0), RailState::down);
  EXPECT_EQ(pair.a.cause(0), RailCause::dead_deadline);
}

// Bytes acknowledged after the request may have arrived after the answer.
TEST(Withheld, AnAnswerToAnEarlierRequestProvesNothing) {
  LinkPair pair(2);
  pair.post(pair.a, bytes_of(64, 1));
  (void)pair.pull(pair.a, 0);
  std::vector<Frame> answers;
  pair.pass(22 * ns_per_ms, [&] {
    pair.deliver(pair.b, 1, pair.pull(pair.a, 1));
    pair.acknowledge(pair.a, 1);
    for (Frame& frame : pair.pull(pair.b, 1)) answers.push_back(std::move(frame));
    pair.acknowledge(pair.b, 1);
    pair.a.path_advanced(0, 1, pair.now);  // the path is slow, not silent
  });
  ASSERT_FALSE(answers.empty());
  pair.acknowledge(pair.a, 0);
  pair.deliver(pair.a, 1, answers);
  pair.pass(10 * ns_per_ms, [&] { pair.exchange(1); });
  EXPECT_EQ(pair.a.state(0), RailState::up);
  EXPECT_EQ(pair.a.counters(0).hedged_chunks, 0U);
}

// A peer short of CPU time answers late, but reads what has arrived before it answers.
TEST(Withheld, ALateReaderCostsNothing) {
  LinkPair pair(2);
  pair.post(pair.a, bytes_of(64, 1));
  const std::vector<Frame> unread = pair.pull(pair.a, 0);
  pair.acknowledge(pair.a, 0);  // by the peer's kernel
  std::vector<Frame> requests;
  pair.pass(300 * ns_per_ms, [&] {
    for (Frame& frame : pair.pull(pair.a, 1)) requests.push_back(std::move(frame));
    pair.acknowledge(pair.a, 1);
  });
  std::erase_if(requests, [](const Frame& f) { return f.header.type != FrameType::ack_request; });
  ASSERT_FALSE(requests.empty());
  (void)pair.b.take_probed();
  pair.deliver(pair.b, 1, requests);
  EXPECT_TRUE(pair.b.take_probed());  // so the owner reads all rails before the answer leaves
  pair.deliver(pair.b, 0, unread);
  pass_with_hop(pair, 20 * ns_per_ms);
  EXPECT_EQ(pair.out(pair.a).delivered(), 1U);
  EXPECT_EQ(pair.a.state(0), RailState::up);
  EXPECT_EQ(pair.a.counters(0).hedged_chunks, 0U);
}

// Late data of a closed communicator is dropped.
TEST(Withheld, AClosedCommunicatorIsNoEvidence) {
  LinkPair pair(2);
  pair.b.close_streams(LinkPair::communicator);
  pair.post(pair.a, bytes_of(64, 1));
  pass_with_hop(pair, 150 * ns_per_ms);
  EXPECT_EQ(pair.a.state(0), RailState::up);
  EXPECT_EQ(pair.a.counters(0).hedged_chunks, 0U);
}

// Rail 1 has delivered the second message, but the peer counts it only after the first.
TEST(Withheld, ACompleteMessageBehindAMissingOneAccusesNoRail) {
  LinkPair pair(3);
  pair.post(pair.a, bytes_of(64, 1));
  ASSERT_EQ(pair.pull(pair.a, 0, FrameType::data).size(), 1U);
  pair.acknowledge(pair.a, 0);
  pair.post(pair.a, bytes_of(300, 2));
  const auto large = pair.pull(pair.a, 1, FrameType::data);
  ASSERT_EQ(large.size(), 3U);
  pair.deliver(pair.b, 1, large);
  pair.acknowledge(pair.a, 1);
  pair.pass(60 * ns_per_ms, [&] {
    for (const RailId rail : {RailId{0}, RailId{1}}) {  // no answers over rail 1 either
      (void)pair.pull(pair.a, rail);
      pair.acknowledge(pair.a, rail);
    }
    pair.exchange(2);
  });
  EXPECT_EQ(pair.a.state(0), RailState::suspect);
  EXPECT_EQ(pair.a.state(1), RailState::up);
}

// A message sent again after the loss of a rail is as good a witness as any other.
TEST(Withheld, AReplayedMessageAccusesItsNewRail) {
  LinkPair pair(3);
  pair.post(pair.a, bytes_of(64, 1));
  (void)pair.pull(pair.a, 0);
  pair.a.rail_failed(0, 1, RailCause::carrier_loss, pair.now);
  const RailId next = pair.a.best_rail();
  ASSERT_EQ(pair.pull(pair.a, next, FrameType::data).size(), 1U);
  pair.acknowledge(pair.a, next);
  pair.pass(60 * ns_per_ms, [&] {
    pair.close_rails(pair.a);  // fences rail 0
    pair.close_rails(pair.b);
    (void)pair.pull(pair.a, next);
    pair.acknowledge(pair.a, next);
    pair.exchange(next == 1 ? 2 : 1);
  });
  EXPECT_EQ(pair.a.state(next), RailState::suspect);
  EXPECT_EQ(pair.out(pair.a).delivered(), 1U);
}

// A sender that stopped between the reads of two rails looks again before it judges.
TEST(Withheld, ASingleLateLookSuspectsNoRail) {
  LinkPair pair(2);
  pair.post(pair.a, bytes_of(64, 1));
  for (int step = 0; step < 30 && pair.a.state(0) == RailState::up; ++step) {
    pair.now += ns_per_ms;
    (void)pair.pull(pair.a, 0);
    pair.acknowledge(pair.a, 0);
    pair.exchange(1);
    if (step == 20) pair.now += 50 * ns_per_ms;  // after the first answers
    pair.a.tick(pair.now);
    pair.b.tick(pair.now);
    if (step == 20) break;
  }
  EXPECT_EQ(pair.a.state(0), RailState::up);
}

// Acks of received data avoid the rail, since the hop would withhold them.
TEST(Withheld, AcksAvoidTheRail) {
  LinkPair pair(2);
  pair.post(pair.a, bytes_of(64, 1));
  pass_with_hop(pair, 30 * ns_per_ms);
  ASSERT_EQ(pair.a.state(0), RailState::suspect);
  pair.post(pair.b, bytes_of(300, 2));
  const auto data = pair.pull(pair.b, 0, FrameType::data);
  ASSERT_EQ(data.size(), 3U);
  pair.deliver(pair.a, 0, data);
  pass_with_hop(pair, 10 * ns_per_ms);
  EXPECT_EQ(pair.out(pair.b).delivered(), 1U);
}

// The message lacks a chunk of rail 0.  Rail 1 has delivered, but the peer stops between its
// answers on rail 2 and rail 1.
TEST(Withheld, APeerThatStopsBetweenTwoAnswersCostsNoRail) {
  LinkPair pair(3);
  pair.post(pair.a, bytes_of(300, 1));
  (void)pair.pull_one(pair.a, 0);
  pair.acknowledge(pair.a, 0);
  ASSERT_EQ(pair.out(pair.a).message(0).next_chunk, 1U);
  pair.exchange(1);
  std::vector<Frame> unsent;
  pair.pass(100 * ns_per_ms, [&] {
    (void)pair.pull(pair.a, 0);
    pair.acknowledge(pair.a, 0);
    pair.deliver(pair.b, 1, pair.pull(pair.a, 1));
    pair.acknowledge(pair.a, 1);
    if (!unsent.empty()) {  // the peer has stopped; its kernel acknowledges
      (void)pair.pull(pair.a, 2);
      pair.acknowledge(pair.a, 2);
      return;
    }
    pair.deliver(pair.b, 2, pair.pull(pair.a, 2));
    pair.acknowledge(pair.a, 2);
    pair.now += ns_per_ms / 2;
    pair.deliver(pair.a, 2, pair.pull(pair.b, 2));
    pair.acknowledge(pair.b, 2);
    unsent = pair.pull(pair.b, 1, FrameType::pong);
  });
  ASSERT_FALSE(unsent.empty());
  EXPECT_EQ(pair.a.state(1), RailState::up);
}

TEST(Withheld, AnAnswerOverTheRailItselfIsNoEvidence) {
  LinkPair pair(1);
  pair.post(pair.a, bytes_of(64, 1));
  (void)pair.pull(pair.a, 0);  // lost
  pair.acknowledge(pair.a, 0);
  pair.pass(60 * ns_per_ms, [&] {
    pair.deliver(pair.b, 0, pair.pull(pair.a, 0));
    pair.acknowledge(pair.a, 0);
    pair.deliver(pair.a, 0, pair.pull(pair.b, 0, FrameType::ack));  // without pongs
    pair.acknowledge(pair.b, 0);
  });
  EXPECT_EQ(pair.a.state(0), RailState::up);
}

TEST(Withheld, AnAnswerToARequestNeverMadeIsAProtocolError) {
  LinkPair pair(1);
  pair.post(pair.a, bytes_of(64, 1));
  pair.deliver(pair.b, 0, pair.pull(pair.a, 0));
  pair.pass(5 * ns_per_ms);
  std::vector<Frame> acks = pair.pull(pair.b, 0, FrameType::ack);
  ASSERT_EQ(acks.size(), 1U);
  EXPECT_EQ(acks[0].header.number, 0U);
  for (const std::uint64_t number : {std::uint64_t{1}, ~std::uint64_t{0}}) {
    LinkPair other(1);
    acks[0].header.number = number;
    acks[0].header.delivered = acks[0].header.credit = 0;
    seal(acks[0].header);
    (void)other.out(other.a);
    EXPECT_TRUE(other.deliver(other.a, 0, acks[0]));
    EXPECT_EQ(other.a.cause(0), RailCause::protocol);
  }
}

}  // namespace
}  // namespace r2ccl
