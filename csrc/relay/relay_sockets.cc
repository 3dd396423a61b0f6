// Carried connections: loopback sockets and their streams.
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "relay/relay.hpp"

namespace r2ccl {

int Relay::fd_of(std::size_t peer, StreamId stream) const {
  const auto found = by_stream_.find({peer, stream});
  return found == by_stream_.end() ? -1 : found->second;
}

void Relay::carry(FileDescriptor socket, std::size_t peer, StreamId stream, bool connecting) {
  const int fd = socket.get();
  const int on = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  Carried& carried = carried_[fd];
  carried = {std::move(socket), peer, stream, connecting, false, false, 0};
  by_stream_[{peer, stream}] = fd;
  connections_ = carried_.size();
  watch(fd, carried);
}

// Connects the stream of a peer to the listener of this node.
void Relay::connect(std::size_t peer, StreamId stream, std::uint16_t port) {
  if (!announced_.contains(port)) return peers_[peer]->mux.reset(stream);
  const std::uint32_t from = virtual_address(options_.prefix, peers_[peer]->node);
  auto socket = connect_from(from, {own_address_, port});
  if (!socket.ok()) return peers_[peer]->mux.reset(stream);
  carry(std::move(socket.value()), peer, stream, /*connecting=*/true);
}

void Relay::on_socket(int fd, std::uint32_t events) {
  Carried& carried = carried_.at(fd);
  if (carried.connecting) {
    int error = 0;
    socklen_t size = sizeof(error);
    ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0) {
      peers_[carried.peer]->mux.reset(carried.stream);
      return drop(fd, /*reset_socket=*/false);
    }
    carried.connecting = false;
  }
  if ((events & EPOLLOUT) != 0) write_socket(fd, carried);
  if (!carried_.contains(fd)) return;
  if (peers_[carried.peer]->ended) return end_reading(fd, carried);
  if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) read_socket(fd, carried);
  if (carried_.contains(fd)) watch(fd, carried);
}

// The peer has ended: our processes still get the bytes that have arrived.
void Relay::end_connections(std::size_t index) {
  peers_[index]->ended = true;
  std::erase_if(mirrors_, [&](const auto& entry) { return entry.second.peer == index; });
  std::vector<int> fds;
  for (const auto& [fd, carried] : carried_)
    if (carried.peer == index) fds.push_back(fd);
  for (const int fd : fds) {
    Carried& carried = carried_.at(fd);
    if (carried.connecting) continue;  // its event follows
    write_socket(fd, carried);
    if (carried_.contains(fd)) end_reading(fd, carried);
  }
  std::vector<std::uint32_t> tokens;
  for (const auto& [token, client] : sync_clients_) tokens.push_back(token);
  for (const std::uint32_t token : tokens) on_synced(index, token);
}

// Drops a connection to an ended peer once its bytes are with our process.  As with a peer's
// kernel: an end if the peer's process has sent its end, else a reset.
void Relay::end_reading(int fd, Carried& carried) {
  carried.read_end = true;
  if (peers_[carried.peer]->mux.read(carried.stream).empty())
    return drop(fd, /*reset_socket=*/!carried.write_end);
  watch(fd, carried);
}

void Relay::read_socket(int fd, Carried& carried) {
  if (carried.read_end) return;
  StreamMux& mux = peers_[carried.peer]->mux;
  const std::size_t room = std::min(mux.room(carried.stream), buffer_.size());
  if (room == 0) return;  // an event `writable` follows
  const ssize_t bytes = ::recv(fd, buffer_.data(), room, 0);
  if (bytes > 0) {
    (void)mux.write(carried.stream, std::span(buffer_).first(static_cast<std::size_t>(bytes)));
  } else if (bytes == 0) {
    mux.finish(carried.stream);
    carried.read_end = true;
    if (carried.write_end) ending_.insert(fd);
  } else if (errno != EAGAIN && errno != EINTR) {
    mux.reset(carried.stream);
    drop(fd, /*reset_socket=*/false);
  }
}

void Relay::write_socket(int fd, Carried& carried) {
  StreamMux& mux = peers_[carried.peer]->mux;
  // The multiplexer forgets a stream once both directions have ended.
  const bool ends = !mux.has(carried.stream) || mux.at_end(carried.stream);
  for (auto view = mux.read(carried.stream); !view.empty(); view = mux.read(carried.stream)) {
    const ssize_t bytes = ::send(fd, view.data(), view.size(), MSG_NOSIGNAL);
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes < 0 && errno == EAGAIN) return;
    if (bytes < 0) {
      mux.reset(carried.stream);
      return drop(fd, /*reset_socket=*/false);
    }
    const bool last =
        mux.finished(carried.stream) && static_cast<std::size_t>(bytes) == view.size();
    mux.consumed(carried.stream, static_cast<std::size_t>(bytes));
    if (last) return end_writing(fd, carried);
  }
  if (ends) end_writing(fd, carried);
}

void Relay::end_writing(int fd, Carried& carried) {
  if (std::exchange(carried.write_end, true)) return;
  ::shutdown(fd, SHUT_WR);
  if (carried.read_end) ending_.insert(fd);
}

// Waits for the events that can move bytes now.  A descriptor without any leaves epoll, since a
// closed connection would wake the thread again and again.  A descriptor that epoll refuses is
// dropped, and its stream is reset, since nothing would ever move its bytes.
void Relay::watch(int fd, Carried& carried) {
  StreamMux& mux = peers_[carried.peer]->mux;
  const bool reads = !carried.connecting && !carried.read_end && mux.room(carried.stream) > 0;
  const bool writes = carried.connecting || !mux.read(carried.stream).empty();
  const std::uint32_t wanted = (reads ? EPOLLIN : 0U) | (writes ? EPOLLOUT : 0U);
  if (wanted == carried.watched) return;
  epoll_event event{.events = wanted, .data = {.fd = fd}};
  const int how = wanted == 0            ? EPOLL_CTL_DEL
                  : carried.watched == 0 ? EPOLL_CTL_ADD
                                         : EPOLL_CTL_MOD;
  if (::epoll_ctl(epoll_.get(), how, fd, &event) != 0) {
    log(LogLevel::error, "relay: a connection is reset: epoll: " +
                             std::string(std::strerror(errno)) + "; see fs.epoll.max_user_watches");
    mux.reset(carried.stream);
    return drop(fd, /*reset_socket=*/true);
  }
  carried.watched = wanted;
}

void Relay::drop(int fd, bool reset_socket) {
  const auto found = carried_.find(fd);
  if (found == carried_.end()) return;
  by_stream_.erase({found->second.peer, found->second.stream});
  ending_.erase(fd);
  if (reset_socket) close_with_reset(found->second.socket);
  carried_.erase(found);
  connections_ = carried_.size();
}

// Both directions have ended, and the multiplexer has sent the last record.
void Relay::drop_finished() {
  const std::set<int> ending = ending_;
  for (const int fd : ending) {
    const Carried& carried = carried_.at(fd);
    if (!peers_[carried.peer]->mux.has(carried.stream)) drop(fd, /*reset_socket=*/false);
  }
}

}  // namespace r2ccl
