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

// A listener of `Connections`, and clients from any loopback address.
struct Crowd {
  Fixture fixture;
  SocketAddress at = [this] {
    const IpAddress loopback = IpAddress::parse("127.0.0.1").value();
    auto port = fixture.connections.listeners.listen(SocketAddress::ip(loopback, 0), "");
    EXPECT_TRUE(port.ok());
    return SocketAddress::ip(loopback, port.value());
  }();
  TimeNs now = 0;
  std::vector<FileDescriptor> clients;

  // Connects from an address, and goes on until the connection has been accepted.
  void come(const char* from, int count = 1) {
    for (int i = 0; i < count; ++i) {
      FileDescriptor client(::socket(AF_INET, SOCK_STREAM, 0));
      const SocketAddress own = SocketAddress::ip(IpAddress::parse(from).value(), 0);
      ASSERT_EQ(::bind(client.get(), own.get(), own.size), 0);
      ASSERT_EQ(::connect(client.get(), at.get(), at.size), 0);
      now += stranger_tick_ns;
      ASSERT_TRUE(
          testing::eventually([this] { return accept(now) == 1; }, "the connection is accepted"));
      clients.push_back(std::move(client));
    }
  }
  // Returns the number of accepted connections.
  std::size_t accept(TimeNs at_time) {
    std::vector<int> sockets;
    fixture.connections.listeners.each_socket([&](int socket) { sockets.push_back(socket); });
    std::vector<Arrival> arrivals = fixture.connections.acceptor.accept(sockets, at_time);
    const std::size_t count = arrivals.size();
    (void)fixture.connections.progress(at_time, std::move(arrivals));
    return count;
  }
  // A closed connection is readable here: no client is ever answered.
  [[nodiscard]] bool open(std::size_t client) const { return !readable(clients[client]); }
  [[nodiscard]] std::size_t open_clients() const {
    std::size_t count = 0;
    for (std::size_t client = 0; client < clients.size(); ++client) count += open(client) ? 1U : 0U;
    return count;
  }
  std::size_t lines() { return fixture.log.take().value().size(); }
};

TEST(Connections, EveryRailOfAPeerMayConnectAtTheSameTime) {
  Crowd crowd;
  crowd.fixture.connections.expect_peer(4);
  crowd.fixture.connections.expect_peer(4);
  crowd.fixture.connections.expect_from(IpAddress::parse("127.0.0.5").value());
  crowd.come("127.0.0.5", 32 + 8);
  EXPECT_EQ(crowd.fixture.connections.pending(), 40U);
  EXPECT_EQ(crowd.open_clients(), 40U);
  EXPECT_EQ(crowd.lines(), 0U);
  crowd.come("127.0.0.5");
  EXPECT_EQ(crowd.fixture.connections.pending(), 40U);
  EXPECT_FALSE(crowd.open(0)) << "the oldest is dropped";
  EXPECT_EQ(crowd.open_clients(), 40U);
  EXPECT_EQ(crowd.lines(), 1U);
}

// The room of known sources is apart: a flood from elsewhere takes nothing of it.
TEST(Connections, AKnownSourceHasRoomDuringAFlood) {
  Crowd crowd;
  crowd.fixture.connections.expect_from(IpAddress::parse("127.0.0.5").value());
  crowd.come("127.0.0.5", 3);
  crowd.come("127.0.0.6", 300);
  EXPECT_EQ(crowd.fixture.connections.pending(), 3U + 128U);
  for (std::size_t client = 0; client < 3; ++client) EXPECT_TRUE(crowd.open(client)) << client;
}

// A rail with a new address, or behind a NAT, arrives from a source that no peer has told.
TEST(Connections, AFloodDisplacesItselfAndNoOtherUnknownSource) {
  Crowd crowd;
  crowd.come("127.0.0.6", 100);
  crowd.come("127.0.0.7");
  const std::size_t rail = crowd.clients.size() - 1;
  crowd.come("127.0.0.6", 200);
  EXPECT_EQ(crowd.fixture.connections.pending(), 128U);
  EXPECT_TRUE(crowd.open(rail));
  EXPECT_EQ(crowd.open_clients(), 128U);
  crowd.come("127.0.0.8");  // arrives in a full room
  EXPECT_TRUE(crowd.open(crowd.clients.size() - 1));
  EXPECT_TRUE(crowd.open(rail));
}

// A source that floods may also be a peer's: a HELLO that has arrived takes its connection out of
// the way.
TEST(Connections, AHandshakeFromTheSourceOfAFloodEnds) {
  Accepting accepting;
  const auto silent = [&accepting] {
    FileDescriptor client(::socket(AF_INET, SOCK_STREAM, 0));
    EXPECT_EQ(::connect(client.get(), accepting.at.get(), accepting.at.size), 0);
    return client;
  };
  std::vector<FileDescriptor> flood;
  TimeNs now = 1;
  const auto goes_on_until = [&](const std::function<bool()>& done, const char* what) {
    return testing::eventually(
        [&] {
          flood.push_back(silent());
          if (flood.size() > 200) flood.erase(flood.begin());
          accepting.connections.progress(now += stranger_tick_ns);
          return done();
        },
        what);
  };
  ASSERT_TRUE(goes_on_until([&] { return accepting.connections.pending() >= 128; }, "a full room"));
  ConnectorHandshake honest(hello, Accepting::key);
  const FileDescriptor client = accepting.send(honest.output());
  honest.sent(honest.output().size());
  ASSERT_TRUE(goes_on_until([&] { return readable(client); }, "the challenge"));
  std::array<std::byte, 512> challenge;
  const ssize_t got = ::recv(client.get(), challenge.data(), challenge.size(), 0);
  ASSERT_GT(got, 0);
  (void)honest.feed({challenge.data(), static_cast<std::size_t>(got)});
  ASSERT_EQ(::send(client.get(), honest.output().data(), honest.output().size(), 0),
            static_cast<ssize_t>(honest.output().size()));
  EXPECT_TRUE(goes_on_until([&] { return accepting.established == 1; }, "the rail"));
}

TEST(Connections, AcceptsOfATickAreBounded) {
  Crowd crowd;
  for (int i = 0; i < 20; ++i) {
    crowd.clients.emplace_back(::socket(AF_INET, SOCK_STREAM, 0));
    ASSERT_EQ(::connect(crowd.clients.back().get(), crowd.at.get(), crowd.at.size), 0);
  }
  // The kernel may deliver with a delay, so a tick may have fewer.
  TimeNs now = 0;
  std::size_t accepted = 0;
  EXPECT_TRUE(testing::eventually(
      [&] {
        const std::size_t got = crowd.accept(now += stranger_tick_ns);
        EXPECT_LE(got, 4U);
        if (got > 1) {
          EXPECT_EQ(crowd.accept(now + stranger_tick_ns - 1), 0U) << "the same tick";
          std::vector<pollfd> fds;
          crowd.fixture.connections.add_poll_fds(fds, now + stranger_tick_ns - 1);
          EXPECT_LE(fds.size(), crowd.fixture.connections.pending()) << "no listener is polled";
          EXPECT_EQ(crowd.fixture.connections.sleep_ms(500, now), 1);
        }
        return (accepted += got) == 20;
      },
      "20 connections"));
  EXPECT_EQ(crowd.fixture.connections.sleep_ms(500, now + 1000 * ns_per_ms), 500);
}

TEST(Connections, AFloodWritesOneLineInTenSeconds) {
  Crowd crowd;
  crowd.come("127.0.0.6", 128 + 50);
  EXPECT_EQ(crowd.lines(), 1U);
  const TimeNs began = crowd.now;
  (void)crowd.accept(began + 9'000 * ns_per_ms);  // all others time out, too
  EXPECT_EQ(crowd.fixture.connections.pending(), 0U);
  EXPECT_EQ(crowd.lines(), 0U);
  (void)crowd.accept(began + 10'000 * ns_per_ms);
  const auto lines = crowd.fixture.log.take();
  ASSERT_TRUE(lines.has_value());
  ASSERT_EQ(lines->size(), 1U);
  const std::string& text = lines->front().text;
  EXPECT_NE(text.find("dropped 177 connections, the last from 127.0.0.6:"), std::string::npos)
      << text;
  EXPECT_NE(text.find("too many unauthenticated connections; dropped the oldest"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("(49)"), std::string::npos) << text;
  EXPECT_NE(text.find("timed out"), std::string::npos) << text;
  EXPECT_NE(text.find("(128)"), std::string::npos) << text;
}

// A client chooses words of its reasons, such as the number of its version.
TEST(DropLog, ReasonsOfALineAreBounded) {
  LogQueue log;
  DropLog drops(log, LogLevel::warning);
  for (int i = 0; i < 1000; ++i) drops.add("10.0.0.1:1", "reason " + std::to_string(i), 0);
  drops.progress(10'000 * ns_per_ms);
  const auto lines = log.take();
  ASSERT_TRUE(lines.has_value());
  ASSERT_EQ(lines->size(), 2U);
  EXPECT_EQ(lines->front().text, "dropped a connection from 10.0.0.1:1: reason 0");
  EXPECT_LT(lines->back().text.size(), 500U);
  EXPECT_NE(lines->back().text.find("other reasons (983)"), std::string::npos)
      << lines->back().text;
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

// A flood takes each descriptor that becomes free, and the next accept fails again.
TEST(Connections, AShortageThatComesAndGoesIsToldOnceInTenSeconds) {
  Crowd crowd;
  const auto shortage = [&crowd](TimeNs after) {
    const NoDescriptors none;
    EXPECT_EQ(crowd.accept(crowd.now += after), 0U);
  };
  const auto told = [&crowd] {
    const auto lines = crowd.fixture.log.take().value();
    return std::ranges::count(lines, LogLevel::error, &LogLine::level);
  };
  for (int i = 0; i < 3; ++i) {
    shortage(200 * ns_per_ms);
    crowd.now += 200 * ns_per_ms;
    crowd.come("127.0.0.6");
  }
  EXPECT_EQ(told(), 1);
  shortage(10'000 * ns_per_ms);
  EXPECT_EQ(told(), 1);
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
