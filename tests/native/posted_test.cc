// Posted receives: permissions, the fence before the next permission, and the ends of sends.
#include "link/posted.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <utility>

#include "link/link.hpp"
#include "link_pair.hpp"

namespace r2ccl {
namespace {

using testing::bytes_of;
using testing::Frame;
using testing::LinkPair;

constexpr ConnectionId connection = 40;

// A sends to B, over rails 0 and 1.  Rail 0 is the home rail of all receives.
struct PostedPair : LinkPair {
  explicit PostedPair(RailKind first = RailKind::sim, bool checksum = false)
      : LinkPair({first, RailKind::sim}, options(checksum)), memory(4096) {
    id = b.posted().add_memory(memory);
    a.posted().open_sends(connection);
    b.posted().open_receives(connection);
    exchange(0);
    exchange(1);
  }

  static LinkOptions options(bool checksum) {
    LinkOptions made = default_options();
    made.posted = true;
    made.put_bytes = 128;
    made.shape.checksum = checksum;
    return made;
  }

  std::uint64_t receive(std::uint32_t bytes, std::uint64_t offset = 0) {
    const auto number =
        b.posted().receive(connection, {.memory = id, .offset = offset, .bytes = bytes, .home = 0});
    EXPECT_TRUE(number.has_value());
    return number.value_or(0);
  }
  std::optional<std::uint64_t> send(std::vector<std::byte> source) {
    return a.posted().send(connection, sources.emplace_back(std::move(source)), now);
  }
  [[nodiscard]] SendState sent(std::uint64_t number) {
    return a.posted().send_state(connection, number);
  }
  [[nodiscard]] std::optional<std::uint32_t> received(std::uint64_t number) {
    return b.posted().received(connection, number);
  }

  // Carries all ROOM frames of B to A.  Returns those with a permission.
  std::vector<Room> rooms() {
    std::vector<Room> found;
    for (const RailId rail : {RailId{0}, RailId{1}})
      for (const Frame& frame : pull(b, rail)) {
        if (frame.header.type == FrameType::room && room_of(frame.header).attempt != 0)
          found.push_back(room_of(frame.header));
        if (a.connected(rail)) {
          EXPECT_TRUE(deliver(a, rail, frame));
        }
      }
    return found;
  }
  // Delivers a frame like an RDMA device: the payload goes to the memory, whatever B thinks of it.
  void place(RailId rail, const Frame& frame, std::uint64_t offset = 0) {
    std::ranges::copy(frame.payload,
                      memory.begin() + static_cast<std::ptrdiff_t>(offset + frame.header.offset));
    ASSERT_TRUE(b.frame_begin(rail, frame.header, now));
    b.payload_placed(rail, now);
  }
  // Ends the epoch of a rail at an end, and fences this end.
  void lose(Link& at, RailId rail) {
    at.rail_failed(rail, at.epoch(rail), RailCause::carrier_loss, now);
    close_rails(at);
  }
  [[nodiscard]] bool holds(const std::vector<std::byte>& message, std::size_t offset = 0) const {
    return std::equal(message.begin(), message.end(),
                      memory.begin() + static_cast<std::ptrdiff_t>(offset));
  }

  std::vector<std::byte> memory;  // of B
  std::deque<std::vector<std::byte>> sources;
  MemoryId id = 0;
};

TEST(Posted, AMessageGoesStraightIntoTheMemoryOfItsReceive) {
  for (const bool checksum : {false, true}) {
    PostedPair pair(RailKind::sim, checksum);
    const auto message = bytes_of(300, 1);
    ASSERT_EQ(pair.receive(400, 1000), 0U);
    EXPECT_EQ(pair.received(0), std::nullopt);
    pair.exchange(0);
    pair.exchange(1);
    ASSERT_EQ(pair.send(message), 0U);
    const auto puts = pair.pull(pair.a, 0, FrameType::put);
    ASSERT_EQ(puts.size(), 3U);  // pieces of at most 128 bytes, all on the home rail
    EXPECT_TRUE(pair.pull(pair.a, 1, FrameType::put).empty());
    for (const Frame& put : puts) EXPECT_TRUE(pair.deliver(pair.b, 0, put));
    EXPECT_EQ(pair.received(0), 300U);
    EXPECT_TRUE(pair.holds(message, 1000));
    EXPECT_EQ(pair.sent(0), SendState::sending);  // the peer has not said so yet
    EXPECT_FALSE(pair.b.all_delivered());
    pair.pass(2 * ns_per_ms);
    pair.exchange(0);
    pair.exchange(1);
    EXPECT_EQ(pair.sent(0), SendState::done);
    EXPECT_TRUE(pair.a.all_delivered());
    EXPECT_TRUE(pair.b.all_delivered());
  }
}

TEST(Posted, AnEmptyMessageArrives) {
  PostedPair pair;
  ASSERT_EQ(pair.receive(0), 0U);
  pair.exchange(0);
  pair.exchange(1);
  ASSERT_EQ(pair.send({}), 0U);
  pair.exchange(0);
  EXPECT_EQ(pair.received(0), 0U);
}

TEST(Posted, AnEmptyMessageArrivesInEmptyMemory) {
  for (const bool checksum : {false, true}) {
    PostedPair pair(RailKind::sim, checksum);
    const MemoryId empty = pair.b.posted().add_memory({});
    ASSERT_EQ(pair.b.posted().receive(connection, {.memory = empty, .home = 0}), 0U);
    pair.exchange(0);
    pair.exchange(1);
    ASSERT_EQ(pair.send({}), 0U);
    pair.exchange(0);
    EXPECT_EQ(pair.received(0), 0U);
  }
}

TEST(Posted, TheNextRoomReportsTheDelivery) {
  PostedPair pair;
  pair.receive(100);
  pair.exchange(0);
  pair.exchange(1);
  ASSERT_EQ(pair.send(bytes_of(100, 1)), 0U);
  pair.exchange(0);
  pair.receive(100, 200);
  EXPECT_EQ(pair.rooms().size(), 1U);
  EXPECT_EQ(pair.sent(0), SendState::done);
}

TEST(Posted, ManyMessagesAreOutstandingAndTakenInAnyOrder) {
  PostedPair pair;
  std::vector<std::vector<std::byte>> messages;
  for (std::uint64_t number = 0; number < most_posted; ++number) {
    pair.receive(64, number * 64);
    messages.push_back(bytes_of(64, static_cast<int>(number)));
  }
  EXPECT_EQ(pair.b.posted().receive(connection, {.memory = pair.id, .bytes = 64}), std::nullopt);
  pair.exchange(0);
  pair.exchange(1);
  for (std::uint64_t number = 0; number < most_posted; ++number)
    ASSERT_EQ(pair.send(messages[number]), number);
  EXPECT_EQ(pair.send(messages[0]), std::nullopt);
  pair.exchange(0);
  for (std::uint64_t number = most_posted; number-- > 0;) {
    ASSERT_EQ(pair.received(number), 64U);
    EXPECT_TRUE(pair.holds(messages[number], number * 64));
    pair.b.posted().take_received(connection, number);
  }
  EXPECT_EQ(pair.receive(64), most_posted);
  pair.exchange(0);
  pair.exchange(1);
  for (std::uint64_t number = 0; number < most_posted; ++number) {
    ASSERT_EQ(pair.sent(number), SendState::done);
    pair.a.posted().take_sent(connection, number);
  }
  EXPECT_EQ(pair.send(messages[0]), most_posted);
}

// ---- permissions ----

TEST(Posted, ASendWaitsForItsRoomAndAsksForALostRoom) {
  PostedPair pair;
  const auto message = bytes_of(50, 1);
  EXPECT_EQ(pair.send(message), std::nullopt);
  pair.receive(100);
  for (const RailId rail : {RailId{0}, RailId{1}}) (void)pair.pull(pair.b, rail);  // lost
  pair.pass(10 * ns_per_ms);
  EXPECT_TRUE(pair.pull(pair.a, 0, FrameType::need).empty());
  pair.pass(11 * ns_per_ms);
  const auto needs = pair.pull(pair.a, 0, FrameType::need);
  ASSERT_EQ(needs.size(), 1U);
  EXPECT_EQ(needs[0].header.offset, 0U);  // no try is known
  EXPECT_TRUE(pair.deliver(pair.b, 0, needs[0]));
  const auto rooms = pair.rooms();
  ASSERT_EQ(rooms.size(), 1U);
  EXPECT_EQ(rooms[0].attempt, 1U);  // repeated with the same try
  EXPECT_EQ(pair.send(message), 0U);
}

TEST(Posted, ARoomIsRepeatedAfterTheLossOfTheRailThatCarriedIt) {
  PostedPair pair;
  const RailId carrier = pair.b.best_rail();
  const RailId other = 1 - carrier;
  ASSERT_TRUE(pair.b.posted()
                  .receive(connection, {.memory = pair.id, .offset = 0, .bytes = 9, .home = other})
                  .has_value());
  ASSERT_EQ(pair.pull(pair.b, carrier, FrameType::room).size(), 1U);  // lost
  pair.lose(pair.b, carrier);
  const auto rooms = pair.rooms();
  ASSERT_EQ(rooms.size(), 1U);
  EXPECT_EQ(rooms[0].attempt, 1U);
  EXPECT_EQ(rooms[0].rail, other);
}

TEST(Posted, BytesOfAnOlderTryAreDropped) {
  PostedPair pair;
  const auto message = bytes_of(300, 1);
  pair.receive(300);
  pair.exchange(0);
  pair.exchange(1);
  ASSERT_EQ(pair.send(message), 0U);
  const auto first = pair.pull(pair.a, 0, FrameType::put);
  ASSERT_EQ(first.size(), 3U);
  ASSERT_TRUE(pair.deliver(pair.b, 0, first[0]));
  ASSERT_TRUE(pair.b.frame_begin(0, first[1].header, pair.now));  // half of its payload arrives
  pair.fill(pair.b, 0, first[1], 0, 60);
  // The sender loses the rail; its question arrives before the notice of the loss.
  pair.lose(pair.a, 0);
  const auto needs = pair.pull(pair.a, 1, FrameType::need);
  ASSERT_EQ(needs.size(), 1U);
  EXPECT_EQ(needs[0].header.offset, 1U);
  ASSERT_TRUE(pair.deliver(pair.b, 1, needs[0]));
  pair.b.tick(pair.now);
  EXPECT_EQ(pair.b.state(0), RailState::up);  // a byte stream needs no fence
  const auto rooms = pair.rooms();
  ASSERT_EQ(rooms.size(), 1U);
  EXPECT_EQ(rooms[0].attempt, 2U);
  EXPECT_EQ(rooms[0].rail, 1U);
  std::ranges::fill(pair.memory, std::byte{0});
  pair.fill(pair.b, 0, first[1], 60, first[1].payload.size());
  ASSERT_TRUE(pair.deliver(pair.b, 0, first[2]));
  EXPECT_TRUE(
      std::ranges::all_of(pair.memory, [](std::byte byte) { return byte == std::byte{0}; }));
  EXPECT_EQ(pair.received(0), std::nullopt);
  pair.deliver(pair.b, 1, pair.pull(pair.a, 1, FrameType::put));
  EXPECT_EQ(pair.received(0), 300U);
  EXPECT_TRUE(pair.holds(message));
}

TEST(Posted, AnRdmaRailIsFencedBeforeTheNextRoom) {
  PostedPair pair(RailKind::verbs);
  const auto message = bytes_of(100, 1);
  pair.receive(100);
  pair.exchange(0);
  pair.exchange(1);
  ASSERT_EQ(pair.send(message), 0U);
  ASSERT_EQ(pair.pull(pair.a, 0, FrameType::put).size(), 1U);
  pair.a.rail_failed(0, 1, RailCause::carrier_loss, pair.now);
  const auto needs = pair.pull(pair.a, 1, FrameType::need);
  ASSERT_EQ(needs.size(), 1U);
  ASSERT_TRUE(pair.deliver(pair.b, 1, needs[0]));
  EXPECT_EQ(pair.b.state(0), RailState::up);  // all rails are read before the answer
  pair.b.tick(pair.now);
  EXPECT_EQ(pair.b.state(0), RailState::down);
  EXPECT_EQ(pair.b.cause(0), RailCause::recalled);
  EXPECT_TRUE(pair.rooms().empty());
  pair.close_rails(pair.b);
  const auto rooms = pair.rooms();
  ASSERT_EQ(rooms.size(), 1U);
  EXPECT_EQ(rooms[0].attempt, 2U);
  EXPECT_EQ(rooms[0].rail, 1U);
  pair.deliver(pair.b, 1, pair.pull(pair.a, 1, FrameType::put));
  EXPECT_EQ(pair.received(0), 100U);
}

TEST(Posted, AMessageThatIsHereNeedsNoFence) {
  PostedPair pair(RailKind::verbs);
  pair.receive(100);
  pair.exchange(0);
  pair.exchange(1);
  ASSERT_EQ(pair.send(bytes_of(100, 1)), 0U);
  const auto puts = pair.pull(pair.a, 0, FrameType::put);
  pair.a.rail_failed(0, 1, RailCause::carrier_loss, pair.now);
  for (const Frame& need : pair.pull(pair.a, 1, FrameType::need))
    ASSERT_TRUE(pair.deliver(pair.b, 1, need));
  pair.place(0, puts.at(0));  // found by the same pass over the rails
  pair.b.tick(pair.now);
  EXPECT_EQ(pair.b.state(0), RailState::up);
  EXPECT_TRUE(pair.rooms().empty());
  EXPECT_EQ(pair.sent(0), SendState::sending);  // the own end of rail 0 is not fenced yet
  pair.close_rails(pair.a);
  EXPECT_EQ(pair.sent(0), SendState::done);
}

TEST(Posted, ALateRoomDoesNotCountAfterAReconnection) {
  PostedPair pair;
  pair.receive(100);
  std::vector<Frame> late;
  for (const RailId rail : {RailId{0}, RailId{1}})
    for (const Frame& frame : pair.pull(pair.b, rail)) late.push_back(frame);
  ASSERT_EQ(late.size(), 1U);
  ASSERT_EQ(room_of(late[0].header).epoch, 1U);
  for (Link* end : {&pair.a, &pair.b}) pair.lose(*end, 0);
  for (Link* end : {&pair.a, &pair.b}) end->peer_fenced(0, 1, pair.now);
  pair.open(0, 2);
  EXPECT_TRUE(pair.deliver(pair.a, 1, late[0]));
  ASSERT_EQ(pair.send(bytes_of(100, 1)), 0U);
  EXPECT_TRUE(pair.pull(pair.a, 0, FrameType::put).empty());
}

TEST(Posted, ARoomOfAnEpochThatIsNotOpenHereWaits) {
  PostedPair pair;
  for (Link* end : {&pair.a, &pair.b}) pair.lose(*end, 0);
  for (Link* end : {&pair.a, &pair.b}) end->peer_fenced(0, 1, pair.now);
  pair.exchange(1);
  Frame early{};
  early.header.type = FrameType::room;
  early.header.communicator = connection;
  put({.number = 0, .attempt = 1, .rail = 0, .epoch = 2, .memory = 1, .bytes = 100}, early.header);
  seal(early.header);
  pair.receive(100);
  for (const RailId rail : {RailId{0}, RailId{1}}) (void)pair.pull(pair.b, rail);
  ASSERT_TRUE(pair.deliver(pair.a, 1, early));
  ASSERT_EQ(pair.send(bytes_of(100, 1)), 0U);
  EXPECT_TRUE(pair.pull(pair.a, 1, FrameType::need).empty());
  ASSERT_TRUE(pair.a.rail_established(0, 2, pair.now));
  ASSERT_TRUE(pair.b.rail_established(0, 2, pair.now));
  const auto probes = pair.pull(pair.a, 0);
  EXPECT_TRUE(std::ranges::none_of(
      probes, [](const Frame& frame) { return frame.header.type == FrameType::put; }));
  pair.deliver(pair.b, 0, probes);
  pair.deliver(pair.a, 0, pair.pull(pair.b, 0));
  ASSERT_EQ(pair.a.state(0), RailState::up);
  EXPECT_EQ(pair.pull(pair.a, 0, FrameType::put).size(), 1U);
}

TEST(Posted, ASilentRailIsReplacedOverAnotherRail) {
  PostedPair pair;
  const auto message = bytes_of(100, 1);
  pair.receive(100);
  pair.exchange(0);
  pair.exchange(1);
  ASSERT_EQ(pair.send(message), 0U);
  ASSERT_EQ(pair.pull(pair.a, 0, FrameType::put).size(), 1U);  // vanishes
  pair.pass(40 * ns_per_ms, [&] {
    (void)pair.pull(pair.b, 0);
    pair.exchange(1);
  });
  EXPECT_EQ(pair.a.state(0), RailState::suspect);
  EXPECT_EQ(pair.received(0), 100U);
  EXPECT_TRUE(pair.holds(message));
  // The byte stream may still hold the source; the owner detaches the rail.
  EXPECT_EQ(pair.sent(0), SendState::detach);
  pair.lose(pair.a, 0);
  EXPECT_EQ(pair.sent(0), SendState::done);
}

TEST(Posted, ASlowRailIsNoReasonForAQuestion) {
  PostedPair pair;
  pair.receive(4000);
  pair.exchange(0);
  pair.exchange(1);
  ASSERT_EQ(pair.send(bytes_of(4000, 1)), 0U);
  for (int piece = 0; piece < 32; ++piece) {
    pair.pass(5 * ns_per_ms, [&] {
      const auto frames = pair.pull(pair.a, 1);
      EXPECT_TRUE(std::ranges::none_of(
          frames, [](const Frame& frame) { return frame.header.type == FrameType::need; }));
      pair.deliver(pair.b, 1, frames);
      pair.acknowledge(pair.a, 1);
      pair.deliver(pair.a, 1, pair.pull(pair.b, 1));
      pair.acknowledge(pair.b, 1);
    });
    EXPECT_EQ(pair.received(0), std::nullopt);
    EXPECT_TRUE(pair.deliver(pair.b, 0, pair.pull_one(pair.a, 0)));
    pair.acknowledge(pair.a, 0);
  }
  pair.exchange(0);  // frames about the health of the rail have been among the pieces
  EXPECT_EQ(pair.received(0), 4000U);
}

TEST(Posted, AQuestionAndItsAnswerWaitOnceInAQueue) {
  PostedPair pair;
  pair.receive(100);
  for (const RailId rail : {RailId{0}, RailId{1}}) (void)pair.pull(pair.b, rail);  // lost
  EXPECT_EQ(pair.send(bytes_of(50, 1)), std::nullopt);
  pair.pass(100 * ns_per_ms);  // asks several times
  const auto needs = pair.pull(pair.a, 1, FrameType::need);
  ASSERT_EQ(needs.size(), 1U);
  for (int copy = 0; copy < 3; ++copy) EXPECT_TRUE(pair.deliver(pair.b, 1, needs[0]));
  EXPECT_EQ(pair.pull(pair.b, 1, FrameType::room).size(), 1U);
  EXPECT_TRUE(pair.deliver(pair.b, 1, needs[0]));
  EXPECT_EQ(pair.pull(pair.b, 1, FrameType::room).size(), 1U);
}

TEST(Posted, AQuestionAboutAnOlderTryChangesNothing) {
  PostedPair pair;
  pair.receive(300);
  pair.exchange(0);
  pair.exchange(1);
  const auto message = bytes_of(300, 1);
  ASSERT_EQ(pair.send(message), 0U);
  (void)pair.pull(pair.a, 0, FrameType::put);
  pair.lose(pair.a, 0);
  const auto needs = pair.pull(pair.a, 1, FrameType::need);
  ASSERT_EQ(needs.size(), 1U);
  for (int repeated = 0; repeated < 3; ++repeated) {
    ASSERT_TRUE(pair.deliver(pair.b, 1, needs[0]));
    pair.b.tick(pair.now);
    const auto rooms = pair.rooms();
    ASSERT_EQ(rooms.size(), 1U);
    EXPECT_EQ(rooms[0].attempt, 2U);
  }
  EXPECT_EQ(pair.pull(pair.a, 1, FrameType::put).size(), 3U);  // one posting
}

TEST(Posted, WithoutAnyRailARoomWaits) {
  PostedPair pair;
  for (const RailId rail : {RailId{0}, RailId{1}})
    for (Link* end : {&pair.a, &pair.b}) pair.lose(*end, rail);
  pair.receive(100);
  for (const RailId rail : {RailId{0}, RailId{1}})
    for (Link* end : {&pair.a, &pair.b}) end->peer_fenced(rail, 1, pair.now);
  pair.open(1, 2);
  const auto message = bytes_of(100, 1);
  ASSERT_EQ(pair.send(message), 0U);
  pair.exchange(1);
  EXPECT_EQ(pair.received(0), 100U);
}

// ---- the end of a send ----

TEST(Posted, ASendOverRdmaIsDoneOnceItsRailHasRead) {
  PostedPair pair(RailKind::verbs);
  pair.receive(100);
  pair.exchange(0);
  pair.exchange(1);
  ASSERT_EQ(pair.send(bytes_of(100, 1)), 0U);
  for (const Frame& put : pair.pull(pair.a, 0, FrameType::put)) pair.place(0, put);
  pair.receive(100, 200);
  EXPECT_EQ(pair.rooms().size(), 1U);
  EXPECT_EQ(pair.sent(0), SendState::sending);
  pair.acknowledge(pair.a, 0);
  EXPECT_EQ(pair.sent(0), SendState::done);
}

TEST(Posted, APathAckIsNoDelivery) {
  PostedPair pair;
  pair.receive(100);
  pair.exchange(0);
  pair.exchange(1);
  ASSERT_EQ(pair.send(bytes_of(100, 1)), 0U);
  (void)pair.pull(pair.a, 0);
  pair.acknowledge(pair.a, 0);
  EXPECT_EQ(pair.sent(0), SendState::sending);
}

TEST(Posted, ALostReportIsRepeatedOnQuestion) {
  PostedPair pair;
  pair.receive(100);
  pair.exchange(0);
  pair.exchange(1);
  ASSERT_EQ(pair.send(bytes_of(100, 1)), 0U);
  pair.deliver(pair.b, 0, pair.pull(pair.a, 0));
  pair.acknowledge(pair.a, 0);
  pair.pass(2 * ns_per_ms);
  for (const RailId rail : {RailId{0}, RailId{1}}) (void)pair.pull(pair.b, rail);  // lost
  pair.pass(30 * ns_per_ms, [&] {
    for (const RailId rail : {RailId{0}, RailId{1}}) pair.exchange(rail);
  });
  EXPECT_EQ(pair.sent(0), SendState::done);
  EXPECT_EQ(pair.b.state(0), RailState::up);
}

// ---- closing ----

TEST(Posted, MemoryOfAClosedConnectionIsNotWrittenAnyMore) {
  PostedPair bytes;
  bytes.receive(100);
  bytes.exchange(0);
  bytes.exchange(1);
  ASSERT_EQ(bytes.send(bytes_of(100, 1)), 0U);
  const auto late = bytes.pull(bytes.a, 0, FrameType::put);
  EXPECT_TRUE(bytes.b.posted().close_receives(connection, bytes.now));
  bytes.deliver(bytes.b, 0, late);
  EXPECT_FALSE(bytes.holds(bytes_of(100, 1)));

  PostedPair rdma(RailKind::verbs);
  rdma.receive(100);
  EXPECT_FALSE(rdma.b.posted().close_receives(connection, rdma.now));
  EXPECT_EQ(rdma.b.state(0), RailState::down);
  rdma.close_rails(rdma.b);
  EXPECT_TRUE(rdma.b.posted().close_receives(connection, rdma.now));
}

TEST(Posted, TheLastReportOutlivesItsConnection) {
  for (const bool lost : {false, true}) {
    SCOPED_TRACE(lost);
    PostedPair pair;
    pair.receive(100);
    pair.exchange(0);
    pair.exchange(1);
    ASSERT_EQ(pair.send(bytes_of(100, 1)), 0U);
    pair.deliver(pair.b, 0, pair.pull(pair.a, 0));
    pair.acknowledge(pair.a, 0);
    ASSERT_EQ(pair.received(0), 100U);
    pair.b.posted().take_received(connection, 0);
    EXPECT_TRUE(pair.b.posted().close_receives(connection, pair.now));
    EXPECT_FALSE(pair.b.all_delivered());
    for (const RailId rail : {RailId{0}, RailId{1}}) {
      const auto frames = pair.pull(pair.b, rail);
      if (!lost) pair.deliver(pair.a, rail, frames);
    }
    EXPECT_TRUE(pair.b.all_delivered());
    EXPECT_EQ(pair.sent(0), lost ? SendState::sending : SendState::done);
    pair.pass(30 * ns_per_ms, [&] {
      for (const RailId rail : {RailId{0}, RailId{1}}) pair.exchange(rail);
    });
    EXPECT_EQ(pair.sent(0), SendState::done);
    EXPECT_TRUE(pair.b.posted().orphans().empty());
  }
}

TEST(Posted, AnEndThatWaitsForAClosedEndIsKnown) {
  const std::vector<ConnectionId> known{connection};
  PostedPair sending;
  EXPECT_TRUE(sending.b.posted().close_receives(connection, sending.now));
  EXPECT_EQ(sending.send(bytes_of(50, 1)), std::nullopt);
  sending.pass(100 * ns_per_ms, [&] {
    for (const RailId rail : {RailId{0}, RailId{1}}) sending.exchange(rail);
  });
  EXPECT_EQ(sending.b.posted().orphans(), known);
  EXPECT_TRUE(sending.a.posted().orphans().empty());

  PostedPair receiving;
  EXPECT_TRUE(receiving.a.posted().close_sends(connection, receiving.now));
  receiving.receive(100);
  receiving.receive(100, 100);
  for (const RailId rail : {RailId{0}, RailId{1}}) receiving.exchange(rail);
  EXPECT_EQ(receiving.a.posted().orphans(), known);
  EXPECT_TRUE(receiving.b.posted().orphans().empty());
}

TEST(Posted, AClosedSendReadsItsSourceNoMore) {
  PostedPair pair(RailKind::verbs);
  pair.receive(100);
  pair.exchange(0);
  pair.exchange(1);
  ASSERT_EQ(pair.send(bytes_of(100, 1)), 0U);
  ASSERT_EQ(pair.pull(pair.a, 0, FrameType::put).size(), 1U);
  EXPECT_FALSE(pair.a.posted().close_sends(connection, pair.now));
  EXPECT_EQ(pair.a.state(0), RailState::down);
  pair.close_rails(pair.a);
  EXPECT_TRUE(pair.a.posted().close_sends(connection, pair.now));
}

// ---- frames of a broken peer ----

struct Forgery {
  const char* what;
  FrameType type;
  std::function<void(FrameHeader&)> change;
};

TEST(Posted, FramesOfABrokenPeerFailTheRail) {
  const auto good_put = [](FrameHeader& h) {
    h.number = 0;
    h.epoch = 1;
    h.offset = 0;
    h.message_bytes = h.payload_bytes = 50;
  };
  const std::vector<Forgery> forgeries{
      {"a message without a receive", FrameType::put,
       [&](FrameHeader& h) { good_put(h), h.number = 1; }},
      {"try 0", FrameType::put, [&](FrameHeader& h) { good_put(h), h.epoch = 0; }},
      {"a try not permitted yet", FrameType::put,
       [&](FrameHeader& h) { good_put(h), h.epoch = 2; }},
      {"a message larger than its receive", FrameType::put,
       [&](FrameHeader& h) { good_put(h), h.message_bytes = h.payload_bytes = 101; }},
      {"payload beyond the message", FrameType::put,
       [&](FrameHeader& h) { good_put(h), h.payload_bytes = 51; }},
      {"an offset near 4 GiB", FrameType::put,
       [&](FrameHeader& h) { good_put(h), h.offset = 0xFFFFFFF0; }},
      {"a gap", FrameType::put,
       [&](FrameHeader& h) { good_put(h), h.offset = 10, h.payload_bytes = 40; }},
      {"no payload of a message with bytes", FrameType::put,
       [&](FrameHeader& h) { good_put(h), h.payload_bytes = 0; }},
      {"a payload above the limit", FrameType::put,
       [&](FrameHeader& h) { good_put(h), h.payload_bytes = max_put_bytes + 1; }},
      {"a try that was never permitted", FrameType::need, [](FrameHeader& h) { h.offset = 2; }},
      {"a rail that does not exist", FrameType::need, [](FrameHeader& h) { h.slot = 2; }},
      {"a question with payload", FrameType::need, [](FrameHeader& h) { h.payload_bytes = 1; }},
      {"memory over a rail that writes none", FrameType::memory,
       [](FrameHeader& h) { h.credit = 100; }},
  };
  for (const Forgery& forgery : forgeries) {
    SCOPED_TRACE(forgery.what);
    PostedPair pair;
    pair.receive(100);
    Frame frame{};
    frame.header.type = forgery.type;
    frame.header.communicator = connection;
    forgery.change(frame.header);
    seal(frame.header);
    EXPECT_FALSE(pair.b.frame_begin(0, frame.header, pair.now) && pair.b.state(0) == RailState::up);
    EXPECT_EQ(pair.b.cause(0), RailCause::protocol);
  }
}

TEST(Posted, RoomsOfABrokenPeerFailTheRail) {
  const std::vector<std::pair<const char*, Room>> forgeries{
      {"more deliveries than messages", {.delivered = 1}},
      {"a rail that does not exist", {.attempt = 1, .rail = 2, .epoch = 1}},
      {"a message far ahead", {.number = most_posted, .attempt = 1, .rail = 0, .epoch = 1}},
  };
  for (const auto& [what, room] : forgeries) {
    SCOPED_TRACE(what);
    PostedPair pair;
    Frame frame{};
    frame.header.type = FrameType::room;
    frame.header.communicator = connection;
    put(room, frame.header);
    seal(frame.header);
    (void)pair.deliver(pair.a, 0, frame);
    EXPECT_EQ(pair.a.cause(0), RailCause::protocol);
  }
}

TEST(Posted, FramesOfUnknownConnectionsAreDropped) {
  for (const FrameType type : {FrameType::room, FrameType::need, FrameType::put}) {
    PostedPair pair;
    Frame frame{};
    frame.header.type = type;
    frame.header.communicator = connection + 1;
    frame.header.epoch = 1;
    seal(frame.header);
    EXPECT_TRUE(pair.deliver(pair.b, 0, frame)) << name_of(type);
    EXPECT_EQ(pair.b.state(0), RailState::up);
  }
}

TEST(Posted, AFrameThatBeganBeforeItsReceiveIsDropped) {
  PostedPair pair;
  const ConnectionId late = connection + 1;
  Frame frame{};
  frame.header.type = FrameType::put;
  frame.header.communicator = late;
  frame.header.epoch = 1;
  frame.payload = bytes_of(1000, 1);
  frame.header.payload_bytes = frame.header.message_bytes = 1000;
  seal(frame.header);
  ASSERT_TRUE(pair.b.frame_begin(0, frame.header, pair.now));
  pair.fill(pair.b, 0, frame, 0, 10);
  pair.b.posted().open_receives(late);
  ASSERT_EQ(pair.b.posted().receive(late, {.memory = pair.id, .bytes = 100}), 0U);
  pair.fill(pair.b, 0, frame, 10, 1000);
  EXPECT_EQ(pair.b.posted().received(late, 0), std::nullopt);
  EXPECT_TRUE(
      std::ranges::all_of(pair.memory, [](std::byte byte) { return byte == std::byte{0}; }));
}

TEST(Posted, ALinkWithoutPostedReceivesRejectsTheirFrames) {
  for (const FrameType type :
       {FrameType::room, FrameType::need, FrameType::memory, FrameType::put}) {
    LinkPair pair(2);
    Frame frame{};
    frame.header.type = type;
    frame.header.epoch = 1;
    seal(frame.header);
    EXPECT_FALSE(pair.deliver(pair.b, 0, frame)) << name_of(type);
    EXPECT_EQ(pair.b.cause(0), RailCause::protocol);
  }
}

TEST(Posted, AWrongChecksumCostsTheRailAndTheMessageArrives) {
  PostedPair pair(RailKind::sim, /*checksum=*/true);
  const auto message = bytes_of(100, 1);
  pair.receive(100);
  pair.exchange(0);
  pair.exchange(1);
  ASSERT_EQ(pair.send(message), 0U);
  auto puts = pair.pull(pair.a, 0, FrameType::put);
  puts.at(0).payload[7] ^= std::byte{1};
  (void)pair.deliver(pair.b, 0, puts[0]);
  EXPECT_EQ(pair.b.cause(0), RailCause::checksum);
  EXPECT_EQ(pair.received(0), std::nullopt);
  pair.exchange(1);
  EXPECT_EQ(pair.received(0), 100U);
  EXPECT_TRUE(pair.holds(message));
}

}  // namespace
}  // namespace r2ccl
