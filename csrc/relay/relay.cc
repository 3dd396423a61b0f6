#include "relay/relay.hpp"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/clock.hpp"
#include "base/interrupt.hpp"
#include "drivers/socket_address.hpp"

namespace r2ccl {
namespace {

// Passes between links and sockets before the thread looks at everything else.
constexpr int most_passes = 8;
// Sleep while acknowledgements are due; shortest and longest time between two looks at listeners.
constexpr TimeNs busy_sleep_ns = 2 * ns_per_ms;
constexpr TimeNs start_look_ns = 100 * ns_per_ms;
constexpr TimeNs idle_look_ns = 1000 * ns_per_ms;
// Limit of a drain if the end of a node ends the job, too.
constexpr TimeNs drain_ns = 1000 * ns_per_ms;

std::string node_name(std::uint32_t node) { return "node " + std::to_string(node); }

Status check_node(const RelayOptions::Peer& peer, const std::set<std::uint32_t>& used) {
  if (peer.node < most_relay_nodes && !used.contains(peer.node)) return {};
  return {ErrorCode::invalid_argument, "peer node: is " + std::to_string(peer.node) +
                                           "; must be below " + std::to_string(most_relay_nodes) +
                                           " and differ from all other nodes"};
}

}  // namespace

Result<FileDescriptor> hold_prefix(std::uint32_t prefix) {
  const std::string text = LoopbackEnd{prefix, 0}.text();
  const std::string shown = text.substr(0, text.rfind(':'));
  const bool fits = prefix >> 24U == 127 && (prefix >> 16U & 0xFFU) != 0 && (prefix & 0xFFU) == 0;
  if (!fits)
    return Status(ErrorCode::invalid_argument,
                  "prefix: is " + shown + "; must be 127.x.y.0 with x above 0");
  auto lock = listen_at({prefix + 254, prefix_lock_port}, /*shared=*/false);
  if (lock.ok()) return lock;
  return Status(ErrorCode::invalid_argument, "prefix: " + shown +
                                                 " is in use by another relay of this host (" +
                                                 lock.take_status().message() + ")");
}

TimeNs look_interval(TimeNs unchanged, bool started) {
  if (started) return idle_look_ns;
  return std::clamp(unchanged / 100, start_look_ns, idle_look_ns);
}

std::string sync_socket_name(std::uint32_t prefix, std::uint32_t node) {
  const std::string text = LoopbackEnd{virtual_address(prefix, node), 0}.text();
  return "r2serve-relay-" + text.substr(0, text.rfind(':'));
}

Result<std::unique_ptr<Relay>> Relay::create(std::shared_ptr<Engine> engine,
                                             const RelayOptions& options) {
  R2CCL_TRY(engine->check_origin());
  std::set<std::uint32_t> used{options.node};
  for (const RelayOptions::Peer& peer : options.peers) {
    R2CCL_TRY(check_node(peer, used));
    used.insert(peer.node);
  }
  auto table = SocketTable::open();
  if (!table.ok()) return table.take_status();
  auto lock = hold_prefix(options.prefix);
  if (!lock.ok()) return lock.take_status();
  auto name = SocketAddress::abstract_unix(sync_socket_name(options.prefix, options.node));
  if (!name.ok()) return name.take_status();
  FileDescriptor sync = FileDescriptor::made_by(
      [] { return ::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0); });
  if (::bind(sync.get(), name.value().get(), name.value().size) != 0 ||
      ::listen(sync.get(), 64) != 0)
    return Status(ErrorCode::internal, "socket for SYNC: " + std::string(std::strerror(errno)));
  FileDescriptor epoll = FileDescriptor::made_by([] { return ::epoll_create1(EPOLL_CLOEXEC); });
  FileDescriptor wake =
      FileDescriptor::made_by([] { return ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC); });
  if (!epoll.valid() || !wake.valid())
    return Status(ErrorCode::internal, "epoll: " + std::string(std::strerror(errno)));
  return std::unique_ptr<Relay>(new Relay(std::move(engine), options, std::move(table.value()),
                                          std::move(lock.value()), std::move(sync),
                                          std::move(epoll), std::move(wake)));
}

Relay::Relay(std::shared_ptr<Engine> engine, const RelayOptions& options, SocketTable table,
             FileDescriptor lock, FileDescriptor sync, FileDescriptor epoll, FileDescriptor wake)
    : engine_(std::move(engine)),
      options_(options),
      own_address_(virtual_address(options.prefix, options.node)),
      user_(::geteuid()),
      parent_process_(::getppid()),
      table_(std::move(table)),
      lock_(std::move(lock)),
      sync_(std::move(sync)),
      epoll_(std::move(epoll)),
      wake_(std::move(wake)),
      spare_(open_spare()),
      nodes_{options.node},
      changed_(now_ns()) {
  for (const RelayOptions::Peer& peer : options.peers) {
    nodes_.insert(peer.node);
    insert(peer);
  }
  for (const int fd : {sync_.get(), wake_.get(), options_.parent}) {
    if (fd < 0) continue;
    epoll_event event{.events = EPOLLIN, .data = {.fd = fd}};
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event);
  }
}

// The streams cannot be restored, so the connections end with a reset.
Relay::~Relay() {
  for (auto& [fd, carried] : carried_) close_with_reset(carried.socket);
}

void Relay::insert(const RelayOptions::Peer& described) {
  by_process_[described.process] = peers_.size();
  peers_.push_back(std::make_unique<Peer>(described, engine_->process() < described.process));
  for (const std::uint16_t port : announced_) peers_.back()->mux.listens(port);
}

Status Relay::add_peer(const RelayOptions::Peer& peer) {
  const std::lock_guard guard(mutex_);
  R2CCL_TRY(check_node(peer, nodes_));
  nodes_.insert(peer.node);
  joining_.push_back(peer);
  const std::uint64_t one = 1;
  (void)!::write(wake_.get(), &one, sizeof(one));
  return {};
}

void Relay::take_joining() {
  std::uint64_t count = 0;
  (void)!::read(wake_.get(), &count, sizeof(count));
  const std::lock_guard guard(mutex_);
  for (const RelayOptions::Peer& peer : joining_) insert(peer);
  joining_.clear();
}

// ---- the loop ----

Status Relay::run() {
  R2CCL_TRY(engine_->check_origin());
  for (;;) {
    for (int pass = 0; pass < most_passes; ++pass)
      if (!carry_links()) break;
    drop_finished();
    const TimeNs now = now_ns();
    R2CCL_TRY(check_peers());
    if (now - asked_ >= interrupt_interval_ns) {
      asked_ = now;
      if (interrupted()) return {ErrorCode::aborted, "the relay was interrupted by a signal"};
    }
    if (now >= next_look_) {
      (void)look();
      next_look_ = now + look_interval(now - changed_, parent_told_up_);
      (void)carry_links();
    }
    sleep(now, next_look_);
    if (parent_is_gone()) {
      drain();
      return {};
    }
    (void)serve_sockets();
  }
}

// The processes of the node have ended or will: the bytes and ends that they have sent still go to
// the peers, as a kernel's sockets would bring them.
void Relay::drain() {
  if (options_.parent >= 0) ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, options_.parent, nullptr);
  const TimeNs limit = options_.peers_may_end ? options_.link_timeout_ns : drain_ns;
  std::uint64_t before = 0;
  for (TimeNs end = now_ns() + limit; now_ns() < end;) {
    bool waits = carry_links();
    const int events = serve_sockets();
    std::uint64_t delivered = 0;
    for (const auto& peer : peers_) {
      delivered += peer->delivered;
      if (peer->ended || peer->closed || peer->gone || !peer->lost.empty()) continue;
      waits = waits || peer->awaits_ack || peer->mux.has_records() || peer->mux.has_bytes();
    }
    if (!waits && events == 0) return;
    const TimeNs now = now_ns();
    if (delivered != std::exchange(before, delivered) && options_.peers_may_end) end = now + limit;
    sleep(now, end);
  }
  log(LogLevel::warning, "relay: not all bytes of ended connections have reached the other nodes");
}

// Moves records between the links and the multiplexers, and handles their events.  Returns true if
// an event was handled, since its answer may be due.
bool Relay::carry_links() {
  engine_->carry_streams([this](std::uint32_t process, Link& link, TimeNs now) {
    const auto found = by_process_.find(process);
    if (found == by_process_.end()) return;
    Peer& peer = *peers_[found->second];
    if (peer.ended) return;
    if (!peer.mux.take(link, now)) peer.lost = "violates the protocol: " + peer.mux.violation();
    (void)peer.mux.pump(link, now);
    peer.closed = link.peer_closed();
    peer.railless = link.has_no_rail();
    peer.gone = link.peer_gone();
    const std::string_view why = peer.mux.why_lost(link, now, options_.link_timeout_ns);
    if (!why.empty())
      peer.lost = std::string(why) + " within the link timeout of " +
                  std::to_string(options_.link_timeout_ns / (1000 * ns_per_ms)) + " s";
    peer.awaits_ack = !link.all_delivered() || peer.mux.has_records();
    peer.delivered = link.out_stream(streams_communicator).delivered();
  });
  bool handled = false;
  for (std::size_t index = 0; index < peers_.size(); ++index) {
    if (!peers_[index]->mux.has_events()) continue;
    on_events(index);
    handled = true;
  }
  return handled;
}

void Relay::on_events(std::size_t index) {
  StreamMux& mux = peers_[index]->mux;
  std::set<StreamId> touched;
  for (const StreamEvent& event : mux.take_events()) {
    switch (event.kind) {
      case StreamEvent::Kind::opened: connect(index, event.stream, event.port); break;
      case StreamEvent::Kind::readable:
      case StreamEvent::Kind::finished:
      case StreamEvent::Kind::writable: touched.insert(event.stream); break;
      case StreamEvent::Kind::reset:
        if (const int fd = fd_of(index, event.stream); fd >= 0) drop(fd, /*reset_socket=*/true);
        break;
      case StreamEvent::Kind::listens: add_mirror(index, event.port); break;
      case StreamEvent::Kind::unlistens: remove_mirror(index, event.port); break;
      case StreamEvent::Kind::no_mirror:
        refused_[event.port] = node_name(peers_[index]->node);
        log(LogLevel::error, "relay: port " + std::to_string(event.port) + " of " +
                                 LoopbackEnd{own_address_, event.port}.text() + " is taken on " +
                                 node_name(peers_[index]->node) +
                                 ": processes there cannot connect");
        break;
      case StreamEvent::Kind::sync: mux.synced(event.token); break;
      case StreamEvent::Kind::synced: on_synced(index, event.token); break;
    }
  }
  for (const StreamId stream : touched) {
    const int fd = fd_of(index, stream);
    const auto found = carried_.find(fd);
    if (found == carried_.end() || found->second.connecting) continue;
    write_socket(fd, found->second);
    if (const auto left = carried_.find(fd); left != carried_.end()) watch(fd, left->second);
  }
}

Status Relay::check_peers() {
  for (std::size_t index = 0; index < peers_.size(); ++index) {
    Peer* const peer = peers_[index].get();
    if (peer->ended) continue;
    const std::string name = "the relay of " + node_name(peer->node);
    if (peer->closed && options_.peers_may_end) {
      log(LogLevel::info, name + " has ended in good order");
      end_connections(index);
      continue;
    }
    if (!peer->lost.empty()) return {ErrorCode::peer_lost, name + ": " + peer->lost};
    if (peer->closed) return {ErrorCode::peer_closed, name + " has ended"};
    if (peer->gone)
      return {
          ErrorCode::peer_lost,
          name + ": its process is gone (its host closed all connections and refuses new ones)"};
  }
  return {};
}

// A forked child of the parent may hold the other end of the pipe, so the parent's number is
// checked, too.
bool Relay::parent_is_gone() {
  if (::getppid() != parent_process_) return true;
  if (options_.parent < 0) return false;
  pollfd state{options_.parent, POLLIN, 0};
  if (::poll(&state, 1, 0) <= 0) return false;
  std::array<char, 64> words{};
  const ssize_t bytes = ::read(options_.parent, words.data(), words.size());
  if (bytes < 0) return errno != EAGAIN && errno != EINTR;
  if (bytes > 0) parent_told_up_ = true;
  return bytes == 0;
}

void Relay::sleep(TimeNs now, TimeNs until) {
  std::vector<pollfd> fds{{epoll_.get(), POLLIN, 0}};
  bool may_sleep = engine_->arm_streams(fds);
  for (const auto& peer : peers_) {
    if (peer->ended) continue;
    // Events handled since the last pass may have left records for the link.
    if (peer->awaits_ack || peer->mux.has_records()) until = std::min(until, now + busy_sleep_ns);
    // The engine's thread finds out whether the process is gone.
    if (peer->railless) until = std::min(until, now + start_look_ns);
    may_sleep = may_sleep && !peer->mux.has_events();
  }
  const TimeNs left = std::max<TimeNs>(0, until - now);
  const auto milliseconds = static_cast<int>((left + ns_per_ms - 1) / ns_per_ms);
  (void)::poll(fds.data(), fds.size(), may_sleep ? milliseconds : 0);
}

// Returns the number of sockets with events.
int Relay::serve_sockets() {
  std::array<epoll_event, 64> events;
  const int count = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), 0);
  for (int i = 0; i < count; ++i) {
    const epoll_event& event = events[static_cast<std::size_t>(i)];
    const int fd = event.data.fd;
    if (fd == wake_.get()) {
      take_joining();
    } else if (fd == sync_.get()) {
      accept_sync();
    } else if (const auto mirror = mirrors_.find(fd); mirror != mirrors_.end()) {
      accept_from(mirror->second);
    } else if (carried_.contains(fd)) {
      on_socket(fd, event.events);
    }
  }
  return std::max(count, 0);
}

}  // namespace r2ccl
