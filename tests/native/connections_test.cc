// Rail connections before their handshake ends, against a port that accepts and never answers.
#include "connect/connections.hpp"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <array>

#include "link/shape.hpp"

namespace r2ccl {
namespace {

constexpr TimeNs timeout = 1000 * ns_per_ms;
constexpr Hello hello{.connector = 5, .acceptor = 2, .job = 7, .rail = 3};

struct Fixture {
  LogQueue log;
  int failed = 0;
  Connections connections{{.process = 5, .job = 7},
                          timeout,
                          0,
                          {.find_key = [](std::uint32_t) { return std::nullopt; },
                           .decide = [](const Hello&, bool) { return Decision{}; },
                           .established = [](const EstablishedRail&) {},
                           .failed = [this](const FailedConnection&) { ++failed; }},
                          log};
  FileDescriptor port{::socket(AF_INET, SOCK_STREAM, 0)};
  SocketAddress at = SocketAddress::ip(IpAddress::parse("127.0.0.1").value(), 0);

  Fixture() {
    EXPECT_EQ(::bind(port.get(), at.get(), at.size), 0);
    EXPECT_EQ(::listen(port.get(), 8), 0);
    EXPECT_EQ(::getsockname(port.get(), at.get(), &at.size), 0);
  }
  void connect(TimeNs now) {
    connections.connect({.device = "",
                         .local = SocketAddress::ip(IpAddress::parse("127.0.0.1").value(), 0),
                         .remote = at},
                        hello, HandshakeKey{}, now);
  }
  [[nodiscard]] FileDescriptor accept() const {
    return FileDescriptor(::accept(port.get(), nullptr, nullptr));
  }
};

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
  EXPECT_GT(received(first), 0);
  fixture.connect(1);
  fixture.connections.progress(1);
  EXPECT_EQ(fixture.connections.pending(), 1U);
  EXPECT_EQ(received(first), 0);
  const FileDescriptor second = fixture.accept();
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

}  // namespace
}  // namespace r2ccl
