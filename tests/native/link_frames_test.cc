// Link reactions to frames no correct peer sends, to ABORT, and to the end of a stream.
#include <gtest/gtest.h>

#include <cstddef>
#include <functional>

#include "link/link.hpp"
#include "link_pair.hpp"

namespace r2ccl {
namespace {

using testing::bytes_of;
using testing::Frame;
using testing::LinkPair;

Frame a_data_frame(LinkPair& pair) {
  pair.post(pair.a, bytes_of(300, 1));
  const auto frames = pair.pull(pair.a, 0, FrameType::data);
  EXPECT_FALSE(frames.empty());
  return frames.at(0);
}

void expect_protocol_failure(LinkPair& pair, const Frame& frame) {
  pair.deliver(pair.b, 0, frame);
  EXPECT_EQ(pair.b.state(0), RailState::down);
  EXPECT_EQ(pair.b.cause(0), RailCause::protocol);
  EXPECT_EQ(pair.b.state(1), RailState::up);
  EXPECT_EQ(pair.in(pair.b).delivered(), 0U);
}

TEST(LinkFrames, AFlippedBitAnywhereInAHeaderFailsTheRail) {
  for (std::size_t bit = 0; bit < 8 * sizeof(FrameHeader); ++bit) {
    SCOPED_TRACE(bit);
    LinkPair pair(2);
    Frame frame = a_data_frame(pair);
    auto* bytes = reinterpret_cast<unsigned char*>(&frame.header);
    bytes[bit / 8] = static_cast<unsigned char>(bytes[bit / 8] ^ (1U << (bit % 8)));
    expect_protocol_failure(pair, frame);
  }
}

struct Forgery {
  const char* what;
  std::function<void(FrameHeader&)> change;
};

TEST(LinkFrames, AnImpossibleFieldFailsTheRailThoughTheChecksumIsRight) {
  const std::vector<Forgery> forgeries{
      {"type 0", [](FrameHeader& h) { h.type = static_cast<FrameType>(0); }},
      {"unknown type without payload",
       [](FrameHeader& h) {
         h.type = static_cast<FrameType>(13);
         h.payload_bytes = 0;
       }},
      {"slots over a rail that writes none",
       [](FrameHeader& h) {
         h.type = FrameType::slots;
         h.payload_bytes = 0;
       }},
      {"released over a rail that writes none",
       [](FrameHeader& h) {
         h.type = FrameType::released;
         h.payload_bytes = 0;
       }},
      {"type beyond the last",
       [](FrameHeader& h) {
         h.type = static_cast<FrameType>(static_cast<unsigned>(last_frame_type) + 1);
         h.payload_bytes = 0;
       }},
      {"an ack with payload", [](FrameHeader& h) { h.type = FrameType::ack; }},
      {"slot beyond the last spare one", [](FrameHeader& h) { h.slot = 3; }},
      {"payload longer than a chunk", [](FrameHeader& h) { h.payload_bytes = 129; }},
      {"payload of 4 GiB", [](FrameHeader& h) { h.payload_bytes = 0xFFFFFFFF; }},
      {"payload shorter than its chunk", [](FrameHeader& h) { h.payload_bytes = 127; }},
      {"offset within a chunk", [](FrameHeader& h) { h.offset = 64; }},
      {"offset behind the message", [](FrameHeader& h) { h.offset = 384; }},
      {"offset near 4 GiB", [](FrameHeader& h) { h.offset = 0xFFFFFF80; }},
      {"message longer than a slot", [](FrameHeader& h) { h.message_bytes = 385; }},
      {"message that has no such chunk", [](FrameHeader& h) { h.message_bytes = 0; }},
      {"message without credit", [](FrameHeader& h) { h.number = 2; }},
      {"delivery of what was never sent", [](FrameHeader& h) { h.delivered = 1; }},
      {"credit for what was not delivered", [](FrameHeader& h) { h.credit = 1; }},
  };
  for (const Forgery& forgery : forgeries) {
    SCOPED_TRACE(forgery.what);
    LinkPair pair(2);
    Frame frame = a_data_frame(pair);
    forgery.change(frame.header);
    seal(frame.header);
    expect_protocol_failure(pair, frame);
  }
}

TEST(LinkFrames, TwoChunksThatDisagreeAboutTheirMessageFailTheRail) {
  const std::vector<Forgery> forgeries{
      {"another size", [](FrameHeader& h) { h.message_bytes = 384; }},
      {"another message in the slot", [](FrameHeader& h) { h.number = 1; }},
      {"another slot for the message", [](FrameHeader& h) { h.slot = 1; }},
  };
  for (const Forgery& forgery : forgeries) {
    SCOPED_TRACE(forgery.what);
    LinkPair pair(2);
    Frame frame = a_data_frame(pair);
    ASSERT_TRUE(pair.deliver(pair.b, 0, frame));
    frame.header.offset = 128;
    forgery.change(frame.header);
    seal(frame.header);
    expect_protocol_failure(pair, frame);
  }
}

TEST(LinkFrames, AnAckOfChunksThatWereNotSentFailsTheRail) {
  LinkPair pair(2);
  pair.post(pair.a, bytes_of(384, 1));
  OutFrame first;
  ASSERT_TRUE(pair.a.next_frame(0, first, pair.now));  // 1 chunk of 3
  Frame ack{{}, {}};
  ack.header.type = FrameType::ack;
  ack.header.communicator = LinkPair::communicator;
  ack.header.delivered = 1;
  seal(ack.header);
  pair.deliver(pair.a, 0, ack);
  EXPECT_EQ(pair.a.state(0), RailState::down);
  EXPECT_EQ(pair.a.cause(0), RailCause::protocol);
  // The chunks of the message can still be sent.
  const auto sent = pair.pull(pair.a, 1, FrameType::data);
  EXPECT_EQ(sent.size(), 3U);
}

// ---- waits ----

TEST(LinkFrames, AWaitIsToldOnEveryRailWhileItLasts) {
  LinkPair pair(2);
  const StreamWait wait{.tag = {.number = 7, .step = 3}, .consumed = 0, .chain = 2};
  InStream& awaited = pair.a.in_stream(LinkPair::communicator);
  OutStream& silent = pair.b.out_stream(LinkPair::communicator);
  pair.a.tell_wait(awaited, wait);
  for (RailId rail = 0; rail < 2; ++rail) {
    silent.peers_wait.reset();
    pair.exchange(rail);
    EXPECT_EQ(silent.peers_wait, wait) << +rail;
  }
  EXPECT_TRUE(silent.posted_only(wait.consumed));
  EXPECT_EQ(pair.a.state(0), RailState::up);
  EXPECT_EQ(pair.b.state(0), RailState::up);
  // A shorter chain of the same wait is older news.
  pair.a.tell_wait(awaited, {.tag = wait.tag, .consumed = 0, .chain = 1});
  pair.exchange(0);
  EXPECT_EQ(silent.peers_wait, wait);
  // The message ends the wait, of which no later request tells.
  pair.post(pair.b, bytes_of(100, 1));
  EXPECT_FALSE(silent.posted_only(wait.consumed));
  pair.exchange(0);
  pair.exchange(1);
  ASSERT_NE(awaited.front(), nullptr);
  (void)pair.a.consume(awaited, pair.now);
  silent.peers_wait.reset();
  pair.a.tell_wait(awaited, wait);
  pair.exchange(0);
  EXPECT_FALSE(silent.peers_wait.has_value());
}

TEST(LinkFrames, AWaitForRoomIsToldUntilCreditComes) {
  LinkPair pair(2);
  pair.post(pair.a, bytes_of(3 * 384, 1));  // two slots
  for (RailId rail = 0; rail < 2; ++rail) pair.exchange(rail);
  EXPECT_TRUE(pair.out(pair.a).waits_for_credit(3 * 384));
  EXPECT_FALSE(pair.out(pair.a).waits_for_credit(2 * 384));
  const StreamWait wait{.tag = {.number = 7}, .consumed = 0, .chain = 2, .for_room = true};
  pair.a.tell_wait(pair.in(pair.a), wait);
  pair.exchange(0);
  EXPECT_EQ(pair.in(pair.b).peers_wait, wait);
  EXPECT_FALSE(pair.out(pair.b).peers_wait.has_value());
  (void)pair.b.consume(pair.in(pair.b), pair.now);
  pair.pass(10 * ns_per_ms, [&] { pair.exchange(0); });
  EXPECT_FALSE(pair.out(pair.a).waits_for_credit(3 * 384));
  pair.in(pair.b).peers_wait.reset();
  pair.a.tell_wait(pair.in(pair.a), wait);
  pair.exchange(0);
  EXPECT_FALSE(pair.in(pair.b).peers_wait.has_value());
}

// ---- ABORT ----

TEST(LinkFrames, AnAbortArrivesWithItsTextOnEveryRail) {
  LinkPair pair(2);
  const std::string text = "no rail to rank 3 for 30 s";
  pair.a.send_abort({LinkPair::communicator, ErrorCode::peer_lost, text});
  pair.exchange(0);
  pair.exchange(1);
  ASSERT_EQ(pair.b.received_aborts().size(), 2U);
  for (const AbortNotice& notice : pair.b.received_aborts()) {
    EXPECT_EQ(notice.communicator, LinkPair::communicator);
    EXPECT_EQ(notice.code, ErrorCode::peer_lost);
    EXPECT_EQ(notice.text, text);
  }
}

TEST(LinkFrames, AnAbortIsSticky) {
  LinkPair pair(1);
  pair.a.send_abort({LinkPair::communicator, ErrorCode::peer_lost, "gone"});
  (void)pair.pull(pair.a, 0);  // lost with the rail
  for (Link* end : {&pair.a, &pair.b}) {
    end->rail_failed(0, 1, RailCause::carrier_loss, pair.now);
    pair.close_rails(*end);
  }
  for (Link* end : {&pair.a, &pair.b}) end->peer_fenced(0, 1, pair.now);
  pair.open(0, 2);
  pair.exchange(0);
  ASSERT_EQ(pair.b.received_aborts().size(), 1U);
  EXPECT_EQ(pair.b.received_aborts()[0].text, "gone");
}

TEST(LinkFrames, ALongAbortTextIsTruncatedAndAnEmptyTextArrives) {
  LinkPair pair(1);
  pair.a.send_abort({1, ErrorCode::internal, std::string(10'000, 'x')});
  pair.a.send_abort({2, ErrorCode::internal, ""});
  pair.exchange(0);
  ASSERT_EQ(pair.b.received_aborts().size(), 2U);
  EXPECT_EQ(pair.b.received_aborts()[0].text, std::string(max_abort_bytes, 'x'));
  EXPECT_EQ(pair.b.received_aborts()[1].text, "");
}

TEST(LinkFrames, AnAbortTextStaysInPlaceUntilItIsWritten) {
  LinkPair pair(1);
  pair.a.send_abort({0, ErrorCode::internal, "short"});
  OutFrame frame;
  ASSERT_TRUE(pair.a.next_frame(0, frame, pair.now));
  for (std::uint64_t other = 1; other < 100; ++other)
    pair.a.send_abort({other, ErrorCode::internal, "other"});
  const auto* text = reinterpret_cast<const char*>(frame.payload);
  EXPECT_EQ(std::string(text, frame.header.payload_bytes), "short");
}

// ---- closed streams ----

TEST(LinkFrames, AFrameMayBeWrittenAfterItsStreamWasClosed) {
  LinkPair pair(1);
  pair.post(pair.a, bytes_of(100, 1));
  OutFrame frame;
  ASSERT_TRUE(pair.a.next_frame(0, frame, pair.now));
  pair.a.close_streams(LinkPair::communicator);
  pair.a.frame_written(frame.header);
  EXPECT_TRUE(pair.a.all_delivered());
}

TEST(LinkFrames, LateFramesOfAClosedCommunicatorAreDropped) {
  LinkPair pair(2);
  const Frame frame = a_data_frame(pair);
  ASSERT_TRUE(pair.b.frame_begin(0, frame.header, pair.now));
  pair.fill(pair.b, 0, frame, 0, 10);
  pair.b.close_streams(LinkPair::communicator);
  pair.fill(pair.b, 0, frame, 10, frame.payload.size());
  EXPECT_TRUE(pair.deliver(pair.b, 1, frame));
  EXPECT_EQ(pair.b.state(0), RailState::up);
  EXPECT_EQ(pair.b.state(1), RailState::up);
}

TEST(LinkFrames, TheLastAckOfAClosedCommunicatorIsRepeatedWhenItWasLost) {
  LinkPair pair(2);
  const auto data = bytes_of(300, 1);
  pair.post(pair.a, data);
  pair.deliver(pair.b, 0, pair.pull(pair.a, 0));
  pair.b.consume(pair.in(pair.b), pair.now);
  (void)pair.pull(pair.b, 0);  // the ack is lost
  ASSERT_FALSE(pair.in(pair.b).owes_ack_now());
  pair.b.close_streams(LinkPair::communicator);
  pair.pass(30 * ns_per_ms, [&] {
    pair.acknowledge(pair.a, 0);
    pair.acknowledge(pair.b, 0);
    pair.exchange(1);
  });
  EXPECT_EQ(pair.out(pair.a).delivered(), 1U);
  EXPECT_EQ(pair.out(pair.a).settled_position(), 300U);
}

TEST(LinkFrames, NoticesOfImpossibleRailsAndEpochsAreRejected) {
  for (const FrameType type : {FrameType::rail_down, FrameType::fenced}) {
    for (const auto& [number, epoch] : {std::pair{2U, 1U}, {1U, 0xFFFFFFFFU}}) {
      LinkPair pair(2);
      Frame frame{};
      frame.header.type = type;
      frame.header.number = number;
      frame.header.epoch = epoch;
      seal(frame.header);
      (void)pair.deliver(pair.a, 0, frame);
      EXPECT_EQ(pair.a.cause(0), RailCause::protocol);
      EXPECT_EQ(pair.a.state(1), RailState::up);
    }
  }
}

struct InjectedNotes final : LinkObserver {
  std::vector<RailId> rails;
  void on_injected(RailId rail) override { rails.push_back(rail); }
  void on_rail_moved(RailId, RailState, RailState, RailCause) override {}
  void on_replay(RailId, std::uint32_t, bool) override {}
};

TEST(LinkFrames, ThePeerLearnsOnceThatADrillTookARailDown) {
  for (const bool by_drill : {true, false}) {
    LinkPair pair(2);
    InjectedNotes notes;
    pair.b.set_observer(&notes);
    if (by_drill) pair.a.set_injected(1, true);
    pair.a.rail_failed(1, pair.a.epoch(1), RailCause::carrier_loss, pair.now);
    // Repeated until the fence ends.
    int notices = 0;
    pair.pass(200 * ns_per_ms, [&] {
      const auto frames = pair.pull(pair.a, 0);
      notices += static_cast<int>(std::ranges::count_if(
          frames, [](const Frame& frame) { return frame.header.type == FrameType::rail_down; }));
      pair.deliver(pair.b, 0, frames);
      pair.acknowledge(pair.a, 0);
    });
    EXPECT_GT(notices, 1);
    EXPECT_EQ(pair.b.cause(1), RailCause::peer_notice);
    EXPECT_EQ(notes.rails, by_drill ? std::vector<RailId>{1} : std::vector<RailId>{});
    pair.b.set_observer(nullptr);
  }
}

// A drill may break the transport for a moment: both ends notice, and the rail is open again before
// the notice has been sent, or read.
TEST(LinkFrames, ThePeerLearnsOfADrillThoughTheRailIsOpenAgain) {
  for (const bool sent : {true, false}) {
    LinkPair pair(2);
    InjectedNotes notes;
    pair.b.set_observer(&notes);
    pair.a.set_injected(1, true);
    std::vector<Frame> under_way;
    for (Link* end : {&pair.a, &pair.b}) {
      end->rail_failed(1, 1, RailCause::socket_error, pair.now);
      if (end == &pair.a && sent) under_way = pair.pull(pair.a, 0);
      pair.close_rails(*end);
    }
    for (Link* end : {&pair.a, &pair.b}) end->peer_fenced(1, 1, pair.now);
    pair.open(1, 2);
    pair.a.set_injected(1, false);
    if (!sent) under_way = pair.pull(pair.a, 0);
    pair.deliver(pair.b, 0, under_way);
    pair.exchange(0);
    EXPECT_EQ(notes.rails, std::vector<RailId>{1}) << sent;
    EXPECT_EQ(pair.b.state(1), RailState::up);
    EXPECT_EQ(pair.b.epoch(1), 2U);
    pair.b.set_observer(nullptr);
  }
}

// The rail that a test takes down inside the process needs no mark.
TEST(LinkFrames, AnInjectedCauseIsToldToThePeer) {
  LinkPair pair(2);
  InjectedNotes notes;
  pair.b.set_observer(&notes);
  pair.a.rail_failed(1, pair.a.epoch(1), RailCause::injected, pair.now);
  pair.deliver(pair.b, 0, pair.pull(pair.a, 0));
  EXPECT_EQ(notes.rails, std::vector<RailId>{1});
}

TEST(LinkFrames, AnAnswerToAProbeOfTheFutureIsRejected) {
  LinkPair pair(1);
  Frame frame{};
  frame.header.type = FrameType::pong;
  frame.header.number = static_cast<std::uint64_t>(pair.now) + 1;
  seal(frame.header);
  (void)pair.deliver(pair.a, 0, frame);
  EXPECT_EQ(pair.a.cause(0), RailCause::protocol);
}

// ---- addresses ----

Endpoint endpoint(unsigned last, std::uint16_t port = 4711) {
  Endpoint at{.version = 4, .port = port};
  at.address = {std::byte{10}, std::byte{0}, std::byte{0}, static_cast<std::byte>(last)};
  return at;
}

Frame address_frame(RailId about, std::uint32_t sequence, const Endpoint& at) {
  Frame frame{};
  frame.header.type = FrameType::address;
  frame.header.number = about;
  frame.header.epoch = sequence;
  put(at, frame.header);
  seal(frame.header);
  return frame;
}

TEST(LinkFrames, AnAddressIsAnnouncedOnEveryRailAndReportedOnce) {
  LinkPair pair({RailKind::sim, RailKind::sim, RailKind::control}, LinkPair::default_options());
  Endpoint at{.version = 6, .port = 0xFFFF};
  for (std::size_t i = 0; i < at.address.size(); ++i) at.address[i] = static_cast<std::byte>(i + 1);
  pair.b.announce_address(1, at);
  for (RailId rail = 0; rail < 3; ++rail) {
    const auto frames = pair.pull(pair.b, rail, FrameType::address);
    ASSERT_EQ(frames.size(), 1U);
    pair.deliver(pair.a, rail, frames);
    EXPECT_TRUE(pair.pull(pair.b, rail, FrameType::address).empty());
  }
  ASSERT_EQ(pair.a.received_addresses().size(), 1U);
  EXPECT_EQ(pair.a.received_addresses()[0].rail, 1);
  EXPECT_EQ(pair.a.received_addresses()[0].via, 0);
  EXPECT_EQ(pair.a.received_addresses()[0].at, at);
  // A repeated notice is not reported again after the first was read.
  pair.a.received_addresses().clear();
  pair.deliver(pair.a, 2, address_frame(1, 1, at));
  EXPECT_TRUE(pair.a.received_addresses().empty());
}

TEST(LinkFrames, ANewerAddressWinsOverALateOlderAddress) {
  LinkPair pair(2);
  pair.b.announce_address(0, endpoint(1));
  const auto late = pair.pull(pair.b, 1, FrameType::address);
  pair.b.announce_address(0, endpoint(2));
  pair.deliver(pair.a, 0, pair.pull(pair.b, 0, FrameType::address));
  pair.deliver(pair.a, 1, late);
  ASSERT_EQ(pair.a.received_addresses().size(), 1U);
  EXPECT_EQ(pair.a.received_addresses()[0].at, endpoint(2));
  // Each rail is announced separately. A new notice replaces an unread notice, so the queue holds
  // at most 1 per rail.
  pair.b.announce_address(1, endpoint(3));
  for (unsigned last = 4; last < 100; ++last) {
    pair.b.announce_address(0, endpoint(last));
    pair.exchange(1);
  }
  ASSERT_EQ(pair.a.received_addresses().size(), 2U);
  EXPECT_EQ(pair.a.received_addresses()[0].at, endpoint(3));
  EXPECT_EQ(pair.a.received_addresses()[1].at, endpoint(99));
}

TEST(LinkFrames, AnAddressIsAnnouncedAgainOnEachReopenedRail) {
  LinkPair pair(2);
  for (Link* end : {&pair.a, &pair.b}) {
    end->rail_failed(1, 1, RailCause::carrier_loss, pair.now);
    pair.close_rails(*end);
  }
  pair.b.announce_address(1, endpoint(1));
  pair.b.announce_address(1, endpoint(2));
  (void)pair.pull(pair.b, 0);  // lost with rail 0
  for (Link* end : {&pair.a, &pair.b}) {
    end->peer_fenced(1, 1, pair.now);
    end->rail_failed(0, 1, RailCause::carrier_loss, pair.now);
    pair.close_rails(*end);
    end->peer_fenced(0, 1, pair.now);
  }
  ASSERT_TRUE(pair.b.rail_established(0, 2, pair.now));
  ASSERT_TRUE(pair.a.rail_established(0, 2, pair.now));
  EXPECT_TRUE(pair.pull(pair.b, 0, FrameType::address).empty());  // on probation
  pair.deliver(pair.b, 0, pair.pull(pair.a, 0));
  pair.deliver(pair.a, 0, pair.pull(pair.b, 0));
  EXPECT_TRUE(pair.a.received_addresses().empty());
  // The pong ends B's probation; the next exchange carries the address.
  Frame pong{};
  pong.header.type = FrameType::pong;
  pong.header.number = static_cast<std::uint64_t>(pair.now);
  seal(pong.header);
  ASSERT_TRUE(pair.deliver(pair.b, 0, pong));
  pair.exchange(0);
  ASSERT_EQ(pair.a.received_addresses().size(), 1U);
  EXPECT_EQ(pair.a.received_addresses()[0].at, endpoint(2));
}

TEST(LinkFrames, AnInvalidAddressFailsTheRail) {
  const std::vector<Forgery> forgeries{
      {"unknown rail", [](FrameHeader& h) { h.number = 2; }},
      {"rail near 2^64", [](FrameHeader& h) { h.number = ~std::uint64_t{0}; }},
      {"no sequence", [](FrameHeader& h) { h.epoch = 0; }},
      {"IP version 0", [](FrameHeader& h) { h.offset = 0; }},
      {"IP version 5", [](FrameHeader& h) { h.offset = 5; }},
      {"IP version 4 + 256", [](FrameHeader& h) { h.offset = 260; }},
      {"port 0", [](FrameHeader& h) { h.slot = 0; }},
      {"IPv4 with more than four bytes", [](FrameHeader& h) { h.delivered |= 1ULL << 32U; }},
      {"IPv4 with sixteen bytes", [](FrameHeader& h) { h.credit = 1; }},
      {"a payload", [](FrameHeader& h) { h.payload_bytes = 1; }},
  };
  for (const Forgery& forgery : forgeries) {
    SCOPED_TRACE(forgery.what);
    LinkPair pair(2);
    Frame frame = address_frame(1, 1, endpoint(1));
    forgery.change(frame.header);
    seal(frame.header);
    (void)pair.deliver(pair.a, 0, frame);
    EXPECT_EQ(pair.a.cause(0), RailCause::protocol);
    EXPECT_EQ(pair.a.state(1), RailState::up);
    EXPECT_TRUE(pair.a.received_addresses().empty());
  }
}

TEST(LinkFrames, OnlyTheAcceptingEndMayAnnounceAnAddress) {
  LinkPair pair(2);
  (void)pair.deliver(pair.b, 0, address_frame(1, 1, endpoint(1)));
  EXPECT_EQ(pair.b.cause(0), RailCause::protocol);
  EXPECT_TRUE(pair.b.received_addresses().empty());
}

}  // namespace
}  // namespace r2ccl
