// Rail connections before their handshake ends, against a port that accepts and never answers.
#include "connect/connections.hpp"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "eventually.hpp"
#include "link/shape.hpp"

namespace r2ccl {
namespace {

constexpr TimeNs timeout = 1000 * ns_per_ms;
const Hello hello{.connector = 5, .acceptor = 2, .job = 7, .rail = 3};

struct Fixture {
  LogQueue log;
  int failed = 0;
  int late = 0;
  TimeNs patience = timeout;
  std::string why;
  Connections connections{{.process = 5, .job = 7},
                          timeout,
                          0,
                          {.find_key = [](std::uint32_t) { return std::nullopt; },
                           .decide = [](const Hello&, bool) { return Decision{}; },
                           .established = [](const EstablishedRail&) {},
                           .failed =
                               [this](const FailedConnection& given) {
                                 ++failed;
                                 why = given.why;
                               },
                           .patience = [this](std::uint32_t, RailId) { return patience; },
                           .late = [this](std::uint32_t, RailId) { ++late; }},
                          log};
  FileDescriptor port{::socket(AF_INET, SOCK_STREAM, 0)};
  SocketAddress at = SocketAddress::ip(IpAddress::parse("127.0.0.1").value(), 0);

  Fixture() {
    EXPECT_EQ(::bind(port.get(), at.get(), at.size), 0);
    EXPECT_EQ(::listen(port.get(), 32), 0);
    EXPECT_EQ(::getsockname(port.get(), at.get(), &at.size), 0);
  }
  void connect(TimeNs now, std::uint16_t rail = hello.rail, int flows = 1) {
    Hello own = hello;
    own.rail = rail;
    connections.connect({.device = "",
                         .local = SocketAddress::ip(IpAddress::parse("127.0.0.1").value(), 0),
                         .remote = at,
                         .flows = flows},
                        own, HandshakeKey{}, now);
  }
  // Goes on until `condition()`: the kernel may deliver with a delay.
  ::testing::AssertionResult progress_until(const std::function<bool()>& condition,
                                            const std::string& what, TimeNs now = 0) {
    return testing::eventually(
        [&] {
          connections.progress(now);
          return condition();
        },
        what);
  }
  [[nodiscard]] FileDescriptor accept() const {
    return FileDescriptor(::accept(port.get(), nullptr, nullptr));
  }
};

bool readable(const FileDescriptor& socket) {
  pollfd item{socket.get(), POLLIN, 0};
  return ::poll(&item, 1, 0) == 1;
}

// Number of bytes received from the other end; 0 = the other end has closed.
ssize_t received(const FileDescriptor& socket) {
  std::array<std::byte, 512> buffer;
  return ::recv(socket.get(), buffer.data(), buffer.size(), 0);
}

TEST(Connections, AnAttemptReplacesAnUnansweredAttempt) {
  Fixture fixture;
  fixture.connect(0);
  fixture.connections.progress(0);
  const FileDescriptor first = fixture.accept();
  ASSERT_TRUE(fixture.progress_until([&] { return readable(first); }, "the first hello"));
  EXPECT_GT(received(first), 0);
  fixture.connect(1);
  fixture.connections.progress(1);
  EXPECT_EQ(fixture.connections.pending(), 1U);
  EXPECT_EQ(received(first), 0);
  const FileDescriptor second = fixture.accept();
  ASSERT_TRUE(fixture.progress_until([&] { return readable(second); }, "the second hello", 1));
  EXPECT_GT(received(second), 0);
  EXPECT_EQ(fixture.failed, 0);  // a replaced attempt is not a failed attempt
}

TEST(Connections, AnUnansweredAttemptFailsAtTheTimeout) {
  Fixture fixture;
  fixture.connect(0);
  fixture.connections.progress(timeout - 1);
  EXPECT_EQ(fixture.failed, 0);
  fixture.connections.progress(timeout);
  EXPECT_EQ(fixture.failed, 1);
  EXPECT_EQ(fixture.connections.pending(), 0U);
}

// The first connection of an attempt carries the handshake, and the others end at once.
TEST(Connections, OneConnectionOfAnAttemptStays) {
  Fixture fixture;
  fixture.connect(0, hello.rail, 4);
  std::array<FileDescriptor, 4> accepted;
  for (FileDescriptor& socket : accepted) socket = fixture.accept();
  EXPECT_EQ(fixture.connections.pending(), 1U);
  const auto all_heard = [&] { return std::ranges::all_of(accepted, readable); };
  ASSERT_TRUE(fixture.progress_until(all_heard, "a hello or an end on each connection"));
  const auto says_hello = [](const FileDescriptor& socket) { return received(socket) > 0; };
  EXPECT_EQ(std::ranges::count_if(accepted, says_hello), 1);
  EXPECT_EQ(fixture.failed, 0);
}

// A path of two members may choose the member by the lowest bit of the source port.
TEST(Connections, ConnectionsOfAnAttemptHavePortsOfBothParities) {
  Fixture fixture;
  fixture.connect(0, hello.rail, 4);
  std::array<int, 2> of_parity{};
  for (int flow = 0; flow < 4; ++flow) {
    SocketAddress from;
    from.size = sizeof(from.storage);
    const FileDescriptor socket(::accept(fixture.port.get(), from.get(), &from.size));
    ASSERT_TRUE(socket.valid());
    ++of_parity.at(from.port() % 2U);
  }
  EXPECT_GT(of_parity[0], 0);
  EXPECT_GT(of_parity[1], 0);
}

// Many silent rails do not take all descriptors of the process.
TEST(Connections, FurtherConnectionsOfAllAttemptsAreLimited) {
  Fixture fixture;
  const auto sockets = [&fixture] {
    std::vector<pollfd> fds;
    fixture.connections.add_poll_fds(fds, 0);
    return fds.size();
  };
  for (std::uint16_t rail = 0; rail < 20; ++rail) fixture.connect(0, rail, 8);
  EXPECT_EQ(sockets(), 20U + 64U);
  for (std::uint16_t rail = 0; rail < 20; ++rail) fixture.connect(1, rail, 8);
  EXPECT_EQ(sockets(), 20U + 64U) << "a replaced attempt returns its connections";
}

// A rank that starts on few cores answers late.
TEST(Connections, ALateHandshakeHasTheTimeThatTheOwnerGives) {
  Fixture fixture;
  fixture.patience = 4 * timeout;
  fixture.connect(0);
  const FileDescriptor silent = fixture.accept();  // the kernel may connect with a delay
  fixture.connections.progress(0);
  fixture.connections.progress(4 * timeout - 1);
  EXPECT_EQ(fixture.connections.pending(), 1U);
  EXPECT_EQ(fixture.late, 0);
  fixture.connections.progress(4 * timeout);
  EXPECT_EQ(fixture.connections.pending(), 0U);
  EXPECT_EQ(fixture.late, 1);
  EXPECT_EQ(fixture.failed, 1);
}

// An acceptor and clients that send messages of a handshake at chosen times.
struct Accepting {
  static constexpr HandshakeKey key{};
  LogQueue log;
  int late = 0;
  int established = 0;
  Connections connections{
      {.process = hello.acceptor, .job = hello.job},
      timeout,
      0,
      {.find_key = [](std::uint32_t) { return key; },
       .decide = [](const Hello&, bool) { return Decision{.accept = true, .epoch = 1, .why = {}}; },
       .established = [this](const EstablishedRail&) { ++established; },
       .failed = [](const FailedConnection&) {},
       .patience = [](std::uint32_t, RailId) { return timeout; },
       .late = [this](std::uint32_t, RailId) { ++late; }},
      log};
  SocketAddress at = [this] {
    const IpAddress loopback = IpAddress::parse("127.0.0.1").value();
    auto port = connections.listeners.listen(SocketAddress::ip(loopback, 0), "");
    EXPECT_TRUE(port.ok());
    return SocketAddress::ip(loopback, port.value());
  }();

  // Sends the output of a handshake on a new connection.
  FileDescriptor send(std::span<const std::byte> output) {
    FileDescriptor client(::socket(AF_INET, SOCK_STREAM, 0));
    EXPECT_EQ(::connect(client.get(), at.get(), at.size), 0);
    EXPECT_EQ(::send(client.get(), output.data(), output.size(), 0),
              static_cast<ssize_t>(output.size()));
    return client;
  }
};

// Any process can repeat a recorded HELLO.  The repetition must not change the limits of the rail.
TEST(Connections, ARepeatedHelloIsNoLateHandshake) {
  Accepting accepting;
  const ConnectorHandshake recorded(hello, Accepting::key);
  TimeNs now = 1;
  for (int replay = 0; replay < 4; ++replay) {
    const FileDescriptor client = accepting.send(recorded.output());
    ASSERT_TRUE(testing::eventually(
        [&] {
          accepting.connections.progress(now);
          return readable(client);  // the challenge
        },
        "the HELLO is accepted"));
    now += 100 * timeout;
    accepting.connections.progress(now);
    EXPECT_EQ(accepting.connections.pending(), 0U);
  }
  EXPECT_EQ(accepting.late, 0);
  EXPECT_EQ(accepting.established, 0);
}

TEST(Connections, AnAuthenticatedHandshakeThatTakesLongIsLate) {
  Accepting accepting;
  ConnectorHandshake slow(hello, Accepting::key);
  const FileDescriptor client = accepting.send(slow.output());
  slow.sent(slow.output().size());
  ASSERT_TRUE(testing::eventually(
      [&] {
        accepting.connections.progress(1);
        return readable(client);
      },
      "the challenge"));
  std::array<std::byte, 512> challenge;
  const ssize_t got = ::recv(client.get(), challenge.data(), challenge.size(), 0);
  ASSERT_GT(got, 0);
  (void)slow.feed({challenge.data(), static_cast<std::size_t>(got)});
  ASSERT_EQ(::send(client.get(), slow.output().data(), slow.output().size(), 0),
            static_cast<ssize_t>(slow.output().size()));
  ASSERT_TRUE(testing::eventually(
      [&] {
        accepting.connections.progress(8 * timeout);
        return accepting.established == 1;
      },
      "the rail is established"));
  EXPECT_EQ(accepting.late, 1);
}

TEST(Connections, ALimitedNumberOfAttemptsIsInProgress) {
  Fixture fixture;
  std::uint16_t rail = 0;
  for (; rail < 200 && fixture.connections.may_connect(0); ++rail) fixture.connect(0, rail);
  EXPECT_EQ(rail, 16);
  std::vector<FileDescriptor> silent;  // the kernel may connect with a delay
  while (silent.size() < rail) silent.push_back(fixture.accept());
  fixture.connections.progress(0);
  EXPECT_FALSE(fixture.connections.may_connect(timeout - 1));
  // Late attempts, perhaps to a stopped process, do not hold others back.
  EXPECT_TRUE(fixture.connections.may_connect(timeout));
}

TEST(Connections, EveryRailOfAPeerMayConnectAtTheSameTime) {
  Fixture fixture;
  fixture.connections.expect_peer(4);
  fixture.connections.expect_peer(4);
  const IpAddress loopback = IpAddress::parse("127.0.0.1").value();
  auto port = fixture.connections.listeners.listen(SocketAddress::ip(loopback, 0), "");
  ASSERT_TRUE(port.ok());
  const SocketAddress at = SocketAddress::ip(loopback, port.value());
  std::vector<FileDescriptor> clients;
  const auto come = [&](int count) {
    for (int i = 0; i < count; ++i) {
      clients.emplace_back(::socket(AF_INET, SOCK_STREAM, 0));
      ASSERT_EQ(::connect(clients.back().get(), at.get(), at.size), 0);
      fixture.connections.progress(0);
    }
  };
  come(128 + 8);
  EXPECT_TRUE(fixture.progress_until([&] { return fixture.connections.pending() == 136; },
                                     "136 connections"));
  EXPECT_TRUE(fixture.log.take().value().empty());
  come(1);
  std::size_t lines = 0;
  const auto drops = [&] { return (lines += fixture.log.take().value().size()) > 0; };
  EXPECT_TRUE(fixture.progress_until(drops, "the oldest is dropped"));
  EXPECT_EQ(lines, 1U);
  EXPECT_EQ(fixture.connections.pending(), 136U);
}

// Sets the limit of descriptors to those open now, while in scope.
class NoDescriptors {
 public:
  NoDescriptors() {
    EXPECT_EQ(::getrlimit(RLIMIT_NOFILE, &before_), 0);
    const FileDescriptor next(::dup(STDERR_FILENO));
    rlimit none = before_;
    none.rlim_cur = static_cast<rlim_t>(next.get());
    EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  }
  ~NoDescriptors() { ::setrlimit(RLIMIT_NOFILE, &before_); }
  NoDescriptors(const NoDescriptors&) = delete;
  NoDescriptors& operator=(const NoDescriptors&) = delete;

 private:
  rlimit before_{};
};

// Without a pause, the listener would stay readable and the background thread would never sleep.
TEST(Connections, WithoutDescriptorsAcceptsPauseAndOneLineSaysWhy) {
  Fixture fixture;
  auto port = fixture.connections.listeners.listen(
      SocketAddress::ip(IpAddress::parse("127.0.0.1").value(), 0), "");
  ASSERT_TRUE(port.ok());
  const SocketAddress at = SocketAddress::ip(IpAddress::parse("127.0.0.1").value(), port.value());
  const FileDescriptor client(::socket(AF_INET, SOCK_STREAM, 0));
  ASSERT_EQ(::connect(client.get(), at.get(), at.size), 0);
  std::vector<pollfd> fds;
  const auto polled = [&](TimeNs now) {
    fds.clear();
    fixture.connections.add_poll_fds(fds, now);
    return fds.size();
  };
  ASSERT_EQ(polled(0), 1U);
  ASSERT_TRUE(testing::eventually([&] { return ::poll(fds.data(), 1, 0) == 1; }, "the client"));
  TimeNs now = 0;
  {
    const NoDescriptors none;
    for (; now < 1000 * ns_per_ms; now += ns_per_ms) {
      if (polled(now) == 1) fixture.connections.progress(now);  // 0: paused
      EXPECT_EQ(polled(now), 0U);
      now += 98 * ns_per_ms;
    }
    EXPECT_EQ(fixture.connections.pending(), 0U);
  }
  const auto lines = fixture.log.take();
  ASSERT_TRUE(lines.has_value());
  ASSERT_EQ(lines->size(), 1U);
  EXPECT_NE(lines->front().text.find("RLIMIT_NOFILE"), std::string::npos) << lines->front().text;
  now += 200 * ns_per_ms;
  EXPECT_EQ(polled(now), 1U);
  fixture.connections.progress(now);
  EXPECT_EQ(fixture.connections.pending(), 1U);  // the waiting connection is accepted
}

TEST(Connections, AnAttemptWithoutDescriptorsNamesTheLimit) {
  Fixture fixture;
  {
    const NoDescriptors none;
    fixture.connect(0);
  }
  EXPECT_EQ(fixture.failed, 1);
  EXPECT_NE(fixture.why.find("RLIMIT_NOFILE"), std::string::npos) << fixture.why;
}

}  // namespace
}  // namespace r2ccl
