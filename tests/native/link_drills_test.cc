// Drills that both ends know of: announced until confirmed, over with the rail's return.
#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "link/drill.hpp"
#include "link_pair.hpp"

namespace r2ccl {
namespace {

using testing::Frame;
using testing::LinkPair;

constexpr std::uint8_t kind = 1;
constexpr TimeNs second = 1000 * ns_per_ms;

// Losses of rails at an end, with the knowledge of a drill at that moment.
struct Losses final : LinkObserver {
  explicit Losses(LinkPair& of, Link& end) : pair(of), link(end) { link.set_observer(this); }
  ~Losses() override { link.set_observer(nullptr); }
  Losses(const Losses&) = delete;
  Losses& operator=(const Losses&) = delete;

  void on_rail_moved(RailId rail, RailState, RailState to, RailCause) override {
    if (to == RailState::down) drilled.emplace_back(rail, link.in_drill(rail, pair.now));
  }
  void on_replay(RailId, std::uint32_t, bool) override {}
  void on_drill(RailId rail, std::uint8_t of_kind, bool ends) override {
    EXPECT_EQ(of_kind, kind);
    told.emplace_back(rail, ends);
  }

  LinkPair& pair;
  Link& link;
  std::vector<std::pair<RailId, bool>> drilled;
  std::vector<std::pair<RailId, bool>> told;
};

void exchange(LinkPair& pair, TimeNs time) {
  pair.pass(time, [&] {
    for (RailId rail = 0; rail < 2; ++rail)
      if (pair.a.connected(rail) && pair.b.connected(rail)) pair.exchange(rail);
  });
}

// Takes rail 1 down at both ends.
void lose(LinkPair& pair, RailCause cause = RailCause::carrier_loss) {
  pair.a.rail_failed(1, pair.a.epoch(1), cause, pair.now);
  pair.exchange(0);
  for (Link* end : {&pair.a, &pair.b}) pair.close_rails(*end);
  pair.exchange(0);
}

void rejoin(LinkPair& pair) {
  const Epoch ended = pair.a.epoch(1);
  for (Link* end : {&pair.a, &pair.b}) end->peer_fenced(1, ended, pair.now);
  pair.open(1, ended + 1);
}

TEST(LinkDrills, TheLongestDrillMayBeginAfterTheTimeOfTheSender) {
  LinkPair pair(2);
  pair.a.begin_drill(1, kind, longest_drill_ns, pair.now + ns_per_ms);
  pair.exchange(0);
  EXPECT_TRUE(pair.a.drill_known(1));
  EXPECT_EQ(pair.b.drill(1, pair.now), kind);
  for (const Link* end : {&pair.a, &pair.b}) EXPECT_EQ(end->state(0), RailState::up);
}

TEST(LinkDrills, BothEndsKnowOfADrillBeforeItsFault) {
  LinkPair pair(2);
  Losses here(pair, pair.a);
  Losses there(pair, pair.b);
  pair.a.begin_drill(1, kind, 10 * second, pair.now);
  EXPECT_FALSE(pair.a.drill_known(1));
  pair.exchange(0);
  EXPECT_TRUE(pair.a.drill_known(1));
  EXPECT_EQ(pair.b.drill(1, pair.now), kind);
  EXPECT_EQ(pair.b.drill(0, pair.now), no_drill);
  // The fault strikes at the peer first, which sees no reason.
  pair.b.rail_failed(1, 1, RailCause::socket_error, pair.now);
  pair.exchange(0);
  const std::vector<std::pair<RailId, bool>> drilled{{1, true}};
  EXPECT_EQ(here.drilled, drilled);
  EXPECT_EQ(there.drilled, drilled);
  EXPECT_EQ(there.told, (std::vector<std::pair<RailId, bool>>{{1, false}}));
}

TEST(LinkDrills, AnotherRailDuringADrillIsLostByARealFault) {
  LinkPair pair(3);
  Losses there(pair, pair.b);
  pair.a.begin_drill(1, kind, 10 * second, pair.now);
  pair.exchange(0);
  pair.b.rail_failed(2, 1, RailCause::carrier_loss, pair.now);
  EXPECT_EQ(there.drilled, (std::vector<std::pair<RailId, bool>>{{2, false}}));
}

TEST(LinkDrills, ALostAnnouncementIsRepeatedUntilConfirmed) {
  LinkPair pair(2);
  pair.a.begin_drill(1, kind, 10 * second, pair.now);
  for (RailId rail = 0; rail < 2; ++rail)  // lost
    EXPECT_EQ(pair.pull(pair.a, rail, FrameType::drill).size(), 1U);
  exchange(pair, 50 * ns_per_ms);
  EXPECT_TRUE(pair.a.drill_known(1));
  EXPECT_TRUE(pair.b.in_drill(1, pair.now));
  // Confirmed announcements are not repeated.
  std::size_t frames = 0;
  pair.pass(second, [&] { frames += pair.pull(pair.a, 0, FrameType::drill).size(); });
  EXPECT_EQ(frames, 0U);
}

TEST(LinkDrills, ALostConfirmationIsRepeated) {
  LinkPair pair(1);
  Losses there(pair, pair.b);
  pair.a.begin_drill(0, kind, 10 * second, pair.now);
  pair.deliver(pair.b, 0, pair.pull(pair.a, 0));
  EXPECT_EQ(pair.pull(pair.b, 0, FrameType::drill_ack).size(), 1U);  // lost
  for (Link* end : {&pair.a, &pair.b}) pair.acknowledge(*end, 0);
  EXPECT_FALSE(pair.a.drill_known(0));
  pair.pass(50 * ns_per_ms, [&] { pair.exchange(0); });
  EXPECT_TRUE(pair.a.drill_known(0));
  EXPECT_EQ(there.told, (std::vector<std::pair<RailId, bool>>{{0, false}})) << "told once";
}

// A drill on a port has rails to several peers, and the others may go on.
TEST(LinkDrills, APeerThatHasEndedNeedNotConfirm) {
  LinkPair pair(2);
  pair.a.begin_drill(1, kind, 10 * second, pair.now);
  pair.a.set_peer_gone();
  EXPECT_TRUE(pair.a.drill_known(1));
  LinkPair other(2);
  other.b.send_close();
  other.exchange(0);
  other.a.begin_drill(1, kind, 10 * second, other.now);
  EXPECT_TRUE(other.a.drill_known(1));
}

// The rails carry the announcements at different speeds.
TEST(LinkDrills, AnOldAnnouncementAfterTheEndChangesNothing) {
  LinkPair pair(2);
  Losses there(pair, pair.b);
  pair.a.begin_drill(1, kind, 10 * second, pair.now);
  const auto late = pair.pull(pair.a, 0, FrameType::drill);
  ASSERT_EQ(late.size(), 1U);
  pair.a.end_drill(1, pair.now);
  pair.exchange(1);
  pair.now += 2 * silence_grace_ns;
  for (int copy = 0; copy < 2; ++copy) pair.deliver(pair.b, 0, late);
  EXPECT_FALSE(pair.b.in_drill(1, pair.now));
  EXPECT_EQ(there.told, (std::vector<std::pair<RailId, bool>>{{1, true}}));
  // An old number is confirmed by the newest.
  const auto answers = pair.pull(pair.b, 0, FrameType::drill_ack);
  ASSERT_EQ(answers.size(), 1U);
  EXPECT_EQ(answers[0].header.epoch, 2U);
}

TEST(LinkDrills, ADrillIsOverWhenItsRailIsBack) {
  LinkPair pair(2);
  Losses here(pair, pair.a);
  Losses there(pair, pair.b);
  pair.a.begin_drill(1, kind, 10 * second, pair.now);
  pair.exchange(0);
  lose(pair, RailCause::injected);
  rejoin(pair);
  EXPECT_TRUE(pair.b.in_drill(1, pair.now)) << "a flap: the drill goes on";
  lose(pair, RailCause::injected);
  pair.a.end_drill(1, pair.now);
  pair.exchange(0);
  EXPECT_TRUE(pair.a.in_drill(1, pair.now)) << "the rail is not back yet";
  EXPECT_TRUE(pair.b.in_drill(1, pair.now));
  rejoin(pair);
  EXPECT_FALSE(pair.a.in_drill(1, pair.now));
  EXPECT_FALSE(pair.b.in_drill(1, pair.now));
  lose(pair);
  const std::vector<std::pair<RailId, bool>> expected{{1, true}, {1, true}, {1, false}};
  EXPECT_EQ(here.drilled, expected);
  EXPECT_EQ(there.drilled, expected);
  EXPECT_EQ(there.told, (std::vector<std::pair<RailId, bool>>{{1, false}, {1, true}}));
}

TEST(LinkDrills, ARailThatStaysDownAfterItsDrillIsAFault) {
  LinkPair pair(2);
  pair.a.begin_drill(1, kind, second, pair.now);
  pair.exchange(0);
  lose(pair);
  pair.a.end_drill(1, pair.now);
  pair.exchange(0);
  exchange(pair, rejoin_grace_ns - 10 * ns_per_ms);
  EXPECT_TRUE(pair.b.in_drill(1, pair.now));
  exchange(pair, 20 * ns_per_ms);
  EXPECT_FALSE(pair.a.in_drill(1, pair.now));
  EXPECT_FALSE(pair.b.in_drill(1, pair.now));
}

// The process of the drill may be cut off, and then cannot tell the end.
TEST(LinkDrills, ADrillEndsAtThePeerWithItsTime) {
  LinkPair pair(2);
  pair.a.begin_drill(1, kind, second, pair.now);
  pair.exchange(0);
  pair.now += second + rejoin_grace_ns - ns_per_ms;
  EXPECT_TRUE(pair.b.in_drill(1, pair.now));
  pair.now += ns_per_ms;
  EXPECT_FALSE(pair.b.in_drill(1, pair.now));
}

// A fault of the fault file strikes at once.  The notice of the loss says that the fault is a test.
TEST(LinkDrills, ALossByATestIsMarkedAtThePeerWithoutAnAnnouncement) {
  LinkPair pair(2);
  Losses there(pair, pair.b);
  pair.a.set_injected(1, true);
  pair.a.rail_failed(1, 1, RailCause::injected, pair.now);
  pair.exchange(0);
  EXPECT_EQ(there.drilled, (std::vector<std::pair<RailId, bool>>{{1, true}}));
  EXPECT_EQ(pair.b.drill(1, pair.now), unknown_drill);
}

// The rail is open again before the notice leaves.
TEST(LinkDrills, LateNewsOfADrillMarksNoLossOfTheNextEpoch) {
  LinkPair pair(2);
  Losses there(pair, pair.b);
  pair.a.set_injected(1, true);
  for (Link* end : {&pair.a, &pair.b}) {
    end->rail_failed(1, 1, RailCause::socket_error, pair.now);
    pair.close_rails(*end);
  }
  rejoin(pair);
  pair.a.set_injected(1, false);
  pair.exchange(0);
  EXPECT_FALSE(pair.b.in_drill(1, pair.now));
  lose(pair);
  EXPECT_EQ(there.drilled, (std::vector<std::pair<RailId, bool>>{{1, false}, {1, false}}));
}

TEST(LinkDrills, ImpossibleAnnouncementsAreRejected) {
  Frame good{};
  good.header.type = FrameType::drill;
  good.header.number = 1;
  good.header.epoch = 1;
  good.header.slot = kind;
  good.header.delivered = 1;
  std::vector<Frame> wrong(6, good);
  wrong[0].header.number = 2;
  wrong[1].header.epoch = 0;
  wrong[2].header.slot = no_drill;
  wrong[3].header.slot = 256;
  wrong[4].header.delivered = static_cast<std::uint64_t>(longest_drill_ns) + 1;
  wrong[5].header.type = FrameType::drill_ack;  // nothing is announced
  for (Frame& frame : wrong) {
    LinkPair pair(2);
    seal(frame.header);
    (void)pair.deliver(pair.a, 0, frame);
    EXPECT_EQ(pair.a.cause(0), RailCause::protocol);
    EXPECT_FALSE(pair.a.in_drill(1, pair.now));
  }
  LinkPair pair(2);
  seal(good.header);
  EXPECT_TRUE(pair.deliver(pair.a, 0, good));
  EXPECT_TRUE(pair.a.in_drill(1, pair.now));
}

}  // namespace
}  // namespace r2ccl
