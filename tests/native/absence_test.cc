// Half of the proof that a peer's process has ended: its host refuses connections.
#include "engine/absence.hpp"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <thread>
#include <vector>

namespace r2ccl {
namespace {

constexpr TimeNs round_ns = 100 * ns_per_ms;
constexpr Absence::Limits limits{.round = round_ns, .rounds = 3};

// A TCP port of this host.
struct Port {
  FileDescriptor socket{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
  SocketAddress at = SocketAddress::ip("127.0.0.1", 0).value();

  explicit Port(bool listens) {
    EXPECT_EQ(::bind(socket.get(), at.get(), at.size), 0);
    if (listens) {
      EXPECT_EQ(::listen(socket.get(), 32), 0);
    }
    EXPECT_EQ(::getsockname(socket.get(), at.get(), &at.size), 0);
  }
};

Absence asking(const std::vector<const Port*>& ports) {
  return {ports.size(), [ports](std::size_t listener) { return connect_to(ports[listener]->at); },
          limits};
}

// Looks every 10 ms of a clock that stands for a round.
bool becomes_certain(Absence& absence) {
  TimeNs clock = 1;
  for (int round = 0; round < 12; ++round) {
    if (absence.certain(true, clock)) return true;
    clock += round_ns;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}

TEST(Absence, RefusedConnectsTellOfAProcessThatIsGone) {
  const Port living(true);
  Absence of_living = asking({&living});
  EXPECT_FALSE(becomes_certain(of_living)) << "the process is there";
  const Port dead(false);
  Absence of_dead = asking({&dead});
  EXPECT_TRUE(becomes_certain(of_dead));
}

// The peer may return, and lose its rails before the next look: old refusals prove no second death.
TEST(Absence, AProofEndsTheCountOfRefusals) {
  const Port port(false);
  Absence absence = asking({&port});
  ASSERT_TRUE(becomes_certain(absence));
  EXPECT_EQ(::listen(port.socket.get(), 32), 0);
  EXPECT_FALSE(becomes_certain(absence));
}

// Rails without a route, or with a NIC that is lost, say nothing.
TEST(Absence, OnlyRefusalsCount) {
  int error = ENETUNREACH;
  Absence absence(
      1,
      [&](std::size_t) {
        errno = error;
        return FileDescriptor();
      },
      limits);
  TimeNs now = 1;
  for (int round = 0; round < 20; ++round) EXPECT_FALSE(absence.certain(true, now += round_ns));
  error = ECONNREFUSED;
  EXPECT_FALSE(absence.certain(true, now += round_ns));
  for (int round = 0; round < 2; ++round) EXPECT_FALSE(absence.certain(true, now += round_ns));
  EXPECT_TRUE(absence.certain(true, now + round_ns));
}

TEST(Absence, OneListenerThatAnswersIsEnough) {
  const Port dead(false);
  const Port living(true);
  Absence absence = asking({&dead, &living});
  EXPECT_FALSE(becomes_certain(absence));
}

TEST(Absence, NothingIsAskedWithoutSuspicion) {
  int asked = 0;
  Absence absence(
      1,
      [&](std::size_t) {
        ++asked;
        errno = ECONNREFUSED;
        return FileDescriptor();
      },
      limits);
  TimeNs now = 1;
  for (int round = 0; round < 20; ++round) EXPECT_FALSE(absence.certain(false, now += round_ns));
  EXPECT_EQ(asked, 0);
  // The end of a suspicion forgets the refusals.
  for (int round = 0; round < 3; ++round) EXPECT_FALSE(absence.certain(true, now += round_ns));
  EXPECT_FALSE(absence.certain(false, now += round_ns));
  for (int round = 0; round < 3; ++round) EXPECT_FALSE(absence.certain(true, now += round_ns));
  EXPECT_TRUE(absence.certain(true, now + round_ns));
}

}  // namespace
}  // namespace r2ccl
