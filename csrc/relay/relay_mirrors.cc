// Mirrors of the listeners of other nodes, the announcement of own listeners, and SYNC.
#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/clock.hpp"
#include "relay/relay.hpp"

namespace r2ccl {

// Announces new listeners of this user at the own virtual address, and withdraws ended ones.
// Returns false if the kernel does not tell the listeners.
bool Relay::look() {
  auto found = table_.listeners(own_address_, user_);
  if (!found.ok()) {
    log(LogLevel::error, "relay: " + found.take_status().message());
    return false;
  }
  const std::set<std::uint16_t> there(found.value().begin(), found.value().end());
  for (const std::uint16_t port : there) {
    if (!announced_.insert(port).second) continue;
    changed_ = now_ns();
    for (const auto& peer : peers_) peer->mux.listens(port);
  }
  for (auto port = announced_.begin(); port != announced_.end();) {
    if (there.contains(*port)) {
      ++port;
      continue;
    }
    for (const auto& peer : peers_) peer->mux.unlistens(*port);
    refused_.erase(*port);
    port = announced_.erase(port);
    changed_ = now_ns();
  }
  return true;
}

void Relay::add_mirror(std::size_t index, std::uint16_t port) {
  Peer& peer = *peers_[index];
  remove_mirror(index, port);
  const LoopbackEnd at{virtual_address(options_.prefix, peer.node), port};
  auto socket = listen_at(at, /*shared=*/true);
  Status status = socket.ok() ? Status() : socket.take_status();
  const int fd = status.ok() ? socket.value().get() : -1;
  epoll_event event{.events = EPOLLIN, .data = {.fd = fd}};
  if (status.ok() && ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0)
    status = {ErrorCode::internal, "epoll: " + std::string(std::strerror(errno))};
  if (!status.ok()) {
    log(LogLevel::error, "relay: no mirror of a listener of node " + std::to_string(peer.node) +
                             ": " + status.message());
    peer.mux.no_mirror(port);
    return;
  }
  mirrors_.insert_or_assign(fd, Mirror{std::move(socket.value()), index, port});
}

void Relay::remove_mirror(std::size_t index, std::uint16_t port) {
  std::erase_if(mirrors_, [&](const auto& entry) {
    return entry.second.peer == index && entry.second.port == port;
  });
}

FileDescriptor Relay::open_spare() {
  return FileDescriptor::made_by([] { return ::open("/dev/null", O_RDONLY | O_CLOEXEC); });
}

// Accepts a connection.  Without a free descriptor, the connection is refused by means of the spare
// one: a connection that waits would wake this thread again and again.
FileDescriptor Relay::accept_at(int listener, sockaddr* from, socklen_t* size) {
  const auto accept = [&] {
    return FileDescriptor::made_by(
        [&] { return ::accept4(listener, from, size, SOCK_NONBLOCK | SOCK_CLOEXEC); });
  };
  if (!spare_.valid()) spare_ = open_spare();
  FileDescriptor socket = accept();
  if (socket.valid() || (errno != EMFILE && errno != ENFILE)) return socket;
  log(LogLevel::error, "relay: refused a connection: " + std::string(std::strerror(errno)) +
                           "; raise the limit of open files (ulimit -n)");
  spare_.reset();
  if (socket = accept(); socket.valid()) close_with_reset(socket);
  return {};
}

// Accepts a connection of this user's processes only.
void Relay::accept_from(Mirror& mirror) {
  sockaddr_in from{};
  socklen_t size = sizeof(from);
  FileDescriptor socket = accept_at(mirror.socket.get(), reinterpret_cast<sockaddr*>(&from), &size);
  if (!socket.valid()) return;
  Peer& peer = *peers_[mirror.peer];
  const LoopbackEnd client{ntohl(from.sin_addr.s_addr), ntohs(from.sin_port)};
  const LoopbackEnd at{virtual_address(options_.prefix, peer.node), mirror.port};
  auto owner = table_.owner(client, at);
  std::string why;
  if (!owner.ok() || !owner.value().has_value())
    why = "its owner is not known";
  else if (*owner.value() != user_)
    why = "its owner is user " + std::to_string(*owner.value()) + ", and only user " +
          std::to_string(user_) + " may connect";
  else if (peer.mux.congested())
    why = "too many records wait for the rails to node " + std::to_string(peer.node);
  if (!why.empty()) {
    log(LogLevel::warning,
        "relay: refused a connection from " + client.text() + " to " + at.text() + ": " + why);
    close_with_reset(socket);
    return;
  }
  const StreamId stream = peer.mux.open(mirror.port);
  carry(std::move(socket), mirror.peer, stream, /*connecting=*/false);
}

// ---- SYNC ----

void Relay::accept_sync() {
  FileDescriptor socket = accept_at(sync_.get(), nullptr, nullptr);
  if (!socket.valid()) return;
  ucred caller{};
  socklen_t size = sizeof(caller);
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &caller, &size) != 0 ||
      caller.uid != user_) {
    log(LogLevel::warning, "relay: refused SYNC of user " + std::to_string(caller.uid) +
                               "; only user " + std::to_string(user_) + " may call SYNC");
    return;
  }
  if (!look()) return;  // the caller reads no answer, which is an error
  const std::uint32_t token = next_token_++;
  SyncClient& client = sync_clients_[token];
  client.socket = std::move(socket);
  for (std::size_t index = 0; index < peers_.size(); ++index) {
    if (peers_[index]->ended) continue;
    client.waits_for.insert(index);
    peers_[index]->mux.sync(token);
  }
  if (client.waits_for.empty()) answer(token);
}

void Relay::on_synced(std::size_t peer, std::uint32_t token) {
  const auto found = sync_clients_.find(token);
  if (found == sync_clients_.end()) return;
  found->second.waits_for.erase(peer);
  if (found->second.waits_for.empty()) answer(token);
}

// Answers "ok", or "taken PORT NODE" for each listener that a node cannot mirror.
void Relay::answer(std::uint32_t token) {
  std::string text;
  for (const auto& [port, where] : refused_)
    text += "taken " + std::to_string(port) + " " + where + "\n";
  if (text.empty()) text = "ok\n";
  (void)::send(sync_clients_.at(token).socket.get(), text.data(), text.size(), MSG_NOSIGNAL);
  sync_clients_.erase(token);
}

}  // namespace r2ccl
