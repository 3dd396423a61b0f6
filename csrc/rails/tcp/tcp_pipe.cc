#include "rails/tcp/tcp_pipe.hpp"

#include <fcntl.h>
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "rails/tcp/tcp_state.hpp"

namespace r2ccl {
namespace {

// Socket option of Linux 6.17: upper bound of the delay of acknowledgements, in microseconds.  A
// link judges a rail by these acknowledgements, so the kernel should not delay them until it has
// data to send.
constexpr int tcp_delack_max_us = 46;
constexpr int delack_us = 2000;

// Number of segments delivered since the last report from which the path counts as advanced.
constexpr std::uint32_t full_segments = 4;

// Position of tcpi_snd_wnd (Linux 5.4) in tcp_info; the header of this build may be older.
constexpr std::size_t window_offset = 228;

tcp_info info_of(std::span<const std::byte> bytes) {
  tcp_info info{};  // an older kernel returns fewer fields
  std::memcpy(&info, bytes.data(), std::min(sizeof(info), bytes.size()));
  return info;
}

}  // namespace

void prepare_rail_socket(int fd, std::int64_t socket_buffer_bytes) {
  ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
  const int on = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  ::setsockopt(fd, IPPROTO_TCP, tcp_delack_max_us, &delack_us, sizeof(delack_us));
  if (socket_buffer_bytes > 0) {
    const int size = static_cast<int>(socket_buffer_bytes);
    ::setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof(size));
    ::setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &size, sizeof(size));
  }
}

Io TcpPipe::write(std::span<const iovec> parts, std::size_t& bytes) {
  constexpr int flags = MSG_NOSIGNAL | MSG_DONTWAIT;
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(parts.data());
  message.msg_iovlen = parts.size();
  const ssize_t sent = parts.size() == 1
                           ? ::send(socket_.get(), parts[0].iov_base, parts[0].iov_len, flags)
                           : ::sendmsg(socket_.get(), &message, flags);
  if (sent < 0) return on_error();
  bytes = static_cast<std::size_t>(sent);
  return Io::ok;
}

Io TcpPipe::read(std::span<const iovec> parts, std::size_t& bytes) {
  ssize_t got = 0;
  if (parts.size() == 1) {
    got = ::recv(socket_.get(), parts[0].iov_base, parts[0].iov_len, MSG_DONTWAIT);
  } else {
    got = ::readv(socket_.get(), parts.data(), static_cast<int>(parts.size()));
  }
  if (got < 0) return on_error();
  if (got == 0) {
    closed_by_peer_ = !reset_;  // a FIN
    return Io::broken;
  }
  bytes = static_cast<std::size_t>(got);
  return Io::ok;
}

// Linux tells an error of a connection once, to the first call, and reads of the dead connection
// return the end of file afterwards, as after a FIN.  EPIPE of a first call means that a FIN came
// before the reset.
Io TcpPipe::on_error() {
  if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return Io::again;
  if (errno != EPIPE) reset_ = true;
  return Io::broken;
}

// Sends a pending acknowledgement now; Linux delays it by up to 40 ms to piggyback it on data.
void TcpPipe::acknowledge() {
  const int on = 1;
  ::setsockopt(socket_.get(), IPPROTO_TCP, TCP_QUICKACK, &on, sizeof(on));
}

void TcpPipe::abandon() {
  const linger at_once{.l_onoff = 1, .l_linger = 0};
  ::setsockopt(socket_.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
  // Another process may hold a copy of the descriptor, so closing the descriptor may not end the
  // connection.  Connecting to no address resets the connection and drops the unsent bytes;
  // shutdown() is for systems without that.
  const sockaddr none{.sa_family = AF_UNSPEC, .sa_data = {}};
  if (::connect(socket_.get(), &none, sizeof(none)) != 0) ::shutdown(socket_.get(), SHUT_RDWR);
}

TcpState TcpState::of(std::span<const std::byte> bytes, std::uint64_t unacknowledged) {
  const tcp_info info = info_of(bytes);
  TcpState state{.unacknowledged = unacknowledged,
                 .in_flight = info.tcpi_unacked,
                 .not_sent = info.tcpi_notsent_bytes,
                 .probes = info.tcpi_probes,
                 .segment = info.tcpi_snd_mss,
                 .window = {}};
  if (std::uint32_t window = 0; bytes.size() >= window_offset + sizeof(window)) {
    std::memcpy(&window, bytes.data() + window_offset, sizeof(window));
    state.window = window;
  }
  return state;
}

PathReport TcpPipe::path() {
  PathReport report;
  int unacknowledged = 0;
  if (::ioctl(socket_.get(), SIOCOUTQ, &unacknowledged) == 0 && unacknowledged > 0)
    report.unacknowledged = static_cast<std::uint64_t>(unacknowledged);
  // Larger than tcp_info in the header of this build: a newer kernel has more fields.
  std::array<std::byte, 256> bytes;
  socklen_t size = sizeof(bytes);
  if (::getsockopt(socket_.get(), IPPROTO_TCP, TCP_INFO, bytes.data(), &size) == 0) {
    const std::span<const std::byte> filled = std::span(bytes).first(size);
    const tcp_info info = info_of(filled);
    report.round_trip = static_cast<TimeNs>(info.tcpi_rtt) * 1000;
    report.base_round_trip = static_cast<TimeNs>(info.tcpi_min_rtt) * 1000;
    // A few small segments are no advance: an MTU black hole lets small segments pass.
    report.advanced = info.tcpi_delivered - delivered_ >= full_segments;
    delivered_ = info.tcpi_delivered;
    // Linux delays the acknowledgement of up to 1 full segment.
    report.held_back = info.tcpi_snd_mss;
    report.peer_limited = TcpState::of(filled, report.unacknowledged).peer_limited();
  }
  return report;
}

}  // namespace r2ccl
