#include "relay/loopback.hpp"

#include <arpa/inet.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <linux/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>

namespace r2ccl {
namespace {

// States of a socket in the kernel (net/tcp_states.h).  <netinet/tcp.h> has the states as well, but
// cannot stand beside <linux/tcp.h>, which other files of a unity build include.
enum : unsigned {
  tcp_established = 1,
  tcp_syn_sent = 2,
  tcp_fin_wait1 = 4,
  tcp_fin_wait2 = 5,
  tcp_close_wait = 8,
  tcp_listen = 10,
};

constexpr int most_waiting = 1024;  // connections that wait for an accept, as in PyTorch's store

Status failed_call(const std::string& what) {
  return {ErrorCode::internal, what + ": " + std::strerror(errno)};
}

FileDescriptor new_tcp_socket() {
  return FileDescriptor::made_by(
      [] { return ::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0); });
}

const sockaddr* as_sockaddr(const sockaddr_in& address) {
  return reinterpret_cast<const sockaddr*>(&address);
}

LoopbackEnd end_of(const sockaddr_in& address) {
  return {ntohl(address.sin_addr.s_addr), ntohs(address.sin_port)};
}

}  // namespace

sockaddr_in LoopbackEnd::get() const {
  sockaddr_in made{};
  made.sin_family = AF_INET;
  made.sin_port = htons(port);
  made.sin_addr.s_addr = htonl(address);
  return made;
}

std::string LoopbackEnd::text() const {
  std::string text;
  for (int shift = 24; shift >= 0; shift -= 8)
    text += std::to_string(address >> shift & 0xFFU) + (shift > 0 ? "." : ":");
  return text + std::to_string(port);
}

Result<FileDescriptor> listen_at(const LoopbackEnd& at, bool shared) {
  FileDescriptor socket = new_tcp_socket();
  if (!socket.valid()) return failed_call("socket");
  const int on = 1;
  if (shared) ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  const sockaddr_in address = at.get();
  if (::bind(socket.get(), as_sockaddr(address), sizeof(address)) != 0 ||
      ::listen(socket.get(), most_waiting) != 0)
    return failed_call("listen at " + at.text());
  return socket;
}

Result<FileDescriptor> connect_from(std::uint32_t address, const LoopbackEnd& to) {
  FileDescriptor socket = new_tcp_socket();
  if (!socket.valid()) return failed_call("socket");
  // The kernel chooses the port at the connect.  A port fixed at the bind could stand in the way of
  // a later mirror.
  const int on = 1;
  ::setsockopt(socket.get(), IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &on, sizeof(on));
  ::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  const sockaddr_in from = LoopbackEnd{address, 0}.get();
  if (::bind(socket.get(), as_sockaddr(from), sizeof(from)) != 0)
    return failed_call("bind to " + LoopbackEnd{address, 0}.text());
  const sockaddr_in remote = to.get();
  if (::connect(socket.get(), as_sockaddr(remote), sizeof(remote)) != 0 && errno != EINPROGRESS)
    return failed_call("connect to " + to.text());
  return socket;
}

void close_with_reset(FileDescriptor& socket) {
  const linger now{.l_onoff = 1, .l_linger = 0};
  ::setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &now, sizeof(now));
  socket.reset();
}

// ---- the kernel's table ----

Result<SocketTable> SocketTable::open() {
  SocketTable table;
  table.netlink_ = FileDescriptor::made_by(
      [] { return ::socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_SOCK_DIAG); });
  if (table.netlink_.valid()) {
    const timeval limit{.tv_sec = 1, .tv_usec = 0};
    ::setsockopt(table.netlink_.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    if (table.check().ok()) return table;
    table.netlink_.reset();
  }
  R2CCL_TRY(table.check());
  return table;
}

// Looks up a connection of this process: its owner must be this process's user.
Status SocketTable::check() {
  const LoopbackEnd any{INADDR_LOOPBACK, 0};
  auto listener = listen_at(any, false);
  if (!listener.ok()) return listener.take_status();
  sockaddr_in bound{};
  socklen_t size = sizeof(bound);
  if (::getsockname(listener.value().get(), reinterpret_cast<sockaddr*>(&bound), &size) != 0)
    return failed_call("getsockname");
  auto client = connect_from(INADDR_LOOPBACK, end_of(bound));
  if (!client.ok()) return client.take_status();
  sockaddr_in local{};
  size = sizeof(local);
  if (::getsockname(client.value().get(), reinterpret_cast<sockaddr*>(&local), &size) != 0)
    return failed_call("getsockname");
  auto found = owner(end_of(local), end_of(bound));
  if (!found.ok()) return found.take_status();
  if (found.value() == ::geteuid()) return {};
  return {ErrorCode::internal,
          "the kernel does not tell the owner of a connection, by netlink (sock_diag) or "
          "/proc/net/tcp: the relay could not keep strangers out"};
}

Result<std::vector<std::uint16_t>> SocketTable::listeners(std::uint32_t address, uid_t owner) {
  auto all = entries(1U << tcp_listen, nullptr, nullptr);
  if (!all.ok()) return all.take_status();
  std::vector<std::uint16_t> ports;
  for (const Entry& entry : all.value())
    if (entry.local.address == address && entry.owner == owner) ports.push_back(entry.local.port);
  return ports;
}

Result<std::optional<uid_t>> SocketTable::owner(const LoopbackEnd& local,
                                                const LoopbackEnd& remote) {
  // A client may have sent and closed already.
  constexpr std::uint32_t open = 1U << tcp_established | 1U << tcp_fin_wait1 | 1U << tcp_fin_wait2 |
                                 1U << tcp_close_wait | 1U << tcp_syn_sent;
  auto all = entries(open, &local, &remote);
  if (!all.ok()) return all.take_status();
  for (const Entry& entry : all.value())
    if (entry.local == local && entry.remote == remote) return std::optional<uid_t>(entry.owner);
  return std::optional<uid_t>();
}

Result<std::vector<SocketTable::Entry>> SocketTable::entries(std::uint32_t states,
                                                             const LoopbackEnd* local,
                                                             const LoopbackEnd* remote) {
  if (netlink_.valid()) return from_netlink(states, local, remote);
  return from_proc(states);
}

Result<std::vector<SocketTable::Entry>> SocketTable::from_netlink(std::uint32_t states,
                                                                  const LoopbackEnd* local,
                                                                  const LoopbackEnd* remote) {
  struct {
    nlmsghdr header;
    inet_diag_req_v2 request;
  } query{};
  query.header.nlmsg_len = sizeof(query);
  query.header.nlmsg_type = SOCK_DIAG_BY_FAMILY;
  query.header.nlmsg_flags = NLM_F_REQUEST;
  query.header.nlmsg_seq = ++sequence_;
  query.request.sdiag_family = AF_INET;
  query.request.sdiag_protocol = IPPROTO_TCP;
  query.request.idiag_states = states;
  query.request.id.idiag_cookie[0] = query.request.id.idiag_cookie[1] = INET_DIAG_NOCOOKIE;
  const bool single = local != nullptr;
  if (single) {  // the kernel looks this socket up by hash
    query.request.id.idiag_sport = htons(local->port);
    query.request.id.idiag_dport = htons(remote->port);
    query.request.id.idiag_src[0] = htonl(local->address);
    query.request.id.idiag_dst[0] = htonl(remote->address);
  } else {
    query.header.nlmsg_flags |= NLM_F_DUMP;
  }
  if (::send(netlink_.get(), &query, sizeof(query), 0) < 0) return failed_call("sock_diag");
  std::vector<Entry> found;
  alignas(nlmsghdr) std::array<char, 32 << 10> buffer;
  for (;;) {
    const ssize_t bytes = ::recv(netlink_.get(), buffer.data(), buffer.size(), 0);
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes <= 0) return failed_call("sock_diag");
    auto left = static_cast<unsigned>(bytes);
    for (auto* header = reinterpret_cast<nlmsghdr*>(buffer.data()); NLMSG_OK(header, left);
         header = NLMSG_NEXT(header, left)) {
      if (header->nlmsg_seq != sequence_) continue;
      if (header->nlmsg_type == NLMSG_DONE) return found;
      if (header->nlmsg_type == NLMSG_ERROR) {
        nlmsgerr error{};
        std::memcpy(&error, NLMSG_DATA(header), sizeof(error));
        if (error.error == 0 || error.error == -ENOENT) return found;
        errno = -error.error;
        return failed_call("sock_diag");
      }
      inet_diag_msg socket{};
      if (header->nlmsg_len < NLMSG_LENGTH(sizeof(socket))) continue;
      std::memcpy(&socket, NLMSG_DATA(header), sizeof(socket));
      // An IPv6 socket with an IPv4 connection, as torch's, has mapped addresses: ::ffff:a.b.c.d.
      const std::size_t word = socket.idiag_family == AF_INET6 ? 3 : 0;
      found.push_back({{ntohl(socket.id.idiag_src[word]), ntohs(socket.id.idiag_sport)},
                       {ntohl(socket.id.idiag_dst[word]), ntohs(socket.id.idiag_dport)},
                       socket.idiag_state,
                       socket.idiag_uid});
      if (single) return found;
    }
  }
}

Result<std::vector<SocketTable::Entry>> SocketTable::from_proc(std::uint32_t states) {
  std::vector<Entry> found;
  R2CCL_TRY(read_table("/proc/net/tcp", states, found));
  // Without IPv6 in the kernel, the second table does not exist.
  if (::access("/proc/net/tcp6", R_OK) == 0) R2CCL_TRY(read_table("/proc/net/tcp6", states, found));
  return found;
}

Status SocketTable::read_table(const char* path, std::uint32_t states, std::vector<Entry>& found) {
  std::ifstream table(path);
  if (!table) return failed_call(path);
  std::string line;
  std::getline(table, line);                              // the headings
  const std::string mapped = "0000000000000000FFFF0000";  // of an IPv4 address in an IPv6 socket
  const auto is_ipv4 = [&](const std::string& text) {
    return text.find(':') == 8 || text.starts_with(mapped);
  };
  const auto end_from = [](const std::string& text) {
    // The address is printed as a number of the host's byte order; the port is not.
    const std::size_t colon = text.find(':');
    const auto address =
        static_cast<std::uint32_t>(std::stoul(text.substr(colon - 8, 8), nullptr, 16));
    const auto port = static_cast<std::uint16_t>(std::stoul(text.substr(colon + 1), nullptr, 16));
    return LoopbackEnd{ntohl(address), port};
  };
  while (std::getline(table, line)) {
    std::istringstream fields(line);
    std::string number, local, remote, state, queues, timer, retransmits;
    uid_t owner = 0;
    if (!(fields >> number >> local >> remote >> state >> queues >> timer >> retransmits >> owner))
      continue;
    if (!is_ipv4(local) || !is_ipv4(remote)) continue;
    const auto value = static_cast<std::uint8_t>(std::stoul(state, nullptr, 16));
    if ((states >> value & 1U) == 0) continue;
    found.push_back({end_from(local), end_from(remote), value, owner});
  }
  return {};
}

}  // namespace r2ccl
