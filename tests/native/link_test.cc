// Protocol rules of the link state machine, one rule per test.
#include "link/link.hpp"

#include <gtest/gtest.h>

#include "link_pair.hpp"

namespace r2ccl {
namespace {

using testing::bytes_of;
using testing::Frame;
using testing::LinkPair;

std::vector<std::uint64_t> numbers_of(const std::vector<Frame>& frames) {
  std::vector<std::uint64_t> numbers;
  for (const Frame& frame : frames) numbers.push_back(frame.header.number);
  return numbers;
}

std::vector<std::byte> front_bytes(const InStream& stream) {
  const InMessage* message = stream.front();
  if (message == nullptr) return {};
  return {stream.front_data(), stream.front_data() + message->bytes};
}

// ---- replay ----

TEST(Link, OnlyUndeliveredChunksOfADownRailAreReplayed) {
  LinkOptions options = LinkPair::default_options();
  options.shape.slots = 4;
  LinkPair pair(2, options);
  const auto data = bytes_of(100, 1);
  for (int i = 0; i < 3; ++i) pair.post(pair.a, data);
  const auto sent = pair.pull(pair.a, 0, FrameType::data);
  ASSERT_EQ(numbers_of(sent), (std::vector<std::uint64_t>{0, 1, 2}));
  // The delivery ack of message 0 arrives. The path acknowledges all 3 messages, which is no proof
  // of delivery: the peer may not have read the bytes.
  pair.deliver(pair.b, 0, sent[0]);
  pair.pass(10 * ns_per_ms, [&] {
    pair.deliver(pair.a, 0, pair.pull(pair.b, 0));
    pair.acknowledge(pair.a, 0);
  });
  ASSERT_EQ(pair.out(pair.a).delivered(), 1U);
  ASSERT_TRUE(pair.pull(pair.a, 1, FrameType::data).empty());

  pair.a.rail_failed(0, 1, RailCause::carrier_loss, pair.now);
  const auto replayed = pair.pull(pair.a, 1, FrameType::data);
  EXPECT_EQ(numbers_of(replayed), (std::vector<std::uint64_t>{1, 2}));
  for (const Frame& frame : replayed) {
    EXPECT_EQ(frame.header.flags & frame_flag::replay, frame_flag::replay);
    EXPECT_EQ(frame.payload, data);
    const auto& first = sent[frame.header.number].header;
    EXPECT_EQ(frame.header.slot, first.slot);
  }
  EXPECT_EQ(pair.a.counters(0).replayed_chunks, 2U);
  pair.deliver(pair.b, 1, replayed);
  EXPECT_EQ(pair.in(pair.b).delivered(), 3U);
}

TEST(Link, AReplayIsReplayedAgainWhenItsRailDies) {
  LinkPair pair(3);
  pair.post(pair.a, bytes_of(64, 1));
  ASSERT_EQ(pair.pull(pair.a, 0, FrameType::data).size(), 1U);
  pair.a.rail_failed(0, 1, RailCause::carrier_loss, pair.now);
  ASSERT_EQ(pair.pull(pair.a, 1, FrameType::data).size(), 1U);
  pair.a.rail_failed(1, 1, RailCause::carrier_loss, pair.now);
  EXPECT_EQ(pair.pull(pair.a, 2, FrameType::data).size(), 1U);
}

TEST(Link, ReplayWaitsForTheOnlyRailToRejoin) {
  LinkPair pair(1);
  const auto data = bytes_of(300, 1);
  pair.post(pair.a, data);
  ASSERT_EQ(pair.pull(pair.a, 0, FrameType::data).size(), 3U);
  for (Link* end : {&pair.a, &pair.b}) {
    end->rail_failed(0, 1, RailCause::carrier_loss, pair.now);
    pair.close_rails(*end);
    EXPECT_TRUE(end->has_no_rail());
  }
  for (Link* end : {&pair.a, &pair.b}) end->peer_fenced(0, 1, pair.now);
  pair.open(0, 2);
  EXPECT_FALSE(pair.a.has_no_rail());
  EXPECT_EQ(front_bytes(pair.in(pair.b)), data);
}

// ---- three signals ----

TEST(Link, OnlyTheDeliveryAckSettlesAMessage) {
  LinkPair pair(1);
  const auto data = bytes_of(300, 1);  // larger than staging_bytes: sent from the caller's buffer
  pair.post(pair.a, data);
  const auto sent = pair.pull(pair.a, 0);
  pair.acknowledge(pair.a, 0);
  EXPECT_EQ(pair.out(pair.a).settled_position(), 0U);
  pair.deliver(pair.b, 0, sent);
  pair.deliver(pair.a, 0, pair.pull(pair.b, 0));
  EXPECT_EQ(pair.out(pair.a).settled_position(), 300U);
  EXPECT_EQ(pair.out(pair.a).credit(), 0U);
}

TEST(Link, AStagedMessageIsSettledAtOnceAndReplayedFromItsCopy) {
  LinkPair pair(2);
  auto data = bytes_of(128, 1);
  const auto original = data;
  pair.post(pair.a, data);
  EXPECT_EQ(pair.out(pair.a).settled_position(), 128U);
  (void)pair.pull(pair.a, 0);
  std::fill(data.begin(), data.end(), std::byte{0});
  pair.a.rail_failed(0, 1, RailCause::carrier_loss, pair.now);
  const auto replayed = pair.pull(pair.a, 1, FrameType::data);
  ASSERT_EQ(replayed.size(), 1U);
  EXPECT_EQ(replayed[0].payload, original);
}

TEST(Link, AMessageWaitsForCredit) {
  LinkPair pair(1);
  const auto data = bytes_of(64, 1);
  for (int i = 0; i < 3; ++i) pair.post(pair.a, data);
  const auto sent = pair.pull(pair.a, 0, FrameType::data);
  ASSERT_EQ(numbers_of(sent), (std::vector<std::uint64_t>{0, 1}));
  pair.deliver(pair.b, 0, sent);
  // The messages are delivered but not consumed, so both slots stay full.
  pair.pass(30 * ns_per_ms, [&] { pair.exchange(0); });
  ASSERT_EQ(pair.out(pair.a).delivered(), 2U);
  EXPECT_EQ(pair.in(pair.b).delivered(), 2U);
  pair.b.consume(pair.in(pair.b), pair.now);
  pair.pass(10 * ns_per_ms, [&] { pair.exchange(0); });
  EXPECT_EQ(pair.in(pair.b).delivered(), 3U);
}

TEST(Link, AnAckTravelsWithDataOfTheOtherDirection) {
  LinkPair pair(1);
  pair.post(pair.a, bytes_of(64, 1));
  pair.deliver(pair.b, 0, pair.pull(pair.a, 0));
  pair.post(pair.b, bytes_of(64, 2));
  const auto answer = pair.pull(pair.b, 0);
  ASSERT_EQ(answer.size(), 1U);
  pair.deliver(pair.a, 0, answer);
  EXPECT_EQ(pair.out(pair.a).delivered(), 1U);
  pair.now += 100 * ns_per_ms;
  pair.b.tick(pair.now);
  EXPECT_TRUE(pair.pull(pair.b, 0, FrameType::ack).empty());
}

TEST(Link, ALostAckIsRepeatedOnAnotherRail) {
  LinkPair pair(2);
  pair.post(pair.a, bytes_of(300, 1));
  for (const RailId rail : {RailId{0}, RailId{1}})
    pair.deliver(pair.b, rail, pair.pull(pair.a, rail));
  for (const RailId rail : {RailId{0}, RailId{1}}) {
    const auto lost = pair.pull(pair.b, rail, FrameType::ack);
    pair.acknowledge(pair.b, rail);
    pair.acknowledge(pair.a, rail);
  }
  ASSERT_EQ(pair.out(pair.a).delivered(), 0U);
  ASSERT_FALSE(pair.in(pair.b).owes_ack());
  pair.pass(25 * ns_per_ms);
  const auto requests = pair.pull(pair.a, 1, FrameType::ack_request);
  ASSERT_EQ(requests.size(), 1U);
  pair.deliver(pair.b, 1, requests);
  pair.deliver(pair.a, 1, pair.pull(pair.b, 1));
  EXPECT_EQ(pair.out(pair.a).delivered(), 1U);
}

TEST(Link, AcksThatUsuallyTakeLongAreRequestedLater) {
  LinkPair pair(1);
  // Returns the number of requests while an ack takes 100 ms.
  const auto requests_of_a_message = [&pair] {
    std::size_t requests = 0;
    pair.post(pair.a, bytes_of(64, 1));
    pair.deliver(pair.b, 0, pair.pull(pair.a, 0));
    pair.acknowledge(pair.a, 0);
    for (int step = 0; step < 20; ++step) {
      pair.now += 5 * ns_per_ms;
      pair.a.tick(pair.now);
      requests += pair.pull(pair.a, 0, FrameType::ack_request).size();
      pair.acknowledge(pair.a, 0);
    }
    pair.b.tick(pair.now);
    pair.deliver(pair.a, 0, pair.pull(pair.b, 0));
    pair.acknowledge(pair.b, 0);
    (void)pair.b.consume(pair.in(pair.b), pair.now);
    return requests;
  };
  EXPECT_GE(requests_of_a_message(), 2U);
  for (int message = 0; message < 20; ++message) requests_of_a_message();
  EXPECT_EQ(requests_of_a_message(), 0U);
}

TEST(Link, AcksOfALostRailAreSentAgain) {
  LinkPair pair(2);
  pair.post(pair.a, bytes_of(100, 1));
  pair.deliver(pair.b, 0, pair.pull(pair.a, 0));
  pair.pass(5 * ns_per_ms);
  ASSERT_EQ(pair.pull(pair.b, 0, FrameType::ack).size(), 1U);  // lost with rail 0
  pair.b.rail_failed(0, 1, RailCause::carrier_loss, pair.now);
  pair.pass(1 * ns_per_ms);
  const auto repeated = pair.pull(pair.b, 1, FrameType::ack);
  ASSERT_EQ(repeated.size(), 1U);
  EXPECT_EQ(repeated[0].header.delivered, 1U);
}

// ---- slots and fences ----

// Passes 30 ms in which rail 1 works but loses RAIL_DOWN frames. The epoch of rail 0 stays
// unfenced.
void pass_unfenced(LinkPair& pair) {
  pair.pass(30 * ns_per_ms, [&] {
    auto frames = pair.pull(pair.a, 1);
    std::erase_if(frames,
                  [](const Frame& frame) { return frame.header.type == FrameType::rail_down; });
    pair.deliver(pair.b, 1, frames);
    pair.deliver(pair.a, 1, pair.pull(pair.b, 1));
    for (Link* end : {&pair.a, &pair.b}) pair.acknowledge(*end, 1);
  });
}

// Delivers message 0 by a replay on rail 1, while its first attempt on rail 0 stays unresolved.
void leave_an_attempt_open(LinkPair& pair, const std::vector<std::byte>& data) {
  pair.post(pair.a, data);
  ASSERT_EQ(pair.pull(pair.a, 0, FrameType::data).size(), 1U);
  pair.a.rail_failed(0, 1, RailCause::carrier_loss, pair.now);
  pair.close_rails(pair.a);
  pass_unfenced(pair);
  ASSERT_NE(pair.in(pair.b).front(), nullptr);
  pair.b.consume(pair.in(pair.b), pair.now);
  pass_unfenced(pair);
  ASSERT_EQ(pair.out(pair.a).delivered(), 1U);
}

TEST(Link, ASlotThatAnUnfencedEpochMayWriteIsNotReused) {
  LinkPair pair(2);
  const auto data = bytes_of(100, 1);
  leave_an_attempt_open(pair, data);
  const auto slot_of_next = [&]() -> int {
    pair.post(pair.a, data);
    const auto sent = pair.pull(pair.a, 1, FrameType::data);
    EXPECT_EQ(sent.size(), 1U);
    if (sent.empty()) return -1;
    pair.deliver(pair.b, 1, sent);
    pair.b.consume(pair.in(pair.b), pair.now);
    pass_unfenced(pair);
    return sent[0].header.slot;
  };
  EXPECT_EQ(slot_of_next(), 1);
  EXPECT_EQ(slot_of_next(), 2);  // the spare slot, because slot 0 is quarantined
  EXPECT_EQ(slot_of_next(), 1);
  pair.a.peer_fenced(0, 1, pair.now);
  EXPECT_EQ(slot_of_next(), 0);
}

TEST(Link, WithoutASpareSlotTheSenderWaitsForTheFence) {
  LinkOptions options = LinkPair::default_options();
  options.shape.slots = 1;
  options.shape.spare_slots = 0;
  LinkPair pair(2, options);
  const auto data = bytes_of(100, 1);
  leave_an_attempt_open(pair, data);
  pair.post(pair.a, data);
  EXPECT_EQ(pair.out(pair.a).credit(), 1U);
  EXPECT_TRUE(pair.out(pair.a).quarantined());
  EXPECT_TRUE(pair.pull(pair.a, 1, FrameType::data).empty());
  pair.a.peer_fenced(0, 1, pair.now);
  EXPECT_FALSE(pair.out(pair.a).quarantined());
  EXPECT_EQ(pair.pull(pair.a, 1, FrameType::data).size(), 1U);
}

TEST(Link, RailDownIsRepeatedUntilFencedComes) {
  LinkPair pair(2);
  pair.a.rail_failed(0, 1, RailCause::carrier_loss, pair.now);
  pair.close_rails(pair.a);
  EXPECT_EQ(pair.a.state(0), RailState::fencing);
  std::vector<Frame> notices = pair.pull(pair.a, 1, FrameType::rail_down);
  ASSERT_EQ(notices.size(), 1U);
  EXPECT_EQ(notices[0].header.number, 0U);
  EXPECT_EQ(notices[0].header.epoch, 1U);
  for (int lost = 0; lost < 5; ++lost) {
    pair.pass(200 * ns_per_ms, [&] { pair.acknowledge(pair.a, 1); });
    notices = pair.pull(pair.a, 1, FrameType::rail_down);
    ASSERT_EQ(notices.size(), 1U);
  }
  pair.deliver(pair.b, 1, notices);
  EXPECT_EQ(pair.b.state(0), RailState::down);
  EXPECT_EQ(pair.b.cause(0), RailCause::peer_notice);
  EXPECT_TRUE(pair.pull(pair.b, 1, FrameType::fenced).empty());  // B has not closed the rail yet
  pair.close_rails(pair.b);
  const auto fenced = pair.pull(pair.b, 1, FrameType::fenced);
  ASSERT_EQ(fenced.size(), 1U);
  pair.deliver(pair.a, 1, fenced);
  EXPECT_EQ(pair.a.state(0), RailState::connecting);
  pair.pass(500 * ns_per_ms, [&] { pair.acknowledge(pair.a, 1); });
  EXPECT_TRUE(pair.pull(pair.a, 1, FrameType::rail_down).empty());
}

void fail_and_fence(LinkPair& pair, RailId rail, Epoch epoch) {
  for (Link* end : {&pair.a, &pair.b}) {
    end->rail_failed(rail, epoch, RailCause::carrier_loss, pair.now);
    pair.close_rails(*end);
  }
  for (Link* end : {&pair.a, &pair.b}) end->peer_fenced(rail, epoch, pair.now);
}

TEST(Link, AStaleNoticeDoesNotEndTheNewEpoch) {
  LinkPair pair(2);
  fail_and_fence(pair, 0, 1);  // rail 1 is congested and has not sent its notices yet
  pair.open(0, 2);
  pair.exchange(1);
  EXPECT_EQ(pair.a.state(0), RailState::up);
  EXPECT_EQ(pair.b.state(0), RailState::up);
}

TEST(Link, AnOldRailDownIsAnsweredAndDoesNotTouchTheNewEpoch) {
  LinkPair pair(2);
  pair.a.rail_failed(0, 1, RailCause::carrier_loss, pair.now);
  const auto old = pair.pull(pair.a, 1, FrameType::rail_down);
  ASSERT_EQ(old.size(), 1U);
  fail_and_fence(pair, 0, 1);
  pair.open(0, 2);
  pair.exchange(1);
  pair.deliver(pair.b, 1, old);
  EXPECT_EQ(pair.b.state(0), RailState::up);
  const auto fenced = pair.pull(pair.b, 1, FrameType::fenced);
  ASSERT_EQ(fenced.size(), 1U);
  EXPECT_GE(fenced[0].header.epoch, 1U);
  pair.deliver(pair.a, 1, fenced);
  EXPECT_EQ(pair.a.state(0), RailState::up);
}

TEST(Link, AnEpochIsOpenedOnceAndOnlyAfterBothFences) {
  LinkPair pair(2);
  EXPECT_FALSE(pair.a.rail_established(0, 2, pair.now));  // epoch 1 is still open
  pair.a.rail_failed(0, 1, RailCause::carrier_loss, pair.now);
  EXPECT_FALSE(pair.a.rail_established(0, 2, pair.now));  // not closed yet
  pair.close_rails(pair.a);
  EXPECT_FALSE(pair.a.rail_established(0, 2, pair.now));  // the peer has not fenced epoch 1
  pair.a.peer_fenced(0, 1, pair.now);
  EXPECT_FALSE(pair.a.rail_established(0, 1, pair.now));  // an old epoch number
  pair.a.never_opened(0, 2);
  EXPECT_FALSE(pair.a.rail_established(0, 2, pair.now));  // epoch 2 was never opened
  EXPECT_TRUE(pair.a.rail_established(0, 3, pair.now));
}

TEST(Link, AFlappingRailReconnectsMoreSlowlyUnlessNoRailIsLeft) {
  LinkPair pair(2);
  const auto soonest = [&pair] {
    pair.a.actions().clear();
    pair.a.connect_soon(0, pair.now);
    return pair.a.actions().empty() ? -1 : pair.a.actions().front().at - pair.now;
  };
  std::vector<TimeNs> waits;
  for (Epoch epoch = 1; epoch < 6; ++epoch) {
    pair.a.rail_failed(0, epoch, RailCause::carrier_loss, pair.now);
    pair.close_rails(pair.a);
    pair.exchange(1);
    pair.close_rails(pair.b);
    pair.exchange(1);
    pair.now += 10'000 * ns_per_ms;  // the attempt due has failed
    waits.push_back(soonest());
    EXPECT_EQ(soonest(), -1);  // already scheduled
    pair.open(0, epoch + 1);
    pair.now += 10 * ns_per_ms;
  }
  EXPECT_LT(waits.front(), 65 * ns_per_ms);
  EXPECT_GT(waits.back(), 2 * waits.front());
  pair.a.rail_failed(0, 6, RailCause::carrier_loss, pair.now);
  pair.a.rail_failed(1, 1, RailCause::carrier_loss, pair.now);
  pair.close_rails(pair.a);
  EXPECT_EQ(soonest(), 0);
}

TEST(Link, AFenceOfALaterEpochCoversTheOldEpoch) {
  LinkPair pair(2);
  // B offered epoch 2 and saw no confirmation, so B has fenced all epochs up to 2.
  pair.b.rail_failed(0, 1, RailCause::carrier_loss, pair.now);
  pair.close_rails(pair.b);
  pair.b.never_opened(0, 2);
  pair.a.rail_failed(0, 1, RailCause::carrier_loss, pair.now);
  pair.close_rails(pair.a);
  const auto fenced = pair.pull(pair.b, 1, FrameType::fenced);
  ASSERT_EQ(fenced.size(), 1U);
  ASSERT_EQ(fenced[0].header.epoch, 2U);
  pair.deliver(pair.a, 1, fenced);
  EXPECT_EQ(pair.a.state(0), RailState::connecting);
}

TEST(Link, APeersFenceOfTheOpenEpochEndsIt) {
  LinkPair pair(2);
  pair.a.peer_fenced(0, 1, pair.now);
  EXPECT_EQ(pair.a.state(0), RailState::down);
  EXPECT_EQ(pair.a.cause(0), RailCause::peer_notice);
}

// ---- duplicates ----

TEST(Link, ADuplicateNeverReachesASlotThatHoldsALaterMessage) {
  LinkOptions options = LinkPair::default_options();
  options.shape.slots = 1;
  LinkPair pair(2, options);
  pair.post(pair.a, bytes_of(100, 1));
  const auto first = pair.pull(pair.a, 0, FrameType::data);
  ASSERT_EQ(first.size(), 1U);
  // Rail 1 has read half of a copy of the frame when the whole frame arrives on rail 0.
  Frame copy = first[0];
  std::fill(copy.payload.begin(), copy.payload.end(), std::byte{0xEE});
  ASSERT_TRUE(pair.b.frame_begin(1, copy.header, pair.now));
  pair.fill(pair.b, 1, copy, 0, 50);
  pair.deliver(pair.b, 0, first);
  EXPECT_EQ(front_bytes(pair.in(pair.b)), first[0].payload);
  pair.b.consume(pair.in(pair.b), pair.now);
  pair.exchange(0);
  const auto second = bytes_of(100, 2);
  pair.post(pair.a, second);
  pair.exchange(0);
  EXPECT_EQ(front_bytes(pair.in(pair.b)), second);
  pair.fill(pair.b, 1, copy, 50, 100);
  EXPECT_TRUE(pair.deliver(pair.b, 1, copy));
  EXPECT_EQ(front_bytes(pair.in(pair.b)), second);
  EXPECT_EQ(pair.in(pair.b).delivered(), 2U);
}

TEST(Link, AChunkIsCountedOnce) {
  LinkPair pair(2);
  const auto data = bytes_of(300, 1);
  pair.post(pair.a, data);
  const auto sent = pair.pull(pair.a, 0, FrameType::data);
  ASSERT_EQ(sent.size(), 3U);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(pair.deliver(pair.b, 1, sent[0]));
  EXPECT_EQ(pair.in(pair.b).delivered(), 0U);
  pair.deliver(pair.b, 0, sent);
  EXPECT_EQ(pair.in(pair.b).delivered(), 1U);
  EXPECT_EQ(front_bytes(pair.in(pair.b)), data);
}

TEST(Link, AChunkThatArrivesOnTwoRailsAtOnceIsCountedOnce) {
  LinkPair pair(2);
  pair.post(pair.a, bytes_of(300, 1));
  const auto sent = pair.pull(pair.a, 0, FrameType::data);
  ASSERT_EQ(sent.size(), 3U);
  // Both copies begin before the chunk is complete, so the link accepts both.
  for (const RailId rail : {RailId{0}, RailId{1}})
    ASSERT_TRUE(pair.b.frame_begin(rail, sent[0].header, pair.now));
  for (const RailId rail : {RailId{0}, RailId{1}})
    pair.fill(pair.b, rail, sent[0], 0, sent[0].payload.size());
  EXPECT_TRUE(
      // The byte count equals the message size, but chunk 1 is still missing.
      pair.deliver(pair.b, 0, sent[2]));
  EXPECT_EQ(pair.in(pair.b).delivered(), 0U);
  EXPECT_TRUE(pair.deliver(pair.b, 0, sent[1]));
  EXPECT_EQ(pair.in(pair.b).delivered(), 1U);
}

TEST(LinkFallback, TheControlRailCarriesDataOnlyWhileNoDataRailIsUp) {
  LinkPair pair({RailKind::sim, RailKind::control}, LinkPair::default_options());
  const auto data = bytes_of(384, 1);
  pair.post(pair.a, data);
  EXPECT_TRUE(pair.pull(pair.a, 1, FrameType::data).empty());
  pair.exchange(0);
  EXPECT_EQ(pair.in(pair.b).delivered(), 1U);
  pair.a.rail_failed(0, 1, RailCause::carrier_loss, pair.now);
  EXPECT_FALSE(pair.a.has_no_rail());
  EXPECT_FALSE(pair.a.has_data_rail());
  pair.post(pair.a, data);
  pair.exchange(1);
  EXPECT_EQ(pair.in(pair.b).delivered(), 2U);
  pair.close_rails(pair.a);
  pair.close_rails(pair.b);
  pair.exchange(1);
  pair.open(0, 2);
  for (int read = 0; read < 2; ++read) pair.b.consume(pair.in(pair.b), pair.now);
  pair.exchange(0);
  pair.post(pair.a, data);
  EXPECT_TRUE(pair.pull(pair.a, 1, FrameType::data).empty());
  EXPECT_FALSE(pair.pull(pair.a, 0, FrameType::data).empty());
}

TEST(LinkFallback, WithoutFallbackTheControlRailCarriesNoData) {
  LinkOptions options = LinkPair::default_options();
  options.fallback = false;
  LinkPair pair({RailKind::sim, RailKind::control}, options);
  pair.a.rail_failed(0, 1, RailCause::carrier_loss, pair.now);
  EXPECT_TRUE(pair.a.has_no_rail());
  pair.post(pair.a, bytes_of(100, 1));
  EXPECT_TRUE(pair.pull(pair.a, 1, FrameType::data).empty());
}

TEST(LinkFallback, DataQueuedForTheControlRailMovesToARecoveredRail) {
  LinkOptions options = LinkPair::default_options();
  LinkPair pair({RailKind::sim, RailKind::sim, RailKind::control}, options);
  pair.pass(205 * ns_per_ms, [&] {
    pair.exchange(0);
    pair.exchange(2);
  });
  pair.post(pair.a, bytes_of(100, 1));
  ASSERT_EQ(pair.pull(pair.a, 0, FrameType::data).size(), 1U);
  (void)pair.pull(pair.a, 1);  // a probe
  pair.pass(105 * ns_per_ms);  // both rails are silent; the control rail's socket accepts no bytes
  ASSERT_EQ(pair.a.state(0), RailState::suspect);
  ASSERT_EQ(pair.a.state(1), RailState::suspect);
  pair.acknowledge(pair.a, 1);
  ASSERT_EQ(pair.a.state(1), RailState::up);
  pair.a.rail_failed(0, 1, RailCause::carrier_loss, pair.now);
  EXPECT_EQ(pair.pull(pair.a, 1, FrameType::data).size(), 1U);
}

}  // namespace
}  // namespace r2ccl
