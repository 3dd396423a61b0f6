// The localiser's evidence about an own port: rails to other peers over the same port.
#include "engine/localiser.hpp"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.hpp"

namespace r2ccl {
namespace {

constexpr TimeNs answers_ns = 300 * ns_per_ms;  // time for the answers to the probes

// Two peers over one port, without an engine.
struct TwoPeers {
  LogQueue log;
  Journal journal = std::move(Journal::open("", 1).value());
  Localiser::Peers peers;
  Localiser localiser{peers};

  TwoPeers() {
    for (const std::uint32_t process : {2U, 3U}) {
      PeerDescription description{.process = process,
                                  .label = "rank " + std::to_string(process),
                                  .secret = {},
                                  .rails = {}};
      description.rails.push_back({.kind = RailKind::tcp,
                                   .name = "rail0@node1",
                                   .device = "no-port",
                                   .local_address = {},
                                   .remote_address = {},
                                   .verbs = {}});
      peers[process] =
          std::make_unique<Peer>(description, LinkOptions(), journal, log, std::uint64_t{1});
      peers[process]->started = true;
      bring_up(peers[process]->link);
    }
  }
  static void bring_up(Link& link) {
    ASSERT_TRUE(link.rail_established(0, 1, now_ns()));
    OutFrame frame{};
    while (frame.header.type != FrameType::ping) ASSERT_TRUE(link.next_frame(0, frame, now_ns()));
    FrameHeader answer{};
    answer.type = FrameType::pong;
    answer.number = frame.header.number;
    seal(answer);
    ASSERT_TRUE(link.frame_begin(0, answer, now_ns()));
    ASSERT_EQ(link.state(0), RailState::up);
  }
};

TEST(Localiser, SilenceOfAnotherPeerOverThePortIsEvidenceUnlessItsProcessHasEnded) {
  for (const bool gone : {false, true}) {
    TwoPeers two;
    Link& lost = two.peers[2]->link;
    Link& other = two.peers[3]->link;
    const TimeNs now = other.last_heard(0) + ns_per_ms;
    other.rail_failed(0, 1, RailCause::socket_error, now);
    if (gone) other.set_peer_gone();
    lost.rail_failed(0, 1, RailCause::dead_deadline, now);
    two.localiser.progress(now);
    two.localiser.progress(now + answers_ns);
    EXPECT_EQ(lost.verdict(0), gone ? Verdict::path : Verdict::local_nic);
  }
}

}  // namespace
}  // namespace r2ccl
