// Memory that one-sided rails (RDMA writes) access directly: slots, staging and targets.
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
  [[nodiscard]] bool is_registered(std::span<const std::byte> memory) const override {
    return memory.data() == registered.data() && memory.size() <= registered.size();
  }
  void revoke(std::span<const std::byte> memory) override { revoked = memory.size(); }

  bool exhausted = false;
  std::vector<std::byte> registered;
  std::size_t revoked = 0;
  std::vector<std::vector<std::byte>> blocks;
  std::set<std::byte*> in_use;
};

LinkOptions options(Memory& memory) {
  LinkOptions made;
  made.memory = &memory;
  made.fallback = false;
  return made;
}

// Two links with a verbs rail and a TCP rail; the test carries the frames.
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
  // Returns all frames ready for the rail.
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
  // Delivers a frame like an RDMA device: writes the payload to the remote address, then the
  // header.
  void place(Link& to, RailId rail, const OutFrame& frame) {
    std::copy_n(frame.payload, frame.header.payload_bytes,
                reinterpret_cast<std::byte*>(frame.remote_address));
    ASSERT_TRUE(to.frame_begin(rail, frame.header, now));
    to.payload_placed(rail, now);
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
  std::array<std::uint64_t, 2> pulled{};  // bytes pulled from `a`, per rail
};

TEST(LinkMemory, DataWaitsForThePeersSlotAddress) {
  Ends ends;
  ends.open(0, 1);
  ends.exchange(0);
  ASSERT_EQ(ends.a.state(0), RailState::up);
  ends.post(ends.a, 100);
  auto frames = ends.pull(ends.a, 0);
  EXPECT_EQ(Ends::count(frames, FrameType::data), 0);
  EXPECT_EQ(Ends::count(frames, FrameType::slots), 1);  // slots of `a` itself
  for (const OutFrame& frame : frames) ends.deliver(ends.b, 0, frame);

  const InStream& slots = ends.b.in_stream(communicator);
  for (const OutFrame& frame : ends.pull(ends.b, 0)) ends.deliver(ends.a, 0, frame);
  frames = ends.pull(ends.a, 0);
  ASSERT_EQ(Ends::count(frames, FrameType::data), 1);
  EXPECT_EQ(frames.back().remote_address, reinterpret_cast<std::uintptr_t>(slots.block().base()));
}

TEST(LinkMemory, ATcpRailCarriesDataWithoutASlotAddress) {
  Ends ends;
  ends.open(1, 1);
  ends.exchange(1);
  ends.post(ends.a, 100);
  EXPECT_EQ(Ends::count(ends.pull(ends.a, 1), FrameType::data), 1);
}

TEST(LinkMemory, AnAttemptIsResolvedByLandingNotByThePathAck) {
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
  EXPECT_EQ(ends.a.queue_depths().attempts, 1U);
  ends.a.attempts_landed(0, 1, ends.pulled[0] + 1, ends.now);  // more than was sent
  EXPECT_EQ(ends.a.queue_depths().attempts, 1U);
  ends.a.attempts_landed(0, 1, ends.pulled[0], ends.now);
  EXPECT_EQ(ends.a.queue_depths().attempts, 0U);
}

TEST(LinkMemory, MemoryOfAClosedStreamIsKeptWhileThePeerMayWriteIt) {
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
  EXPECT_EQ(ends.a.queue_depths().deferred_frees, 1U);

  ends.exchange(0);  // `a` has released the slots of `b`; `b` still uses the slots of `a`
  EXPECT_EQ(ends.a.queue_depths().deferred_frees, 1U);
  ends.b.close_streams(communicator);
  for (const OutFrame& frame : ends.pull(ends.b, 0)) ends.deliver(ends.a, 0, frame);
  // The frames of `a` are not acknowledged, so a device may still read its staging memory.
  EXPECT_EQ(ends.a.queue_depths().deferred_frees, 1U);
  ends.a.rail_failed(0, 1, RailCause::injected, ends.now);
  ends.a.rail_closed(0, 1, ends.now);
  ends.a.peer_fenced(0, 1, ends.now);
  EXPECT_EQ(ends.a.queue_depths().deferred_frees, 0U);
  EXPECT_TRUE(ends.a_memory.in_use.empty());
}

TEST(LinkMemory, SlotsAreOfferedAgainInTheNextEpoch) {
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

TEST(LinkMemory, ExhaustedMemoryMakesStreamsUnreachable) {
  Ends ends;
  ends.a_memory.exhausted = true;
  (void)ends.a.in_stream(communicator);
  EXPECT_FALSE(ends.a.streams_reachable(communicator));
  (void)ends.b.in_stream(communicator);
  EXPECT_TRUE(ends.b.streams_reachable(communicator));
}

TEST(LinkMemory, SlotsForACommunicatorClosedHereAreReleasedAtOnce) {
  Ends ends;
  ends.open(0, 1);
  ends.exchange(0);
  (void)ends.a.in_stream(communicator);
  ends.a.close_streams(communicator);
  (void)ends.b.in_stream(communicator);
  for (const OutFrame& frame : ends.pull(ends.b, 0)) ends.deliver(ends.a, 0, frame);
  EXPECT_EQ(Ends::count(ends.pull(ends.a, 0), FrameType::released), 1);
}

// ---- targets: caller memory for arriving messages ----

constexpr std::size_t result_bytes = 300'000;  // 3 chunks, 1 message

struct Targets : Ends {
  explicit Targets(std::size_t bytes = result_bytes) {
    for (const RailId rail : {RailId{0}, RailId{1}}) {
      open(rail, 1);
      exchange(rail);
    }
    (void)a.out_stream(communicator);
    in = &b.in_stream(communicator);
    b_memory.registered.resize(bytes);
    exchange(0);
  }
  void expect(std::uint64_t skip = 0) { (void)b.offer_target(*in, skip, b_memory.registered); }
  std::vector<OutFrame> send(std::size_t bytes = result_bytes) {
    post(a, bytes);
    return pull(a, 0);
  }
  [[nodiscard]] bool in_result(const OutFrame& frame) const {
    const auto begin = reinterpret_cast<std::uintptr_t>(b_memory.registered.data());
    return frame.remote_address >= begin &&
           frame.remote_address + frame.header.payload_bytes <= begin + b_memory.registered.size();
  }
  [[nodiscard]] bool is_whole() const {
    return in->front() != nullptr && std::equal(data.begin(), data.end(), in->front_data());
  }
  InStream* in = nullptr;
};

TEST(LinkTarget, AMessageLandsInTheReceiversTarget) {
  Targets ends;
  ends.expect();
  ends.exchange(0);
  const auto frames = ends.send();
  ASSERT_EQ(frames.size(), 3U);
  for (const OutFrame& frame : frames) {
    EXPECT_TRUE(ends.in_result(frame));
    ends.place(ends.b, 0, frame);
  }
  EXPECT_TRUE(ends.is_whole());
  EXPECT_EQ(ends.in->front_data(), ends.b_memory.registered.data());
  ends.b.consume(*ends.in, ends.now);
  EXPECT_TRUE(ends.b.reclaim_target(*ends.in, /*received=*/true, ends.now));
  EXPECT_EQ(ends.b.state(0), RailState::up);
}

TEST(LinkTarget, MessagesSentBeforeTheOfferAreCopiedFromSlotsToTheTarget) {
  Targets ends;
  const auto frames = ends.send();
  ends.expect();
  for (const OutFrame& frame : frames) {
    EXPECT_FALSE(ends.in_result(frame));
    ends.place(ends.b, 0, frame);
  }
  EXPECT_TRUE(ends.is_whole());
  EXPECT_EQ(ends.in->front_data(), ends.b_memory.registered.data());
}

TEST(LinkTarget, AMessageAlreadyBegunStaysInItsSlot) {
  Targets ends;
  const auto early = ends.send();
  ends.place(ends.b, 0, early[0]);
  ends.expect();
  ends.exchange(1);
  for (const OutFrame& frame : {early[1], early[2]}) ends.place(ends.b, 0, frame);
  EXPECT_TRUE(ends.is_whole());
  EXPECT_NE(ends.in->front_data(), ends.b_memory.registered.data());
}

TEST(LinkTarget, OnlyTheIntendedMessageOfEqualSizeUsesATarget) {
  for (const std::size_t other : {result_bytes - 1, result_bytes + 1}) {
    Targets ends;
    ends.expect();
    ends.exchange(0);
    for (const OutFrame& frame : ends.send(other)) EXPECT_FALSE(ends.in_result(frame));
  }
  Targets ends;
  ends.expect(/*skip=*/1);
  ends.exchange(0);
  for (const OutFrame& frame : ends.send()) EXPECT_FALSE(ends.in_result(frame));
}

TEST(LinkTarget, SmallOrUnknownMemoryIsNotOffered) {
  Targets small(1000);
  small.expect();
  EXPECT_EQ(Ends::count(small.pull(small.b, 0), FrameType::target), 0);
  Targets unknown;
  std::vector<std::byte> other(result_bytes);
  (void)unknown.b.offer_target(*unknown.in, 0, other);
  EXPECT_EQ(Ends::count(unknown.pull(unknown.b, 0), FrameType::target), 0);
  for (const OutFrame& frame : unknown.send()) unknown.place(unknown.b, 0, frame);
  EXPECT_EQ(unknown.in->front_data(), other.data());  // copied by software
}

TEST(LinkTarget, AReplayUsesTheSlotAndTheTargetIsReclaimedAfterTheFence) {
  Targets ends;
  ends.expect();
  ends.exchange(0);
  const auto first = ends.send();
  ends.place(ends.b, 0, first[0]);
  ends.place(ends.b, 0, first[1]);
  ends.a.rail_failed(0, 1, RailCause::injected, ends.now);  // chunk 3 is still on the path
  std::size_t replayed = 0;
  for (const OutFrame& frame : ends.pull(ends.a, 1)) {
    if (frame.header.type == FrameType::data) {
      ++replayed;
      EXPECT_EQ(frame.header.epoch, 1U);  // rail 0 may still write the target
      EXPECT_EQ(frame.header.flags & frame_flag::in_target, 0);
    }
    if (frame.header.type != FrameType::rail_down) ends.deliver(ends.b, 1, frame);
  }
  EXPECT_EQ(replayed, 3U);
  EXPECT_TRUE(ends.is_whole());
  ends.b.consume(*ends.in, ends.now);

  ASSERT_EQ(ends.b.state(0), RailState::up);
  EXPECT_FALSE(ends.b.reclaim_target(*ends.in, /*received=*/true, ends.now));
  EXPECT_EQ(ends.b.state(0), RailState::up) << "it may come yet";
  ends.now += 21 * ns_per_ms;
  EXPECT_FALSE(ends.b.reclaim_target(*ends.in, /*received=*/true, ends.now));
  EXPECT_EQ(ends.b.state(0), RailState::down);
  EXPECT_EQ(ends.b.cause(0), RailCause::recalled);
  EXPECT_FALSE(ends.b.reclaim_target(*ends.in, /*received=*/true, ends.now));
  ends.b.rail_closed(0, 1, ends.now);  // our end alone
  EXPECT_TRUE(ends.b.reclaim_target(*ends.in, /*received=*/true, ends.now));
}

TEST(LinkTarget, ALateFirstAttemptLeavesTheRailUp) {
  Targets ends;
  ends.expect();
  ends.exchange(0);
  const auto first = ends.send();
  ends.a.rail_failed(0, 1, RailCause::injected, ends.now);
  for (const OutFrame& frame : ends.pull(ends.a, 1))
    if (frame.header.type != FrameType::rail_down) ends.deliver(ends.b, 1, frame);
  EXPECT_TRUE(ends.is_whole());
  for (const OutFrame& frame : first) ends.place(ends.b, 0, frame);
  ends.b.consume(*ends.in, ends.now);
  EXPECT_TRUE(ends.b.reclaim_target(*ends.in, /*received=*/true, ends.now));
  EXPECT_EQ(ends.b.state(0), RailState::up);
}

TEST(LinkTarget, AFailedCallTakesDownEveryRailThatMayWriteTheTarget) {
  Targets ends;
  ends.expect();
  ends.exchange(0);
  EXPECT_FALSE(ends.b.reclaim_target(*ends.in, /*received=*/false, ends.now));
  EXPECT_EQ(ends.b.state(0), RailState::down);
  EXPECT_EQ(ends.b.state(1), RailState::up);
  ends.b.revoke_target(*ends.in);
  EXPECT_EQ(ends.b_memory.revoked, result_bytes);
  EXPECT_TRUE(ends.b.reclaim_target(*ends.in, /*received=*/false, ends.now));
}

TEST(LinkTarget, AFrameForAMissingTargetFailsTheRail) {
  Targets ends;
  OutFrame frame = ends.send()[0];
  frame.header.flags |= frame_flag::in_target;
  seal(frame.header);
  EXPECT_FALSE(ends.b.frame_begin(0, frame.header, ends.now));
  EXPECT_EQ(ends.b.cause(0), RailCause::protocol);
}

}  // namespace
}  // namespace r2ccl
