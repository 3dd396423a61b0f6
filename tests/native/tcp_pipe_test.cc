// TcpPipe over a real connection on loopback.
#include "rails/tcp/tcp_pipe.hpp"

#include <gtest/gtest.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <thread>
#include <vector>

#include "eventually.hpp"
#include "rails/tcp/tcp_state.hpp"

namespace r2ccl {
namespace {

const int patience_ms = static_cast<int>(1e3 * testing::patience_s);

// A connection: one end in a pipe, the other end a plain socket.
struct Connection {
  Connection() {
    const FileDescriptor listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    auto* const at = reinterpret_cast<sockaddr*>(&address);
    EXPECT_EQ(::bind(listener.get(), at, size), 0);
    EXPECT_EQ(::listen(listener.get(), 1), 0);
    EXPECT_EQ(::getsockname(listener.get(), at, &size), 0);
    FileDescriptor connected(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(::connect(connected.get(), at, size), 0);
    peer = FileDescriptor(::accept(listener.get(), nullptr, nullptr));
    prepare_rail_socket(connected.get(), 0);
    pipe = std::make_unique<TcpPipe>(std::move(connected));
  }

  // Writes until the peer's window and the own buffer are full.
  void fill() {
    const std::vector<std::byte> data(1U << 16);
    const iovec part{const_cast<std::byte*>(data.data()), data.size()};
    for (int idle = 0; idle < 20;) {
      std::size_t bytes = 0;
      idle = pipe->write({&part, 1}, bytes) == Io::ok ? 0 : idle + 1;
      if (idle > 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }

  std::unique_ptr<TcpPipe> pipe;
  FileDescriptor peer;
};

// The kernel of a process that ends closes in order, unless the process left bytes unread.  A
// filter resets.
TEST(TcpPipe, AnOrderlyCloseIsToldFromAReset) {
  for (const bool in_order : {true, false}) {
    Connection connection;
    const char last = 1;
    ASSERT_EQ(::send(connection.peer.get(), &last, 1, 0), 1);
    if (!in_order) {
      const linger at_once{.l_onoff = 1, .l_linger = 0};
      ::setsockopt(connection.peer.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
    }
    EXPECT_FALSE(connection.pipe->closed_by_peer());
    connection.peer.reset();
    std::array<std::byte, 8> room;
    const iovec part{room.data(), room.size()};
    std::size_t bytes = 0;
    const auto broken = [&] { return connection.pipe->read({&part, 1}, bytes) == Io::broken; };
    ASSERT_TRUE(testing::eventually(broken, "the end of the connection"));
    EXPECT_EQ(connection.pipe->closed_by_peer(), in_order);
  }
}

// Linux tells a reset once: to the write here, and the read then finds the end of file.
TEST(TcpPipe, AResetThatAWriteHasFoundIsNoOrderlyClose) {
  for (const bool in_order : {true, false}) {
    Connection connection;
    if (!in_order) {
      const linger at_once{.l_onoff = 1, .l_linger = 0};
      ::setsockopt(connection.peer.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
    }
    connection.peer.reset();
    std::array<std::byte, 8> room{};
    const iovec part{room.data(), room.size()};
    std::size_t bytes = 0;
    const auto ended = [&] { return connection.pipe->write({&part, 1}, bytes) == Io::broken; };
    ASSERT_TRUE(testing::eventually(ended, "a write finds the end of the connection"));
    EXPECT_EQ(connection.pipe->read({&part, 1}, bytes), Io::broken);
    EXPECT_EQ(connection.pipe->closed_by_peer(), in_order);
  }
}

// A forked process may hold a copy of the descriptor, as a duplicate does here.
TEST(TcpPipe, AbandonedConnectionsEndDespiteACopyOfTheDescriptor) {
  Connection connection;
  const FileDescriptor copy(::dup(connection.pipe->fd()));
  connection.fill();
  connection.pipe->abandon();
  connection.pipe.reset();
  // The peer may still read what has arrived.  Nothing else arrives, and the connection is broken.
  std::array<char, 1U << 16> buffer;
  pollfd ready{connection.peer.get(), POLLIN, 0};
  for (;;) {
    ASSERT_EQ(::poll(&ready, 1, patience_ms), 1) << "the connection is still open";
    const ssize_t got = ::recv(connection.peer.get(), buffer.data(), buffer.size(), 0);
    if (got > 0) continue;
    EXPECT_EQ(got, -1);
    EXPECT_EQ(errno, ECONNRESET);
    break;
  }
}

TEST(TcpPipe, APeerThatDoesNotReadLimitsTheSender) {
  Connection connection;
  EXPECT_FALSE(connection.pipe->path().peer_limited);
  connection.fill();
  // A window probe may be under way.
  PathReport report;
  const auto is_limited = [&] {
    report = connection.pipe->path();
    return report.peer_limited;
  };
  EXPECT_TRUE(testing::eventually(is_limited, "the peer limits the sender"));
  EXPECT_GT(report.unacknowledged, 0U);
}

// The rules for the state of a socket with bytes that the own host did not send.  The figures were
// read from a socket behind `tc qdisc … pfifo limit 0`, and from a socket whose peer did not read.
TEST(TcpState, ADropOnTheOwnHostIsNoClosedWindow) {
  const TcpState dropped{.unacknowledged = 5000,
                         .in_flight = 0,
                         .not_sent = 5000,
                         .probes = 0,
                         .segment = 1448,
                         .window = 65536};
  EXPECT_FALSE(dropped.peer_limited());
  TcpState state = dropped;
  state.probes = 1;
  EXPECT_FALSE(state.peer_limited());
  // Without the field, as on Linux before 5.4, a window that is open and a closed one look equal.
  state = dropped;
  state.window.reset();
  EXPECT_TRUE(state.peer_limited());
  state.probes = 2;
  EXPECT_FALSE(state.peer_limited());
}

TEST(TcpState, AWindowSmallerThanTheNextSegmentIsClosed) {
  const TcpState closed{.unacknowledged = 3'800'000,
                        .in_flight = 0,
                        .not_sent = 3'800'000,
                        .probes = 0,
                        .segment = 65'483,
                        .window = 15'360};
  EXPECT_TRUE(closed.peer_limited());
  TcpState state = closed;
  state.window = 0;
  state.probes = 1;
  EXPECT_TRUE(state.peer_limited());
  state.probes = 2;  // unanswered: the path may be broken
  EXPECT_FALSE(state.peer_limited());
  // The window is smaller than a segment, but has room for everything that waits.
  state = closed;
  state.unacknowledged = state.not_sent = 900;
  EXPECT_FALSE(state.peer_limited());
  // Bytes in flight: their acknowledgement decides.
  state = closed;
  state.in_flight = 1;
  EXPECT_FALSE(state.peer_limited());
}

TEST(TcpState, IsReadFromTheKernelsStructure) {
  tcp_info info{};
  info.tcpi_unacked = 7;
  info.tcpi_probes = 1;
  info.tcpi_snd_mss = 1448;
  info.tcpi_notsent_bytes = 300;
  info.tcpi_snd_wnd = 250;
  const std::span whole = std::as_bytes(std::span(&info, 1));
  const TcpState state = TcpState::of(whole, 1000);
  EXPECT_EQ(state.unacknowledged, 1000U);
  EXPECT_EQ(state.in_flight, 7U);
  EXPECT_EQ(state.probes, 1U);
  EXPECT_EQ(state.segment, 1448U);
  EXPECT_EQ(state.not_sent, 300U);
  EXPECT_EQ(state.window, 250U);
  const TcpState old = TcpState::of(whole.first(offsetof(tcp_info, tcpi_snd_wnd)), 1000);
  EXPECT_EQ(old.not_sent, 300U);
  EXPECT_FALSE(old.window.has_value());
}

}  // namespace
}  // namespace r2ccl
