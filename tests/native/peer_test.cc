// A peer's rails that have never been up, that wait for better rails, or that share a port; the
// location of faults, and the evidence against a process.
#include "engine/peer.hpp"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "drivers/ip_address.hpp"
#include "engine/engine.hpp"
#include "engine/localiser.hpp"
#include "eventually.hpp"
#include "peer_alone.hpp"

namespace r2ccl {
namespace {

using testing::accepting;
using testing::Alone;
using testing::connecting;
using testing::eventually;
using testing::Lines;
using testing::peer_of;
using testing::rail_of;
using testing::warnings;

// A TCP port of this host.  `listens`: connections are accepted by the kernel, and never answered.
struct ClosedPort {
  FileDescriptor socket{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
  SocketAddress at = SocketAddress::ip(IpAddress::parse("127.0.0.2").value(), 0);

  explicit ClosedPort(bool listens) {
    EXPECT_EQ(::bind(socket.get(), at.get(), at.size), 0);
    if (listens) {
      EXPECT_EQ(::listen(socket.get(), 32), 0);
    }
    EXPECT_EQ(::getsockname(socket.get(), at.get(), &at.size), 0);
  }
};

// Two engines whose rail 0 works and whose rail 1 leads to a port without an engine.
struct Pair {
  std::shared_ptr<Engine> acceptor;
  std::shared_ptr<Engine> connector;

  explicit Pair(std::uint16_t wrong_port, bool reserve = false, RailKind kind = RailKind::tcp,
                double connect_timeout_s = 2.0) {
    Config config;
    config.connect_timeout_s = connect_timeout_s;  // the news is due after half of it
    config.handshake_timeout_ms = 100;
    acceptor = Engine::create(config, accepting).value();
    connector = Engine::create(config, connecting).value();
    auto port = acceptor->listen({.kind = kind, .device = "", .address = "127.0.0.1"});
    EXPECT_TRUE(port.ok());
    std::vector<RailDescription> rails{rail_of(0, port.value()), rail_of(1, wrong_port)};
    rails[0].reserve = reserve;
    rails[0].kind = kind;
    EXPECT_TRUE(acceptor->add_peer(peer_of(connecting, rails)).ok());
    EXPECT_TRUE(connector->add_peer(peer_of(accepting, rails)).ok());
    Status other;
    std::thread waiting([&] { other = acceptor->connect({connecting}, testing::patience_s); });
    const Status own = connector->connect({accepting}, testing::patience_s);
    waiting.join();
    EXPECT_TRUE(own.ok()) << own.message();
    EXPECT_TRUE(other.ok()) << other.message();
  }
};

// Returns the warnings about rails never up, once there is one and time for a second has passed.
Lines news_of(Engine& engine) {
  Lines news;
  const auto read = [&] {
    for (std::string& line : warnings(engine.log(), "never been up"))
      news.push_back(std::move(line));
    return !news.empty();
  };
  EXPECT_TRUE(eventually(read, "a warning about a rail that has never been up"));
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  (void)read();
  return news;
}

TEST(NeverUp, IsToldOnceAtEachEndWithTheReason) {
  const ClosedPort closed(/*listens=*/false);
  // A rail 0 that is late, on a busy machine, would be news, too.
  const Pair pair(closed.at.port(), /*reserve=*/false, RailKind::tcp, /*connect_timeout_s=*/6.0);
  const Lines news = news_of(*pair.connector);
  ASSERT_EQ(news.size(), 1U);
  EXPECT_EQ(news[0], "rail1@node1 to rank 1 has never been up: " + closed.at.text() +
                         " refuses the connection from 127.0.0.2: no listener, or a packet filter");
  const Lines there = news_of(*pair.acceptor);
  ASSERT_EQ(there.size(), 1U);
  EXPECT_EQ(there[0],
            "rail1@node1 to rank 2 has never been up: no connection of the peer has arrived at "
            "127.0.0.2; its log has the reason");
  const auto rails = pair.connector->rails();
  EXPECT_TRUE(rails[0].been_up);
  EXPECT_EQ(rails[0].never_up, "");
  EXPECT_FALSE(rails[1].been_up);
  EXPECT_EQ(rails[1].never_up, "refused");
  EXPECT_EQ(pair.acceptor->rails()[1].never_up, "no_connection");
}

TEST(NeverUp, ASilentPortIsNoAnswer) {
  const ClosedPort silent(/*listens=*/true);
  const Pair pair(silent.at.port());
  EXPECT_TRUE(eventually([&] { return pair.connector->rails()[1].never_up == "no_answer"; },
                         "the attempt ends without an answer"));
}

// The reserve is up at once.  The better rail is not there, and the start does not wait for it
// without end.
TEST(NeverUp, AStartGoesOnWithAReserve) {
  const ClosedPort closed(/*listens=*/false);
  const Pair pair(closed.at.port(), /*reserve=*/true);
  EXPECT_TRUE(pair.connector->rails()[0].reserve);
  EXPECT_EQ(pair.connector->rails()[0].state, RailState::up);
}

// The management NIC is up at once.  The only data rail is not there.
TEST(NeverUp, AStartGoesOnOverTheManagementNic) {
  const ClosedPort closed(/*listens=*/false);
  const Pair pair(closed.at.port(), /*reserve=*/false, RailKind::control);
  EXPECT_EQ(pair.connector->rails()[0].state, RailState::up);
  EXPECT_FALSE(pair.connector->rails()[1].been_up);
}

TEST(NeverUp, TheJournalHasTheReason) {
  Alone alone({rail_of(0), rail_of(1), rail_of(2), rail_of(3)});
  alone.peer.rails[0].own_address = true;
  alone.lose(1, RailCause::probation);
  alone.peer.rails[2].connect_fault = connect_fault_of(EHOSTUNREACH);
  alone.peer.publish();
  const std::vector<ConnectFault> expected{ConnectFault::own_address,
                                           ConnectFault::probe_unanswered, ConnectFault::no_route,
                                           ConnectFault::none};
  for (std::uint32_t entry = 0; entry < expected.size(); ++entry) {
    EXPECT_EQ(alone.journal.rail(entry)->connect_fault, static_cast<std::uint8_t>(expected[entry]));
    EXPECT_EQ(alone.journal.rail(entry)->been_up, 0);
  }
}

TEST(NeverUp, AProbeWithoutAnAnswerIsToldAsAnMtu) {
  Alone alone({rail_of(0)});
  alone.lose(0, RailCause::probation);
  EXPECT_NE(alone.peer.describe_never_up(0).find("MTU"), std::string::npos);
}

// Each attempt fails; only the news of the rail is a warning.
TEST(NeverUp, FailedAttemptsAreNoWarnings) {
  Alone alone({rail_of(0)});
  alone.lose(0, RailCause::probation);
  EXPECT_EQ(warnings(alone.log, ""), Lines());
  Alone lost({rail_of(0)});
  lost.bring_up(0);
  lost.peer.link.rail_failed(0, 1, RailCause::dead_deadline, now_ns());
  EXPECT_EQ(warnings(lost.log, "UP -> DOWN (dead_deadline)").size(), 1U);
}

TEST(NeverUp, IsNewsAtHalfOfTheConnectTimeoutWithoutAnyRail) {
  Alone alone({rail_of(0)});
  const TimeNs begin = now_ns();
  alone.peer.started = true;
  alone.peer.started_at = begin;
  alone.peer.tell_never_up(1000 * ns_per_ms, begin + 499 * ns_per_ms);
  EXPECT_EQ(warnings(alone.log, "never been up").size(), 0U);
  for (int again = 0; again < 3; ++again)
    alone.peer.tell_never_up(1000 * ns_per_ms, begin + 500 * ns_per_ms);
  EXPECT_EQ(warnings(alone.log, "never been up").size(), 1U);
}

TEST(NeverUp, IsNewsTenSecondsAfterTheFirstRail) {
  Alone alone({rail_of(0)});
  const TimeNs begin = now_ns();
  alone.peer.started = true;
  alone.peer.started_at = begin;
  alone.peer.first_up = begin + 1000 * ns_per_ms;
  alone.peer.tell_never_up(60'000 * ns_per_ms, begin + 10'999 * ns_per_ms);
  EXPECT_EQ(warnings(alone.log, "never been up").size(), 0U);
  alone.peer.tell_never_up(60'000 * ns_per_ms, begin + 11'000 * ns_per_ms);
  EXPECT_EQ(warnings(alone.log, "never been up").size(), 1U);
}

// The start has told why the port does not work.  The rail is news again once the port was ready
// for some time.
TEST(NeverUp, IsNotToldTwice) {
  RailDescription rail = rail_of(0);
  rail.told = true;
  Alone alone({rail});
  const TimeNs begin = now_ns();
  alone.peer.started = true;
  alone.peer.started_at = begin;
  alone.peer.tell_never_up(1000 * ns_per_ms, begin + 3600'000 * ns_per_ms);
  EXPECT_EQ(warnings(alone.log, "never been up").size(), 0U);
  const TimeNs ready = begin + 7200'000 * ns_per_ms;
  alone.peer.port_is_ready(0, ready);
  alone.peer.tell_never_up(1000 * ns_per_ms, ready + 9999 * ns_per_ms);
  EXPECT_EQ(warnings(alone.log, "never been up").size(), 0U);
  for (int again = 0; again < 3; ++again)
    alone.peer.tell_never_up(1000 * ns_per_ms, ready + 10'000 * ns_per_ms);
  EXPECT_EQ(warnings(alone.log, "never been up").size(), 1U);
  // A port that comes and goes is no further news.
  alone.peer.port_is_ready(0, ready + 20'000 * ns_per_ms);
  alone.peer.tell_never_up(1000 * ns_per_ms, ready + 60'000 * ns_per_ms);
  EXPECT_EQ(warnings(alone.log, "never been up").size(), 0U);
}

// The monitor reports every port once at the start, and a port that works needs no longer patience.
TEST(NeverUp, APortThatWorksFromTheStartIsNotWaitedFor) {
  Alone alone({rail_of(0)});
  const TimeNs begin = now_ns();
  alone.peer.started = true;
  alone.peer.started_at = begin;
  alone.peer.port_is_ready(0, begin);
  alone.peer.tell_never_up(1000 * ns_per_ms, begin + 500 * ns_per_ms);
  EXPECT_EQ(warnings(alone.log, "never been up").size(), 1U);
}

TEST(NeverUp, ADormantRailIsShownOnceItConnects) {
  RailDescription later = rail_of(1);
  later.dormant = true;
  Alone alone({rail_of(0), later});
  const auto shown = [&] {
    JournalHeader header;
    const std::string bytes = alone.journal.copy();
    std::memcpy(&header, bytes.data(), sizeof(header));
    return header.rail_count;
  };
  EXPECT_EQ(shown(), 1U);
  EXPECT_EQ(alone.peer.describe_rails().find("rail1"), std::string::npos);
  alone.peer.started = true;
  alone.peer.tell_never_up(1, now_ns() + 3600'000 * ns_per_ms);
  EXPECT_EQ(warnings(alone.log, "rail1").size(), 0U);
  alone.bring_up(1);
  EXPECT_EQ(shown(), 2U);
  EXPECT_STREQ(alone.journal.rail(1)->name, "rail1@node1");
  EXPECT_EQ(alone.journal.rail(1)->state, static_cast<std::uint8_t>(RailState::up));
  EXPECT_NE(alone.peer.describe_rails().find("rail1@node1 UP"), std::string::npos);
}

// A connection proves that the port leads to the peer: a lost probe is no reason to try another.
TEST(NeverUp, AConnectionEndsTheCountOfMisses) {
  Alone alone({rail_of(0)});
  alone.peer.rails[0].misses = 1;
  alone.lose(0, RailCause::probation);
  EXPECT_EQ(alone.peer.rails[0].misses, 0U);
}

// A peer that is slow to start accepts no connection on any rail.
TEST(NeverUp, OnlyAttemptsAfterThePeerHasAcceptedAnotherRailAreMisses) {
  RailDescription control = rail_of(2);
  control.kind = RailKind::control;
  Alone alone({rail_of(0), rail_of(1), control});
  EXPECT_FALSE(alone.peer.is_running(0));
  alone.bring_up(2);
  EXPECT_TRUE(alone.peer.is_running(0));
  Alone uncontrolled({rail_of(0), rail_of(1)});
  EXPECT_TRUE(uncontrolled.peer.is_running(0)) << "both pairs may be wrong";
}

// Ports were exchanged, and a port of the peer has two addresses with a listener at each.
TEST(RemotePort, IsThatOfTheAddressThatTheConnectionComesFrom) {
  Alone alone({rail_of(0, 4000), rail_of(1, 4001), rail_of(2, 4002)});
  const auto address = [](int index) {
    return IpAddress::parse("127.0.0." + std::to_string(index + 1)).value();
  };
  for (std::size_t index = 0; index < 3; ++index) {
    alone.peer.rails[index].remote_device = index == 0 ? "eth0" : "eth1";
    alone.peer.rails[index].remote_given = address(static_cast<int>(index));
  }
  EXPECT_EQ(alone.peer.remote_port(0, address(0)), 4000);  // the peer has named no port
  alone.peer.rails[0].peer_names.port = "eth1";
  EXPECT_EQ(alone.peer.remote_port(0, address(1)), 4001);
  EXPECT_EQ(alone.peer.remote_port(0, address(2)), 4002);
  EXPECT_EQ(alone.peer.remote_port(0, address(7)), 4001);  // its address has changed
  alone.peer.rails[1].peer_names.port = "eth1";
  EXPECT_EQ(alone.peer.remote_port(1, address(2)), 4002);
  EXPECT_EQ(alone.peer.remote_port(1, address(7)), 4001);
  alone.peer.rails[2].peer_names.port = "eth1";
  EXPECT_EQ(alone.peer.remote_port(2, address(7)), 4002);  // its own listener before another
  alone.peer.rails[0].peer_names.port = "eth9";
  EXPECT_EQ(alone.peer.remote_port(0, address(1)), 4000);  // no rail began with this port
}

// The peer shows its end of a rail before ours, and a person may fault that end.
TEST(NeverUp, ADrillOfThePeerDoesNotShowADormantRail) {
  RailDescription later = rail_of(1);
  later.dormant = true;
  Alone alone({rail_of(0), later});
  const auto told = [&](RailId rail) {
    JournalHeader header;
    const auto records = [&] {
      const std::string bytes = alone.journal.copy();
      std::memcpy(&header, bytes.data(), sizeof(header));
      return header.record_count;
    };
    (void)alone.log.take();
    const std::uint64_t before = records();
    alone.peer.on_drill(rail, static_cast<std::uint8_t>(Fault::black_hole), /*over=*/false);
    alone.peer.on_injected(rail);
    return std::pair(records() - before, alone.log.take().value_or(std::deque<LogLine>()).size());
  };
  EXPECT_EQ(told(0), std::pair(std::uint64_t{2}, std::size_t{2}));
  EXPECT_EQ(told(1), std::pair(std::uint64_t{0}, std::size_t{0}));
}

TEST(NeverUp, AStartDoesNotWaitForPortsThatDoNotWork) {
  std::vector<RailDescription> rails{rail_of(0), rail_of(1), rail_of(2)};
  rails[0].kind = RailKind::control;
  rails[1].late = true;
  rails[2].dormant = true;
  EXPECT_EQ(Alone(rails).peer.patience(60'000 * ns_per_ms), 2000 * ns_per_ms);
  rails[1].late = false;
  EXPECT_EQ(Alone(rails).peer.patience(60'000 * ns_per_ms), 30'000 * ns_per_ms);
}

// A path that takes the handshake and drops the probe gets smaller segments.
class Narrow : public ::testing::Test {
 protected:
  // Opens the next epoch, sends its probe and loses the rail: an hour later, or else before any
  // time has passed, whatever this test took.
  void lose_probe(RailCause cause = RailCause::probation, bool acked = false, bool waited = false) {
    ASSERT_TRUE(alone.peer.link.rail_established(0, ++epoch, now_ns()));
    const std::uint64_t before = alone.peer.link.counters(0).tx_bytes;
    OutFrame frame{};
    while (frame.header.type != FrameType::ping)
      ASSERT_TRUE(alone.peer.link.next_frame(0, frame, now_ns()));
    const std::uint64_t sent = alone.peer.link.counters(0).tx_bytes - before;
    if (acked) alone.peer.link.path_acked(0, epoch, sent, false, now_ns());
    constexpr TimeNs hour = 3600'000 * ns_per_ms;
    alone.peer.rails[0].since = waited ? now_ns() - hour : now_ns() + hour;
    alone.peer.link.rail_failed(0, epoch, cause, now_ns());
    alone.peer.link.rail_closed(0, epoch, now_ns());
    alone.peer.link.peer_fenced(0, epoch, now_ns());
  }
  Alone alone{{rail_of(0)}};
  Epoch epoch = 0;
};

TEST_F(Narrow, SegmentsFollowALostProbe) {
  EXPECT_EQ(alone.peer.segment(0), 0);
  lose_probe();
  EXPECT_EQ(alone.peer.segment(0), 1220);
  lose_probe();
  EXPECT_EQ(alone.peer.segment(0), 516);
  lose_probe();
  EXPECT_EQ(alone.peer.segment(0), 0);
}

TEST_F(Narrow, SegmentsNeedEvidenceOfThePath) {
  lose_probe(RailCause::carrier_loss);
  EXPECT_EQ(alone.peer.segment(0), 0);
  lose_probe(RailCause::socket_error);
  EXPECT_EQ(alone.peer.segment(0), 0);
  lose_probe(RailCause::probation, /*acked=*/true);  // the peer is late
  EXPECT_EQ(alone.peer.segment(0), 0);
  lose_probe(RailCause::peer_notice);
  lose_probe(RailCause::peer_notice);
  EXPECT_EQ(alone.peer.segment(0), 0);
  lose_probe(RailCause::peer_notice);  // the probes of the peer are lost, again and again
  EXPECT_EQ(alone.peer.segment(0), 1220);
}

// The probations of both ends take equally long.  The end of the peer's resets the connection.
TEST_F(Narrow, SegmentsFollowAProbeThatThePeerEnds) {
  lose_probe(RailCause::socket_error, /*acked=*/true, /*waited=*/true);
  EXPECT_EQ(alone.peer.segment(0), 0);
  lose_probe(RailCause::socket_error, /*acked=*/false, /*waited=*/true);
  EXPECT_EQ(alone.peer.segment(0), 1220);
}

TEST_F(Narrow, SegmentsAreToldOnceWithBothSizes) {
  RailEnd& end = alone.peer.rails[0];
  end.mtu = 1500;
  end.route.device = "eth1";
  end.narrow = 1;
  alone.bring_up(0);
  const Lines told = warnings(alone.log, "uses segments of 1220 bytes");
  ASSERT_EQ(told.size(), 1U);
  EXPECT_NE(told[0].find("packets of 1500 bytes vanish between eth1 and"), std::string::npos);
  alone.peer.link.rail_failed(0, 1, RailCause::dead_deadline, now_ns());
  EXPECT_EQ(alone.peer.segment(0), 0) << "the path may have changed";
}

TEST(SharedPort, TwoLostCarriersOfAUnitAreOneCause) {
  std::vector<RailDescription> rails{rail_of(0), rail_of(1), rail_of(2)};
  rails[0].unit = rails[1].unit = "port 0 of the card at 0000:01:00";
  Alone alone(rails);
  for (const RailId rail : {RailId{0}, RailId{1}, RailId{2}}) alone.bring_up(rail);
  for (const RailId rail : {RailId{0}, RailId{1}, RailId{2}})
    alone.peer.link.rail_failed(rail, 1, RailCause::carrier_loss, now_ns());
  const Lines lost = warnings(alone.log, "-> DOWN");
  ASSERT_EQ(lost.size(), 3U);
  EXPECT_EQ(lost[0].find("one cause"), std::string::npos);
  EXPECT_NE(lost[1].find("one cause with rail0@node1: they share port 0"), std::string::npos);
  EXPECT_EQ(lost[2].find("one cause"), std::string::npos);  // an independent port
}

// An operator looks for a host and a port, not for a rank.
TEST(Ports, ALossNamesPortsAndHosts) {
  std::vector<RailDescription> rails{rail_of(0)};
  rails[0].device = "eth1";
  Alone alone(rails);
  alone.peer.host = "a";
  alone.peer.rails[0].peer_names = {.host = "b", .port = "mlx5_0:1"};
  alone.bring_up(0);
  alone.peer.link.rail_failed(0, 1, RailCause::carrier_loss, now_ns());
  EXPECT_EQ(warnings(alone.log, "-> DOWN"),
            Lines{"rail0@node1 to rank 2: UP -> DOWN (carrier_loss); eth1 of host a to mlx5_0:1 of "
                  "host b"});
}

TEST(Ports, AVerbsRailNamesInterfaceAndRdmaDevice) {
  RailEnd end;
  end.kind = RailKind::verbs;
  end.verbs = {.device = "mlx5_0", .port = 1};
  EXPECT_EQ(end.port(), "mlx5_0:1");
  end.route.device = "eth1";
  EXPECT_EQ(end.port(), "eth1/mlx5_0:1");
  end.kind = RailKind::tcp;
  EXPECT_EQ(end.port(), "eth1");
}

// The evidence of both ends comes within a second; the first half alone would blame a port.
TEST(Located, AFaultIsToldOnceWithTheEvidenceOfBothEnds) {
  Alone alone({rail_of(0), rail_of(1)});
  for (const RailId rail : {RailId{0}, RailId{1}}) alone.bring_up(rail);
  Link& link = alone.peer.link;
  const TimeNs lost = now_ns();
  link.rail_failed(0, 1, RailCause::carrier_loss, lost);
  alone.peer.tell_located(lost);
  EXPECT_EQ(link.verdict(0), Verdict::local_nic);
  EXPECT_EQ(alone.peer.verdict(0), Verdict::none);
  const Findings both{.own = PortEvidence::broken, .peer = PortEvidence::broken, .complete = true};
  link.located(0, 1, both);
  alone.peer.tell_located(lost + 500 * ns_per_ms);
  EXPECT_EQ(warnings(alone.log, "the fault is"), Lines());
  alone.peer.tell_located(now_ns() + 1000 * ns_per_ms);
  link.located(0, 1, {.own = PortEvidence::broken, .peer = PortEvidence::works, .complete = true});
  alone.peer.tell_located(now_ns() + 9000 * ns_per_ms);
  EXPECT_EQ(warnings(alone.log, "the fault is"),
            Lines{"rail0@node1 to rank 2: the fault is at the path"});
  EXPECT_EQ(alone.peer.verdict(0), Verdict::path);
}

// The peer cannot report its port without a rail.
TEST(Located, WithoutARailTheVerdictWaitsForThePeersReport) {
  Alone alone({rail_of(0)});
  alone.bring_up(0);
  const TimeNs lost = now_ns();
  alone.peer.link.rail_failed(0, 1, RailCause::carrier_loss, lost);
  alone.peer.tell_located(lost + 1000 * ns_per_ms);
  EXPECT_EQ(alone.peer.verdict(0), Verdict::none);
  alone.peer.tell_located(now_ns() + 4000 * ns_per_ms);
  EXPECT_EQ(alone.peer.verdict(0), Verdict::local_nic);
}

TEST(Located, RailsOfADeadProcessBlameThePeer) {
  Alone alone({rail_of(0)});
  alone.bring_up(0);
  alone.peer.link.rail_failed(0, 1, RailCause::socket_error, now_ns());
  alone.peer.link.located(0, 1,
                          {.own = PortEvidence::works,
                           .peer = PortEvidence::works,
                           .answered = true,
                           .complete = true});
  alone.peer.on_process_gone(now_ns());
  EXPECT_EQ(warnings(alone.log, "the fault is").size(), 1U);
  EXPECT_EQ(alone.peer.verdict(0), Verdict::peer);
  EXPECT_EQ(alone.peer.link.overall_verdict(), Verdict::peer);
}

// The word alone is no proof: a rail that works contradicts, and an old word is forgotten.
TEST(WordOfEnd, CountsWithTheEndOfAllRailsAShortTimeAround) {
  for (const bool before : {false, true}) {
    Alone alone({rail_of(0), rail_of(1)});
    for (const RailId rail : {RailId{0}, RailId{1}}) alone.bring_up(rail);
    Peer& peer = alone.peer;
    const TimeNs now = now_ns();
    if (before) peer.on_word_of_end(now);
    EXPECT_FALSE(peer.ended_by_word(now));
    peer.link.rail_failed(0, 1, RailCause::socket_error, now);
    EXPECT_FALSE(peer.ended_by_word(now)) << "rail 1 works";
    peer.link.rail_failed(1, 1, RailCause::socket_error, now);
    EXPECT_EQ(peer.ended_by_word(now), before);
    if (!before) peer.on_word_of_end(now);
    EXPECT_TRUE(peer.ended_by_word(now + 1999 * ns_per_ms));
    EXPECT_FALSE(peer.ended_by_word(now + 2000 * ns_per_ms)) << "a later outage";
  }
}

// A drill may begin between a loss and the verdict about the loss, or end there.
TEST(Located, ADrillExplainsTheVerdictIfItExplainedTheLoss) {
  for (const bool drilled : {false, true}) {
    Alone alone({rail_of(0), rail_of(1)});
    for (const RailId rail : {RailId{0}, RailId{1}}) alone.bring_up(rail);
    Link& link = alone.peer.link;
    constexpr auto kind = static_cast<std::uint8_t>(Fault::carrier_loss);
    if (drilled) link.begin_drill(0, kind, longest_drill_ns, now_ns());
    link.rail_failed(0, 1, RailCause::carrier_loss, now_ns());
    if (drilled)
      link.end_drill(0, now_ns() - rejoin_grace_ns);
    else
      link.begin_drill(0, kind, longest_drill_ns, now_ns());
    EXPECT_EQ(link.in_drill(0, now_ns()), !drilled);
    EXPECT_EQ(warnings(alone.log, "-> DOWN").size(), drilled ? 0U : 1U);
    alone.peer.tell_located(now_ns() + 1000 * ns_per_ms);
    EXPECT_EQ(warnings(alone.log, "the fault is").size(), drilled ? 0U : 1U);
    EXPECT_EQ(alone.peer.verdict(0), Verdict::local_nic);
  }
}

// The loss of rail 1 is a reset.  The end of rail 0 decides whether the process may be dead.
TEST(ClosedByPeer, AnOrderlyCloseOfARailInUseIsEvidenceOnceAllRailsAreLost) {
  struct Case {
    bool in_order;
    bool was_up;
    bool in_drill;
  };
  for (const Case& of : {Case{true, true, false}, Case{false, true, false},
                         Case{true, false, false}, Case{true, true, true}}) {
    Alone alone({rail_of(0), rail_of(1)});
    alone.bring_up(1);
    if (of.was_up) alone.bring_up(0);
    Link& link = alone.peer.link;
    if (of.in_drill)
      link.begin_drill(0, static_cast<std::uint8_t>(Fault::reset), longest_drill_ns, now_ns());
    if (!of.was_up) {
      ASSERT_TRUE(link.rail_established(0, 1, now_ns()));
    }
    link.rail_failed(0, 1, RailCause::socket_error, now_ns());
    alone.peer.ends[0].closed_by_peer = of.in_order;
    EXPECT_FALSE(alone.peer.closed_by_peer()) << "rail 1 is left";
    link.rail_failed(1, 1, RailCause::socket_error, now_ns());
    EXPECT_EQ(alone.peer.closed_by_peer(), of.in_order && of.was_up && !of.in_drill);
  }
}

// A path that drops large packets keeps rail 1 in PROBATION beyond the death of the peer.
TEST(ClosedByPeer, ARailInProbationIsEvidenceOfLifeOnlyIfItBeganAfterTheClose) {
  for (const bool after : {false, true}) {
    Alone alone({rail_of(0), rail_of(1)});
    alone.bring_up(0);
    Link& link = alone.peer.link;
    const auto begin = [&] { ASSERT_TRUE(link.rail_established(1, 1, now_ns())); };
    if (!after) begin();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    link.rail_failed(0, 1, RailCause::socket_error, now_ns());
    alone.peer.ends[0].closed_by_peer = true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (after) begin();
    EXPECT_EQ(alone.peer.closed_by_peer(), !after);
    // The end of the probation is no later sign of life than its begin.
    alone.peer.rails[0].lost_at -= 5000 * ns_per_ms;
    alone.peer.rails[1].met_at -= 5000 * ns_per_ms;
    link.rail_failed(1, 1, RailCause::probation, now_ns());
    EXPECT_TRUE(alone.peer.closed_by_peer());
  }
}

// The port of a dormant rail has no address, so its pairs of ports tell nothing.
TEST(Survey, LeavesDormantRailsOut) {
  const ClosedPort used(/*listens=*/true);
  const ClosedPort dormant(/*listens=*/true);
  std::vector<RailDescription> rails{rail_of(0), rail_of(1), rail_of(2)};
  rails[2].dormant = true;
  LogQueue log;
  Journal journal = std::move(Journal::open("", 1).value());
  Localiser::Peers peers;
  Peer& peer = *peers
                    .emplace(connecting, std::make_unique<Peer>(peer_of(connecting, rails),
                                                                LinkOptions(), journal, log, 1))
                    .first->second;
  peer.started = true;
  for (const RailId rail : {RailId{0}, RailId{1}, RailId{2}}) {
    RailRoute& route = peer.rails[rail].route;
    route.device = "lo";
    route.local = SocketAddress::ip(IpAddress::parse("127.0.0.1").value(), 0);
    route.remote = rail == 2 ? dormant.at : used.at;
    if (rail != 2) Alone::bring_up(peer, rail);
  }
  Localiser(peers).progress(now_ns());
  const auto asked = [](const ClosedPort& port) {
    pollfd item{port.socket.get(), POLLIN, 0};
    return ::poll(&item, 1, 0) == 1;
  };
  EXPECT_TRUE(eventually([&] { return asked(used); }, "a probe of the rails in use"));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(asked(dormant));
}

// Observers tell a stopped peer from a peer that computes by this number alone.
TEST(Silence, TheJournalCountsTheTimeWithoutAFrame) {
  Alone alone({rail_of(0), rail_of(1)});
  alone.bring_up(0);
  TimeNs now = now_ns();
  alone.peer.link.tick(now);
  alone.peer.publish();
  EXPECT_EQ(alone.journal.rail(0)->unheard_ms, 0U);
  for (int i = 0; i < 3; ++i) alone.peer.link.tick(now += 1000 * ns_per_ms);
  alone.peer.publish();
  for (const std::uint32_t entry : {0U, 1U})
    EXPECT_EQ(alone.journal.rail(entry)->unheard_ms, 3000U) << entry;
  alone.bring_up(1);
  alone.peer.link.tick(now += 1000 * ns_per_ms);
  alone.peer.publish();
  EXPECT_EQ(alone.journal.rail(0)->unheard_ms, 0U);
}

}  // namespace
}  // namespace r2ccl
