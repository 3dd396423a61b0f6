#include "connect/connections.hpp"

#include <linux/memfd.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "base/limits.hpp"
#include "rails/shm/shm_pipe.hpp"
#include "rails/tcp/tcp_pipe.hpp"

namespace r2ccl {
namespace {

// An attempt counts among most_connects no longer than these times without an answer of the peer's
// host, and of the peer's process.
constexpr TimeNs unanswered_connect_ns = 100 * ns_per_ms;
constexpr TimeNs counted_handshake_ns = 1000 * ns_per_ms;

constexpr const char* closed_by_peer = "the peer closed the connection";

FileDescriptor new_socket(int family) {
  return FileDescriptor::made_by(
      [family] { return ::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0); });
}

// Returns the result of a connect: an errno, 0 once connected.  Empty: no result so far.
std::optional<int> connect_result(int socket) {
  pollfd ready{socket, POLLOUT, 0};
  if (::poll(&ready, 1, 0) == 0) return std::nullopt;
  int error = 0;
  socklen_t size = sizeof(error);
  ::getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &size);
  return error;
}

ssize_t send_with_memory(int socket, std::span<const std::byte> data, int memory) {
  iovec part{const_cast<std::byte*>(data.data()), data.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &memory, sizeof(int));
  return ::sendmsg(socket, &message, MSG_NOSIGNAL);
}

// Returns the first descriptor of a received message, or -1.  Closes all others.
int first_descriptor(msghdr& message) {
  int first = -1;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
      if (first < 0) {
        first = fd;
      } else {
        ::close(fd);
      }
    }
  }
  return first;
}

ssize_t receive_with_memory(int socket, std::span<std::byte> data, FileDescriptor& memory) {
  iovec part{data.data(), data.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(8 * sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  ssize_t got = 0;
  FileDescriptor received = FileDescriptor::made_by([&] {
    got = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
    return got < 0 ? -1 : first_descriptor(message);
  });
  if (received.valid() && !memory.valid()) memory = std::move(received);
  return got;
}

}  // namespace

FileDescriptor begin_connect(const RailRoute& route, int flow) {
  // An end without an address so far: the kernel would connect from or to any port of this host.
  if (IpAddress::from_sockaddr(route.remote.get()).value_or(IpAddress()).is_unspecified() ||
      (!route.device.empty() &&
       IpAddress::from_sockaddr(route.local.get()).value_or(IpAddress()).is_unspecified())) {
    errno = EADDRNOTAVAIL;
    return {};
  }
  FileDescriptor socket = new_socket(route.remote.family());
  if (!socket.valid()) return socket;
  bind_to_device(socket.get(), route.device);
  const int on = 1;
  ::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  if (route.segment > 0)
    ::setsockopt(socket.get(), IPPROTO_TCP, TCP_MAXSEG, &route.segment, sizeof(route.segment));
  // Linux chooses odd ports in bind() and even ports in connect(), as long as there are some.  A
  // path may choose its member by this bit, so every second flow leaves the choice to connect().
  if (flow % 2 != 0)
    ::setsockopt(socket.get(), IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &on, sizeof(on));
  const SocketAddress local = scoped_to(route.local, route.device);
  if (::bind(socket.get(), local.get(), local.size) != 0) return {};
  const SocketAddress remote = scoped_to(route.remote, route.device);
  const int result = ::connect(socket.get(), remote.get(), remote.size);
  if (result != 0 && errno != EINPROGRESS) return {};
  return socket;
}

Connections::Connections(const AcceptorHandshake::Self& self, TimeNs handshake_timeout,
                         std::int64_t socket_buffer_bytes, Callbacks callbacks, LogQueue& log)
    : acceptor(log),
      self_(self),
      handshake_timeout_(handshake_timeout),
      socket_buffer_bytes_(socket_buffer_bytes),
      callbacks_(std::move(callbacks)),
      log_(log),
      drops_(log, LogLevel::warning),
      quiet_drops_(log, LogLevel::debug) {}

void Connections::connect(const RailRoute& route, const Hello& hello, const HandshakeKey& key,
                          TimeNs now) {
  const auto same = std::find_if(pending_.begin(), pending_.end(), [&](const Pending& other) {
    return other.connector != nullptr && other.handshake->hello().acceptor == hello.acceptor &&
           other.handshake->hello().rail == hello.rail;
  });
  if (same != pending_.end()) {
    // Keep a connection that has sent AUTH: the handshake is about to end.
    if (same->connector->offered_epoch().has_value()) return;
    pending_.erase(same);
  }
  Pending pending;
  pending.local = route.remote.family() == AF_UNIX;
  pending.remote = route.remote.text();
  pending.began = now;
  pending.deadline = now + handshake_timeout_;
  auto handshake = std::make_unique<ConnectorHandshake>(hello, key);
  pending.connector = handshake.get();
  pending.handshake = std::move(handshake);
  pending.connecting = true;

  bool started = false;
  if (pending.local) {
    pending.memory = make_ring_memory();
    pending.socket = new_socket(AF_UNIX);
    started = pending.memory.valid() && pending.socket.valid() &&
              (::connect(pending.socket.get(), route.remote.get(), route.remote.size) == 0 ||
               errno == EINPROGRESS);
  } else {
    pending.socket = begin_connect(route);
    started = pending.socket.valid();
    std::size_t rivals = 0;
    for (const Pending& other : pending_) rivals += other.rivals.size();
    for (int flow = 1; started && flow < route.flows && rivals < most_rivals; ++flow, ++rivals) {
      FileDescriptor rival = begin_connect(route, flow);
      if (!rival.valid()) break;  // no descriptor or no port is left
      pending.rivals.push_back(std::move(rival));
    }
  }
  if (!started) {
    pending.fault = connect_fault_of(errno);
    give_up(pending, error_text("connect"), now);
    return;
  }
  pending_.push_back(std::move(pending));
}

bool Connections::may_connect(TimeNs now) const {
  std::size_t count = 0;
  for (const Pending& pending : pending_) {
    const TimeNs limit = pending.connecting ? unanswered_connect_ns : counted_handshake_ns;
    if (pending.connector != nullptr && now - pending.began < limit) ++count;
  }
  return count < most_connects;
}

void Connections::cancel(std::uint32_t peer) {
  std::erase_if(pending_, [&](const Pending& pending) {
    return pending.connector != nullptr && pending.handshake->hello().acceptor == peer;
  });
}

void Connections::add_poll_fds(std::vector<pollfd>& fds, TimeNs now) const {
  if (now >= acceptor.resumes_at()) listeners.add_poll_fds(fds);
  for (const Pending& pending : pending_) {
    if (is_stranger(pending) && now < strangers_at_) continue;
    const bool writes = pending.connecting || !pending.handshake->output().empty();
    fds.push_back(
        {pending.socket.get(), static_cast<short>(writes ? POLLIN | POLLOUT : POLLIN), 0});
    for (const FileDescriptor& rival : pending.rivals) fds.push_back({rival.get(), POLLOUT, 0});
  }
}

int Connections::sleep_ms(int interval_ms, TimeNs now) const {
  TimeNs wait = interval_ms * ns_per_ms;
  if (now < acceptor.resumes_at()) wait = std::min(wait, acceptor.resumes_at() - now);
  const bool strangers = std::ranges::any_of(pending_, is_stranger);
  if (strangers && now < strangers_at_) wait = std::min(wait, strangers_at_ - now);
  return static_cast<int>((wait + ns_per_ms - 1) / ns_per_ms);
}

void Connections::progress(TimeNs now) {
  std::vector<int> sockets;
  listeners.each_socket([&](int socket) { sockets.push_back(socket); });
  (void)progress(now, acceptor.accept(sockets, now));
}

std::vector<FileDescriptor> Connections::progress(TimeNs now, std::vector<Arrival> arrivals) {
  for (Arrival& arrival : arrivals) admit(std::move(arrival), now);
  progress_strangers(now);
  for (auto pending = pending_.begin(); pending != pending_.end();)
    pending = !is_stranger(*pending) && advance(*pending, now) ? remove(pending) : ++pending;
  // After the handshakes: a HELLO that has arrived takes its connection out of the way of a flood.
  limit(Standing::known, most_early_knowns + expected_, now);
  limit(Standing::unknown, most_strangers, now);
  limit(Standing::claimed, most_strangers + expected_, now);
  drops_.progress(now);
  quiet_drops_.progress(now);
  return std::exchange(ended_, {});
}

void Connections::admit(Arrival arrival, TimeNs now) {
  Pending pending;
  pending.local = arrival.remote.family() == AF_UNIX;
  pending.remote = arrival.remote.text();
  pending.socket = std::move(arrival.socket);
  pending.deadline = now + handshake_timeout_;
  pending.handshake =
      std::make_unique<AcceptorHandshake>(self_, callbacks_.find_key, callbacks_.decide);
  const IpAddress from = IpAddress::from_sockaddr(arrival.remote.get()).value_or(IpAddress());
  pending.standing = pending.local || known_.has(from) ? Standing::known : Standing::unknown;
  pending.source = source_of(from);
  pending_.push_back(std::move(pending));
  room(pending_.back().standing).enter(pending_.back().source);
}

// A system call for each connection in each round would cost more than the flood itself.
void Connections::progress_strangers(TimeNs now) {
  if (now < strangers_at_) return;
  std::vector<pollfd> fds;
  for (const Pending& pending : pending_)
    if (is_stranger(pending)) fds.push_back({pending.socket.get(), POLLIN, 0});
  if (fds.empty()) return;
  if (fds.size() > calm_strangers) strangers_at_ = now + stranger_tick_ns;
  (void)::poll(fds.data(), fds.size(), 0);
  auto ready = fds.cbegin();
  for (auto pending = pending_.begin(); pending != pending_.end();) {
    const bool due = is_stranger(*pending) && ((ready++)->revents != 0 || now >= pending->deadline);
    pending = due && advance(*pending, now) ? remove(pending) : ++pending;
  }
}

auto Connections::remove(std::list<Pending>::iterator pending) -> std::list<Pending>::iterator {
  if (pending->standing != Standing::own) {
    if (pending->socket.valid()) ended_.push_back(std::move(pending->socket));
    room(pending->standing).leave(pending->source);
  }
  return pending_.erase(pending);
}

void Connections::claim(Pending& pending, TimeNs now) {
  // The HELLO may be a recording, so the rail's own limit neither changes nor counts here.
  pending.claimed = now;
  pending.deadline = now + (handshake_timeout_ << most_patience_doublings);
  room(pending.standing).leave(pending.source);
  pending.standing = Standing::claimed;
  room(pending.standing).enter(pending.source);
}

void Connections::limit(Standing standing, std::size_t most, TimeNs now) {
  while (room(standing).total() > most) {
    const std::size_t most_of_a_source = room(standing).most_of_a_source();
    const auto oldest = std::ranges::find_if(pending_, [&](const Pending& pending) {
      return pending.standing == standing && room(standing).of(pending.source) == most_of_a_source;
    });
    if (oldest == pending_.end()) return;
    give_up(*oldest, "too many unauthenticated connections; dropped the oldest", now);
    remove(oldest);
  }
}

bool Connections::advance(Pending& pending, TimeNs now) {
  if (pending.connecting && !connect_done(pending)) {
    if (pending.connecting && now < pending.deadline) return false;
    pending.fault = pending.connecting ? ConnectFault::no_answer : connect_fault_of(errno);
    give_up(pending, pending.connecting ? "timed out" : error_text("connect"), now);
    return true;
  }
  if (!flush(pending) || !receive(pending)) {
    give_up(pending, closed_by_peer, now);
    return true;
  }
  (void)flush(pending);
  if (is_stranger(pending) && pending.handshake->claimed()) claim(pending, now);
  switch (pending.handshake->state()) {
    case HandshakeState::established:
      if (!pending.handshake->output().empty()) break;
      if (pending.connector == nullptr) note_late_auth(pending, now);
      finish(pending);
      return true;
    case HandshakeState::rejected: give_up(pending, "", now); return true;
    case HandshakeState::in_progress: break;
  }
  if (now < pending.deadline) return false;
  if (pending.connector != nullptr) {
    const Hello& hello = pending.handshake->hello();
    callbacks_.late(hello.acceptor, hello.rail);
  }
  pending.fault = ConnectFault::no_answer;
  give_up(pending, "timed out", now);
  return true;
}

// AUTH proves the sender, and so that the sender is late.
void Connections::note_late_auth(const Pending& pending, TimeNs now) {
  const Hello& hello = pending.handshake->hello();
  if (now - pending.claimed > callbacks_.patience(hello.connector, hello.rail))
    callbacks_.late(hello.connector, hello.rail);
}

// Returns true once connected.  A false result with `connecting` still set means not ready yet.
// With `connecting` cleared, the connect failed and errno holds the cause.
bool Connections::connect_done(Pending& pending) {
  int error = 0;
  bool connected = false;
  std::vector<FileDescriptor> waiting;
  pending.rivals.push_back(std::move(pending.socket));
  for (FileDescriptor& each : pending.rivals) {
    const std::optional<int> result = connect_result(each.get());
    if (!result.has_value()) {
      waiting.push_back(std::move(each));
    } else if (*result != 0) {
      error = *result;
    } else if (!std::exchange(connected, true)) {
      pending.socket = std::move(each);
    }
  }
  pending.rivals.clear();
  if (connected) {
    error = 0;
  } else if (!waiting.empty()) {
    pending.socket = std::move(waiting.back());
    waiting.pop_back();
    pending.rivals = std::move(waiting);
    return false;
  }
  pending.connecting = false;
  const Hello& hello = pending.handshake->hello();
  pending.deadline = pending.began + callbacks_.patience(hello.acceptor, hello.rail);
  errno = error;
  return error == 0;
}

bool Connections::flush(Pending& pending) {
  while (!pending.handshake->output().empty()) {
    const auto data = pending.handshake->output();
    ssize_t sent = 0;
    if (pending.local && pending.connector != nullptr && pending.memory.valid() &&
        !pending.connector->offered_epoch().has_value()) {
      sent = send_with_memory(pending.socket.get(), data, pending.memory.get());
    } else {
      sent = ::send(pending.socket.get(), data.data(), data.size(), MSG_NOSIGNAL);
    }
    if (sent < 0) return errno == EAGAIN || errno == EINTR;
    pending.handshake->sent(static_cast<std::size_t>(sent));
  }
  return true;
}

bool Connections::receive(Pending& pending) {
  std::array<std::byte, 1024> buffer;
  while (pending.handshake->state() == HandshakeState::in_progress) {
    ssize_t got = 0;
    if (pending.local && pending.connector == nullptr) {
      got = receive_with_memory(pending.socket.get(), buffer, pending.memory);
    } else {
      got = ::recv(pending.socket.get(), buffer.data(), buffer.size(), 0);
    }
    if (got == 0) return false;
    if (got < 0) return errno == EAGAIN || errno == EINTR;
    pending.heard = true;
    (void)pending.handshake->feed({buffer.data(), static_cast<std::size_t>(got)});
    if (!flush(pending)) return false;
  }
  return true;
}

void Connections::finish(Pending& pending) {
  const Hello& hello = pending.handshake->hello();
  EstablishedRail rail;
  rail.peer = pending.connector != nullptr ? hello.acceptor : hello.connector;
  rail.rail = hello.rail;
  rail.epoch = pending.handshake->epoch();
  rail.peer_last_fenced = pending.handshake->peer_last_fenced();
  rail.leftover = pending.handshake->take_leftover();
  rail.channel_key = pending.handshake->channel_key();
  rail.peer_names = pending.handshake->peer_names();
  if (!pending.local) prepare_rail_socket(pending.socket.get(), socket_buffer_bytes_);
  rail.socket = std::move(pending.socket);
  rail.memory = std::move(pending.memory);
  callbacks_.established(std::move(rail));
}

void Connections::give_up(Pending& pending, const std::string& why, TimeNs now) {
  if (pending.handshake->state() == HandshakeState::in_progress)
    (void)pending.handshake->abandon(why);
  const std::string& rejection = pending.handshake->reason();
  const std::string& reason = rejection.empty() ? why : rejection;
  if (pending.connector == nullptr) return tell_drop(pending, why, reason, now);
  const Hello& hello = pending.handshake->hello();
  const bool other_settings = pending.handshake->fault() == HandshakeFault::config;
  const std::string final = other_settings ? reason : "";
  const bool refused = pending.handshake->fault() == HandshakeFault::refused;
  const bool quiet = refused || pending.handshake->fault() == HandshakeFault::abandoned;
  log_.add(quiet ? LogLevel::debug : LogLevel::warning,
           "rail" + std::to_string(hello.rail) + " to " + pending.remote + ": " + reason);
  FailedConnection failed{.peer = hello.acceptor,
                          .rail = hello.rail,
                          .answered = pending.connector->offered_epoch().value_or(0),
                          .refused = {},
                          .why = reason,
                          .fault = pending.fault,
                          .final = final};
  if (refused) failed.refused = pending.handshake->peer_last_fenced();
  callbacks_.failed(failed);
}

void Connections::tell_drop(const Pending& pending, const std::string& why,
                            const std::string& reason, TimeNs now) {
  const Hello& hello = pending.handshake->hello();
  if (pending.handshake->fault() == HandshakeFault::config) {  // authentic: a peer
    drops_.add(pending.remote, reason, now);
    callbacks_.failed({.peer = hello.connector,
                       .rail = hello.rail,
                       .refused = {},
                       .why = reason,
                       .final = reason});
    return;
  }
  // Closed before a byte arrived: a probe of a peer's Localiser, or a port scan.
  const bool probe = !pending.heard && why == closed_by_peer;
  // A peer repeats a refused attempt until its rail is back.
  const bool refused = pending.handshake->fault() == HandshakeFault::refused;
  (probe || refused ? quiet_drops_ : drops_).add(pending.remote, reason, now);
}

}  // namespace r2ccl
