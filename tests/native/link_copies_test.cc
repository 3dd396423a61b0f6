// Messages sent to several rails at once: which rails carry copies, what a lost copy costs, and the
// limit of the slots that silent rails keep.
#include <gtest/gtest.h>

#include <set>

#include "link_pair.hpp"

namespace r2ccl {
namespace {

using testing::bytes_of;
using testing::Frame;
using testing::LinkPair;

constexpr std::uint64_t streams = streams_communicator;

LinkOptions with_streams(std::uint16_t slots = 4, std::uint16_t spare_slots = 8) {
  LinkOptions options = LinkPair::default_options();
  options.streams = {.slot_bytes = 384, .slots = slots, .spare_slots = spare_slots};
  return options;
}

class CountingObserver final : public LinkObserver {
 public:
  void on_rail_moved(RailId /*rail*/, RailState /*from*/, RailState /*to*/,
                     RailCause /*cause*/) override {}
  void on_replay(RailId /*rail*/, std::uint32_t chunks, bool /*hedge*/) override {
    replayed += chunks;
  }
  std::uint32_t replayed = 0;
};

void post(LinkPair& pair, std::span<const std::byte> data, std::uint8_t copies = every_rail) {
  OutStream& out = pair.a.out_stream(streams);
  ASSERT_TRUE(out.has_room());
  pair.a.post(out, data, {}, pair.now, copies);
}

std::vector<Frame> data_of(LinkPair& pair, RailId rail) {
  return pair.pull(pair.a, rail, FrameType::data);
}

std::vector<std::byte> take_front(LinkPair& pair) {
  InStream& in = pair.b.in_stream(streams);
  const InMessage* message = in.front();
  if (message == nullptr) return {};
  std::vector<std::byte> bytes(in.front_data(), in.front_data() + message->bytes);
  (void)pair.b.consume(in, pair.now);
  return bytes;
}

TEST(LinkCopies, AMessageGoesToEveryUsableRailAndTheFirstCopyCounts) {
  LinkPair pair(3, with_streams());
  const auto data = bytes_of(100, 1);
  post(pair, data);
  std::vector<std::vector<Frame>> frames;
  for (RailId rail = 0; rail < 3; ++rail) {
    frames.push_back(data_of(pair, rail));
    ASSERT_EQ(frames.back().size(), 1U) << rail;
    EXPECT_EQ(frames.back()[0].payload, data);
    EXPECT_EQ(frames.back()[0].header.flags & frame_flag::replay, 0);
  }
  pair.deliver(pair.b, 2, frames[2]);
  EXPECT_EQ(take_front(pair), data);
  // Late copies are dropped, also after the message was consumed.
  pair.deliver(pair.b, 0, frames[0]);
  pair.deliver(pair.b, 1, frames[1]);
  EXPECT_EQ(pair.b.in_stream(streams).delivered(), 1U);
  EXPECT_EQ(pair.b.in_stream(streams).front(), nullptr);
  for (RailId rail = 0; rail < 3; ++rail) {
    EXPECT_EQ(pair.b.state(rail), RailState::up);
    EXPECT_EQ(pair.a.counters(rail).replayed_chunks + pair.a.counters(rail).hedged_chunks, 0U);
  }
  EXPECT_EQ(pair.a.counters(0).copies + pair.a.counters(1).copies + pair.a.counters(2).copies, 2U);
  EXPECT_EQ(pair.b.disturbances(), 0U);
}

// The proof of a peer's death needs a connection without unread bytes.
TEST(LinkCopies, AControlRailRestsWhileTwoDataRailsAreUp) {
  LinkPair pair({RailKind::tcp, RailKind::tcp, RailKind::control}, with_streams());
  const auto acked = [&](RailId rail) { return !pair.pull(pair.b, rail, FrameType::ack).empty(); };
  post(pair, bytes_of(64, 1));
  EXPECT_FALSE(pair.a.has_frames(2));
  EXPECT_EQ(data_of(pair, 1).size(), 1U);
  pair.deliver(pair.b, 0, data_of(pair, 0));
  EXPECT_EQ(take_front(pair), bytes_of(64, 1));
  pair.now += 10 * ns_per_ms;
  pair.b.tick(pair.now);  // the delayed ack
  EXPECT_FALSE(acked(2));
  EXPECT_TRUE(acked(0) && acked(1));

  for (Link* end : {&pair.a, &pair.b}) end->rail_failed(1, 1, RailCause::carrier_loss, pair.now);
  post(pair, bytes_of(64, 2));
  EXPECT_EQ(data_of(pair, 0).size(), 1U);
  pair.deliver(pair.b, 2, data_of(pair, 2));
  EXPECT_EQ(take_front(pair), bytes_of(64, 2));
  pair.now += 10 * ns_per_ms;
  pair.b.tick(pair.now);
  EXPECT_TRUE(acked(0) && acked(2));
}

// A lost port takes both data rails.
TEST(LinkCopies, AControlRailTakesCopiesBesideDataRailsOfOnePort) {
  LinkOptions options = with_streams();
  options.units[0] = options.units[1] = 1;
  LinkPair shared({RailKind::tcp, RailKind::tcp, RailKind::control}, options);
  post(shared, bytes_of(64, 1));
  EXPECT_EQ(data_of(shared, 2).size(), 1U);

  options.units[3] = 2;
  LinkPair apart({RailKind::tcp, RailKind::tcp, RailKind::control, RailKind::tcp}, options);
  post(apart, bytes_of(64, 1));
  EXPECT_FALSE(apart.a.has_frames(2));
}

TEST(LinkCopies, ACopyCountLimitsTheRails) {
  LinkPair pair(4, with_streams());
  post(pair, bytes_of(10, 1), 2);
  std::size_t rails = 0;
  for (RailId rail = 0; rail < 4; ++rail) rails += data_of(pair, rail).size();
  EXPECT_EQ(rails, 2U);
}

TEST(LinkCopies, MessagesOfSeveralChunksAreNotCopied) {
  LinkPair pair(2, with_streams());
  post(pair, bytes_of(300, 1));
  EXPECT_EQ(data_of(pair, 0).size() + data_of(pair, 1).size(), 3U);
}

TEST(LinkCopies, TensorsAreNotCopied) {
  LinkPair pair({RailKind::tcp, RailKind::tcp, RailKind::control}, with_streams());
  pair.post(pair.a, bytes_of(10, 1));
  EXPECT_EQ(data_of(pair, 0).size(), 1U);
  EXPECT_EQ(data_of(pair, 1).size() + data_of(pair, 2).size(), 0U);
}

TEST(LinkCopies, ALostCopyIsReplayedOnlyIfNoOtherRailCarriesTheMessage) {
  LinkPair pair(3, with_streams());
  CountingObserver observer;
  pair.a.set_observer(&observer);
  post(pair, bytes_of(100, 1));
  ASSERT_EQ(data_of(pair, 0).size(), 1U);
  ASSERT_EQ(data_of(pair, 1).size(), 1U);
  pair.a.rail_failed(0, 1, RailCause::carrier_loss, pair.now);
  EXPECT_EQ(observer.replayed, 0U);
  pair.a.rail_failed(1, 1, RailCause::carrier_loss, pair.now);
  // The copy for rail 2 was due anyway, and a second one is not sent.
  EXPECT_EQ(data_of(pair, 2).size(), 1U);
  pair.a.rail_failed(2, 1, RailCause::carrier_loss, pair.now);
  EXPECT_EQ(observer.replayed, 2U);
  pair.close_rails(pair.a);
  pair.b.rail_failed(1, 1, RailCause::carrier_loss, pair.now);
  pair.close_rails(pair.b);
  pair.a.peer_fenced(1, 1, pair.now);
  pair.b.peer_fenced(1, 1, pair.now);
  pair.open(1, 2);
  EXPECT_EQ(take_front(pair), bytes_of(100, 1));
}

TEST(LinkCopies, ARailThatIsNotUpGetsNoCopies) {
  LinkPair pair(3, with_streams());
  for (Link* end : {&pair.a, &pair.b}) end->rail_failed(1, 1, RailCause::carrier_loss, pair.now);
  post(pair, bytes_of(100, 1));
  EXPECT_TRUE(data_of(pair, 1).empty());
  EXPECT_EQ(data_of(pair, 0).size(), 1U);
  EXPECT_EQ(data_of(pair, 2).size(), 1U);
}

TEST(LinkCopies, DeadlinesRunOnCopies) {
  LinkPair pair(3, with_streams());
  post(pair, bytes_of(100, 1));
  (void)data_of(pair, 0);
  (void)data_of(pair, 1);  // lost
  pair.acknowledge(pair.a, 0);
  pair.pass(40 * ns_per_ms, [&] {
    for (const RailId rail : {RailId{0}, RailId{2}}) pair.exchange(rail);
  });
  EXPECT_EQ(pair.a.state(1), RailState::suspect);
  EXPECT_EQ(pair.a.state(0), RailState::up);
}

// Regression: two silent rails once kept all slots with their copies, and stopped the traffic.
TEST(LinkCopies, SilentRailsDoNotOccupyAllSlots) {
  for (const std::uint16_t spare : {std::uint16_t{2}, std::uint16_t{5}, std::uint16_t{8}}) {
    for (const std::size_t rails : {2U, 3U, 5U}) {
      LinkPair pair(rails, with_streams(4, spare));
      const auto healthy = static_cast<RailId>(rails - 1);
      for (int message = 0; message < 100; ++message) {
        const auto data = bytes_of(64, message);
        post(pair, data);
        for (RailId rail = 0; rail < rails; ++rail)
          if (rail != healthy) (void)pair.pull(pair.a, rail);  // black holes, no path ack
        pair.exchange(healthy);
        // With fewer spare slots than rails a message has no copy, and may be lost until the hedge.
        if (spare < rails - 1) break;
        ASSERT_EQ(take_front(pair), data) << rails << " rails, message " << message;
        pair.now += 5 * ns_per_ms;
        pair.b.tick(pair.now);  // the delayed ack
        pair.exchange(healthy);
      }
    }
  }
}

TEST(LinkCopies, AFullBestRailDoesNotHoldUpTheOthers) {
  for (const RailKind second : {RailKind::tcp, RailKind::control}) {
    LinkPair pair({RailKind::tcp, second}, with_streams());
    const auto other = static_cast<RailId>(1 - pair.a.best_rail());
    post(pair, bytes_of(64, 1));
    EXPECT_TRUE(pair.a.has_frames(other));
    EXPECT_EQ(data_of(pair, other).size(), 1U);
  }
}

TEST(LinkCopies, ARailThatTakesNoBytesGathersNoCopies) {
  LinkPair pair(2, with_streams());
  for (int message = 0; message < 100; ++message) {
    post(pair, bytes_of(64, message));
    pair.exchange(0);
    ASSERT_FALSE(take_front(pair).empty()) << message;
    pair.now += 5 * ns_per_ms;
    pair.b.tick(pair.now);  // the delayed ack
    pair.exchange(0);
    EXPECT_LE(pair.a.queue_depths().copies, 4U);  // as many as slots
  }
}

TEST(LinkCopies, AcksOfStreamsGoToEveryRail) {
  LinkPair pair(3, with_streams());
  post(pair, bytes_of(64, 1));
  pair.deliver(pair.b, 1, data_of(pair, 1));
  (void)take_front(pair);
  pair.now += 10 * ns_per_ms;
  pair.b.tick(pair.now);
  for (RailId rail = 0; rail < 3; ++rail)
    EXPECT_EQ(pair.pull(pair.b, rail, FrameType::ack).size(), 1U) << rail;
}

}  // namespace
}  // namespace r2ccl
