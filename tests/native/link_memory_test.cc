// Memory that rails of one-sided writes reach by themselves.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <set>
#include <vector>

#include "link/link.hpp"

namespace r2ccl {
namespace {

constexpr std::uint64_t communicator = 7;

class Memory final : public StreamMemory {
 public:
  std::byte* allocate(std::size_t bytes) override {
    if (exhausted) return nullptr;
    blocks.emplace_back(bytes);
    in_use.insert(blocks.back().data());
    return blocks.back().data();
  }
  void release(std::byte* memory) override { EXPECT_EQ(in_use.erase(memory), 1U); }

  bool exhausted = false;
  std::vector<std::vector<std::byte>> blocks;
  std::set<std::byte*> in_use;
};

LinkOptions options(Memory& memory) {
  LinkOptions made;
  made.memory = &memory;
  made.fallback = false;
  return made;
}

// Two links with a verbs rail and a TCP rail, whose frames the test carries.
struct Ends {
  TimeNs now = 1;
  Memory a_memory, b_memory;
  Link a{options(a_memory), std::array{RailKind::verbs, RailKind::tcp}, 1};
  Link b{options(b_memory), std::array{RailKind::verbs, RailKind::tcp}, 2};

  Ends() {
    for (Link* link : {&a, &b}) link->start(now);
  }
  void open(RailId rail, Epoch epoch) {
    for (Link* link : {&a, &b}) ASSERT_TRUE(link->rail_established(rail, epoch, now));
  }
  // All that an end has for a rail.
  std::vector<OutFrame> pull(Link& from, RailId rail) {
    std::vector<OutFrame> frames;
    for (OutFrame frame; from.next_frame(rail, frame, now);) {
      frames.push_back(frame);
      if (&from == &a) pulled[rail] += sizeof(FrameHeader) + frame.header.payload_bytes;
    }
    return frames;
  }
  void deliver(Link& to, RailId rail, const OutFrame& frame) {
    ASSERT_TRUE(to.frame_begin(rail, frame.header, now));
    std::vector<std::byte> payload(frame.payload, frame.payload + frame.header.payload_bytes);
    for (std::size_t at = 0; at < payload.size();) {
      const auto room = to.payload_room(rail);
      const std::size_t bytes = std::min(room.size(), payload.size() - at);
      std::copy_n(payload.begin() + static_cast<std::ptrdiff_t>(at), bytes, room.begin());
      to.payload_filled(rail, bytes, now);
      at += bytes;
    }
  }
  void exchange(RailId rail) {
    for (int round = 0; round < 6; ++round) {
      for (auto [from, to] : {std::pair{&a, &b}, std::pair{&b, &a}})
        for (const OutFrame& frame : pull(*from, rail)) deliver(*to, rail, frame);
    }
  }
  static std::ptrdiff_t count(const std::vector<OutFrame>& frames, FrameType type) {
    return std::count_if(frames.begin(), frames.end(),
                         [type](const OutFrame& frame) { return frame.header.type == type; });
  }
  void post(Link& link, std::size_t bytes) {
    data.assign(bytes, std::byte{1});
    link.post(link.out_stream(communicator), data, {}, now);
  }
  std::vector<std::byte> data;
  std::array<std::uint64_t, 2> pulled{};  // bytes that a rail took from a
};

TEST(LinkMemory, DataWaitsUntilThePeerHasSaidWhereItsSlotsAre) {
  Ends ends;
  ends.open(0, 1);
  ends.exchange(0);
  ASSERT_EQ(ends.a.state(0), RailState::up);
  ends.post(ends.a, 100);
  auto frames = ends.pull(ends.a, 0);
  EXPECT_EQ(Ends::count(frames, FrameType::data), 0);
  EXPECT_EQ(Ends::count(frames, FrameType::slots), 1);  // our own: data may come back
  for (const OutFrame& frame : frames) ends.deliver(ends.b, 0, frame);

  const InStream& slots = ends.b.in_stream(communicator);
  for (const OutFrame& frame : ends.pull(ends.b, 0)) ends.deliver(ends.a, 0, frame);
  frames = ends.pull(ends.a, 0);
  ASSERT_EQ(Ends::count(frames, FrameType::data), 1);
  EXPECT_EQ(frames.back().remote_address, reinterpret_cast<std::uintptr_t>(slots.block().base()));
}

TEST(LinkMemory, AnotherRailCarriesWhatOneCannotPlaceYet) {
  Ends ends;
  ends.open(1, 1);
  ends.exchange(1);
  ends.post(ends.a, 100);
  EXPECT_EQ(Ends::count(ends.pull(ends.a, 1), FrameType::data), 1);
}

TEST(LinkMemory, AnAttemptIsResolvedWhenItHasLandedNotWhenItIsAcknowledged) {
  Ends ends;
  for (const RailId rail : {RailId{0}, RailId{1}}) {
    ends.open(rail, 1);
    ends.exchange(rail);
  }
  (void)ends.b.in_stream(communicator);
  (void)ends.a.out_stream(communicator);
  ends.exchange(0);
  ends.post(ends.a, 100);
  ASSERT_EQ(Ends::count(ends.pull(ends.a, 0), FrameType::data), 1);
  ends.a.path_acked(0, 1, ends.pulled[0], /*peer_limited=*/false, ends.now);
  EXPECT_EQ(ends.a.load().attempts, 1U);
  ends.a.attempts_landed(0, 1, ends.pulled[0] + 1, ends.now);  // more than was sent
  EXPECT_EQ(ends.a.load().attempts, 1U);
  ends.a.attempts_landed(0, 1, ends.pulled[0], ends.now);
  EXPECT_EQ(ends.a.load().attempts, 0U);
}

TEST(LinkMemory, OfAClosedStreamIsKeptUntilThePeerWritesItNoMore) {
  Ends ends;
  ends.open(0, 1);
  (void)ends.a.in_stream(communicator);
  (void)ends.b.in_stream(communicator);
  ends.exchange(0);
  const std::size_t both = ends.a_memory.in_use.size();
  ASSERT_EQ(both, 2U);  // slots and staging
  ends.a.path_acked(0, 1, 0, false, ends.now);
  ends.a.close_streams(communicator);
  EXPECT_EQ(ends.a_memory.in_use.size(), both);
  EXPECT_EQ(ends.a.load().buried, 1U);

  ends.exchange(0);  // a has released b's slots; b still uses a's
  EXPECT_EQ(ends.a.load().buried, 1U);
  ends.b.close_streams(communicator);
  for (const OutFrame& frame : ends.pull(ends.b, 0)) ends.deliver(ends.a, 0, frame);
  // What a has sent is not acknowledged, so its staging may still be read.
  EXPECT_EQ(ends.a.load().buried, 1U);
  ends.a.rail_failed(0, 1, RailCause::injected, ends.now);
  ends.a.rail_closed(0, 1, ends.now);
  ends.a.peer_fenced(0, 1, ends.now);
  EXPECT_EQ(ends.a.load().buried, 0U);
  EXPECT_TRUE(ends.a_memory.in_use.empty());
}

TEST(LinkMemory, OfAnEndedEpochIsOfferedAgainInTheNext) {
  Ends ends;
  ends.open(0, 1);
  (void)ends.a.in_stream(communicator);
  ends.exchange(0);
  for (Link* link : {&ends.a, &ends.b}) {
    link->rail_failed(0, 1, RailCause::injected, ends.now);
    link->rail_closed(0, 1, ends.now);
    link->peer_fenced(0, 1, ends.now);
  }
  ends.open(0, 2);
  EXPECT_EQ(Ends::count(ends.pull(ends.a, 0), FrameType::slots), 1);
}

TEST(LinkMemory, ThatIsNotToBeHadIsNoticed) {
  Ends ends;
  ends.a_memory.exhausted = true;
  (void)ends.a.in_stream(communicator);
  EXPECT_FALSE(ends.a.streams_reachable(communicator));
  (void)ends.b.in_stream(communicator);
  EXPECT_TRUE(ends.b.streams_reachable(communicator));
}

TEST(LinkMemory, OfACommunicatorThatIsClosedHereIsReleasedAtOnce) {
  Ends ends;
  ends.open(0, 1);
  ends.exchange(0);
  (void)ends.a.in_stream(communicator);
  ends.a.close_streams(communicator);
  (void)ends.b.in_stream(communicator);
  for (const OutFrame& frame : ends.pull(ends.b, 0)) ends.deliver(ends.a, 0, frame);
  EXPECT_EQ(Ends::count(ends.pull(ends.a, 0), FrameType::released), 1);
}

}  // namespace
}  // namespace r2ccl
