// Engine: progress of all links.  Everything here runs with the engine's lock held.
#include <fcntl.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <exception>
#include <fstream>
#include <list>
#include <sstream>

#include "base/clock.hpp"
#include "engine/engine.hpp"
#include "engine/engine_channel.hpp"
#include "engine/posted_channel.hpp"
#include "rails/framed_rail.hpp"
#include "rails/shm/shm_pipe.hpp"
#include "rails/tcp/tcp_pipe.hpp"

namespace r2ccl {
namespace {

constexpr const char* waits = "waits for other connection attempts";
constexpr TimeNs never_up_interval_ns = 100 * ns_per_ms;
constexpr TimeNs path_refresh_ns = 100 * ns_per_ms;
constexpr TimeNs fault_file_interval_ns = 5 * ns_per_ms;
constexpr TimeNs released_limit_ns = 5000 * ns_per_ms;  // as the linger of a close in Python

}  // namespace

// ---- the lock ----

void Engine::lock() {
  if (mutex_.try_lock()) return;
  contenders_.fetch_add(1);
  mutex_.lock();
  contenders_.fetch_sub(1);
}

// A thread that spins on try_lock() would starve the threads in lock().
bool Engine::try_lock() { return contenders_.load() == 0 && mutex_.try_lock(); }

void Engine::unlock() { mutex_.unlock(); }

void Engine::yield() {
  unlock();
  std::this_thread::yield();  // runs processes that need this CPU, perhaps the awaited peer
  // A mutex is not fair: without the loop the spinning thread would retake the lock at once.
  for (int i = 0; i < 100 && contenders_.load() > 0; ++i) std::this_thread::yield();
  lock();
}

// ---- bytes ----

bool Engine::progress(Peer& peer, TimeNs now, bool all_rails) {
  const bool arrived = peer.receive(now, all_rails);
  if (!peer.link.received_aborts().empty()) take_aborts(peer);
  if (peer.posted && !peer.link.posted().orphans().empty()) end_orphans(peer);
  if (!peer.link.received_addresses().empty()) take_addresses(peer, now);
  peer.send(now);
  // A failed write reads the rest of its rail: the reason of a peer's end comes before the end.
  if (!peer.link.received_aborts().empty()) take_aborts(peer);
  if (arrived && (blocked_ > 0 || has_stream_owner_)) notify_blocked();
  return arrived;
}

void Engine::progress_all(TimeNs now) {
  for (auto& [process, peer] : peers_) progress(*peer, now, /*all_rails=*/true);
  tick_if_due(now);
}

void Engine::tick(TimeNs now) {
  last_tick_ = now;
  for (auto& [process, peer] : peers_) {
    // Arrivals first: judge silence only after reading everything that has arrived.
    progress(*peer, now, /*all_rails=*/true);
    const bool refresh = now - peer->path_refreshed >= path_refresh_ns;
    if (refresh) peer->path_refreshed = now;
    peer->tick(now, refresh);
    watch_process(*peer, now);
    tell_loss(*peer, now);
    peer->tell_located(now);
    peer->publish();
  }
  journal_.beat(now);
  for (auto& [id, channel] : channels_) channel->check_slots();
  if (!released_.empty()) close_delivered(now);
}

// A program that is in no call learns of a lost peer from the log alone.
void Engine::tell_loss(Peer& peer, TimeNs now) {
  if (!peer.link.has_no_rail()) {
    peer.loss_told = false;
    return;
  }
  if (peer.loss_told || peer.in_graceful_close() || peer.link.peer_gone()) return;
  const auto link_timeout_ns = static_cast<TimeNs>(config_.link_timeout_s * 1e9);
  if (now - peer.link.no_rail_since() < link_timeout_ns) return;
  peer.loss_told = true;
  log_.add(LogLevel::warning, peer.label + " is lost: no rail for link_timeout_s = " +
                                  std::to_string(config_.link_timeout_s) +
                                  " s; calls with it fail until a rail is back");
}

// The background thread wanted to wake up `late` ns ago.
void Engine::note_short_of_cpu(TimeNs late, TimeNs now) {
  if (late < round_limit_ns) return;
  journal_.add_short_of_cpu(late);
  const auto joined = short_of_cpu_.note(late, now);
  if (!joined.has_value()) return;
  journal_.record({.time_ns = now,
                   .kind = JournalKind::short_of_cpu,
                   .rail = no_rail_entry,
                   .value = static_cast<std::uint64_t>(joined->paused)});
  log_.add(LogLevel::info, "the engine did not run for " +
                               std::to_string(joined->paused / ns_per_ms) + " ms of " +
                               std::to_string(joined->within / ns_per_ms) +
                               " ms: this host is short of CPU, or the process was stopped");
}

Status Engine::check_members() {
  R2CCL_TRY(check_origin());
  const Lock guard(*this);
  for (const auto& [id, channel] : channels_)
    if (!channel->released()) R2CCL_TRY(channel->check_members());
  return {};
}

// ---- connections ----

Hello Engine::hello_for(const Peer& peer, RailId rail) const {
  Hello hello;
  hello.connector = process_;
  hello.acceptor = peer.process;
  hello.job = job_number;
  hello.rail = rail;
  hello.kind = peer.rails[rail].kind;
  hello.last_fenced = peer.link.fenced_epoch(rail);
  hello.config = fingerprint_;
  hello.names = {host_, peer.rails[rail].port()};
  return hello;
}

TimeNs Engine::patience(std::uint32_t process, RailId rail) {
  const TimeNs first = config_.handshake_timeout_ms * ns_per_ms;
  const Peer* peer = find(process);
  return peer == nullptr ? first : peer->link.patience(rail, first);
}

void Engine::note_late(std::uint32_t process, RailId rail) {
  if (Peer* peer = find(process); peer != nullptr) peer->link.handshake_late(rail);
}

// Returns the reason why a rail cannot connect yet: an end without an address.  Empty: both ends
// have an address.
std::string Engine::absent_end(const RailEnd& end) const {
  if (end.given.family == AF_UNSPEC) return "";
  if (local_address(end).is_unspecified()) return end.route.device + " has no address so far";
  const auto remote = IpAddress::from_sockaddr(end.route.remote.get());
  return remote && remote->is_unspecified() ? "the peer's port has no address so far" : "";
}

void Engine::tell_never_up(TimeNs now) {
  if (now - last_never_up_ < never_up_interval_ns) return;
  last_never_up_ = now;
  const auto timeout = static_cast<TimeNs>(config_.connect_timeout_s * 1e9);
  for (auto& [process, peer] : peers_) peer->tell_never_up(timeout, now);
}

void Engine::start_due_connects(TimeNs now) {
  if (closing_) return;
  // Every process begins with its nearest peer, so that not all begin with the same.
  for (auto next = peers_.rbegin(); next != peers_.rend(); ++next) {
    const std::unique_ptr<Peer>& peer = next->second;
    if (peer->link.peer_closed() || peer->link.peer_gone()) continue;
    for (RailId rail = 0; rail < peer->rails.size(); ++rail) {
      RailEnd& end = peer->rails[rail];
      TimeNs& connect_at = peer->ends[rail].connect_at;
      if (connect_at == 0 || connect_at > now || end.blocked()) continue;
      // An inquiry over a silent rail does not wait.
      if (!peer->link.connected(rail) && !connections_->may_connect(now)) {
        if (end.connect_error.empty()) end.connect_error = waits;
        continue;
      }
      if (end.connect_error == waits) end.connect_error.clear();
      connect_at = 0;
      if (const std::string absent = absent_end(end); !absent.empty()) {
        end.connect_error = absent;
        peer->connect_failed(rail, 0, {}, now);
        continue;
      }
      if (end.kind == RailKind::verbs) withdraw_exchange(*peer, rail);
      // A rail still connected needs an inquiry: keep the local address of the open connection.
      if (end.given.family != AF_UNSPEC && !peer->link.connected(rail))
        end.route.local = SocketAddress::ip(local_address(end), 0);
      end.route.segment = peer->segment(rail);
      end.route.flows = peer->flows(rail);
      connections_->connect(end.route, hello_for(*peer, rail), peer->key, now);
    }
  }
}

Decision Engine::decide(const Hello& hello, bool fresh) {
  Decision decision;
  Peer* peer = find(hello.connector);
  if (peer == nullptr || closing_ || peer->link.peer_closed()) {
    decision.why = "the link is unknown or closed";
  } else if (hello.rail >= peer->rails.size() || peer->rails[hello.rail].kind != hello.kind) {
    decision.why = "the link has no such rail";
  } else if (peer->rails[hello.rail].blocked()) {
    decision.why = "a fault is injected into the rail";
  } else {
    const auto epoch = peer->offer(hello.rail, hello.last_fenced, fresh, now_ns());
    decision.accept = epoch.has_value();
    decision.epoch = epoch.value_or(0);
    decision.last_fenced = peer->link.fenced_epoch(hello.rail);
    decision.names = {host_, peer->rails[hello.rail].port()};
    decision.why = "an older epoch is not fenced yet";
  }
  return decision;
}

void Engine::on_established(EstablishedRail rail) {
  Peer* peer = find(rail.peer);
  if (peer == nullptr || rail.rail >= peer->rails.size()) return;
  RailEnd& end = peer->rails[rail.rail];
  end.connect_error.clear();
  end.unanswered = false;
  end.peer_names = rail.peer_names;
  const TimeNs now = now_ns();
  const int socket = rail.socket.get();

  std::unique_ptr<BytePipe> pipe;
  bool opened = !end.blocked() && !came_too_late(end, socket);
  if (opened && end.kind == RailKind::shm) {
    const bool connector = rail.peer < process_;
    auto shm = ShmPipe::open(std::move(rail.socket), std::move(rail.memory), connector);
    opened = shm.ok();
    if (opened) pipe = std::move(shm.value());
  } else if (opened && end.kind == RailKind::verbs) {
    const bool connector = rail.peer < process_;
    const TimeNs deadline = now + patience(rail.peer, rail.rail);
    verbs_connections_->begin(std::move(rail), connector, end.verbs, local_address(end), now,
                              deadline);
    return;
  } else if (opened) {
    pipe = std::make_unique<TcpPipe>(std::move(rail.socket));
  }
  if (!opened) {
    peer->connect_failed(rail.rail, rail.epoch, {}, now);
  } else if (peer->begin_epoch(rail.rail, rail.epoch, now)) {
    note_addresses(*peer, rail.rail, socket);
    peer->link.set_injected(rail.rail, takes_down(end.fault));
    peer->carry(rail.rail,
                std::make_unique<FramedRail>(peer->link, rail.rail, std::move(pipe), rail.leftover),
                now);
  }
}

// ---- events from outside ----

void Engine::on_link_event(const LinkEvent& event) {
  const TimeNs now = now_ns();
  device_changed(event.name, now);
  for (auto& [process, peer] : peers_) {
    for (RailId rail = 0; rail < peer->rails.size(); ++rail) {
      const RailEnd& end = peer->rails[rail];
      const std::string& device = end.route.device;
      const bool concerned =
          device.empty() ? end.ifindex != 0 && end.ifindex == event.ifindex : device == event.name;
      if (!concerned) continue;
      const auto local = IpAddress::from_sockaddr(end.route.local.get());
      const bool ours = local.has_value() && *local == event.address;
      const bool wanted = ours || local_address(end) == event.address;
      RailCause lost = RailCause::none;
      if (event.kind == LinkEventKind::removed)
        lost = RailCause::device_loss;
      else if (event.kind == LinkEventKind::state && !event.carrier_up)
        lost = RailCause::carrier_loss;
      else if ((event.kind == LinkEventKind::address_removed && ours) ||
               (event.kind == LinkEventKind::address_added && local.has_value() &&
                address_is_gone(end, *local)))
        lost = RailCause::address_loss;
      const bool back =
          event.carrier_up && (event.kind == LinkEventKind::state ||
                               (event.kind == LinkEventKind::address_added && wanted));
      if (lost != RailCause::none) peer->link.rail_failed(rail, peer->link.epoch(rail), lost, now);
      if (back) port_is_ready(*peer, rail, now);
    }
    peer->act(now);
    peer->send(now);
  }
}

void Engine::apply_fault(Peer& peer, RailId rail, Fault fault, double bytes_per_s, TimeNs now) {
  if (fault != Fault::reset) peer.rails[rail].fault = fault;  // a fault that lasts goes on
  peer.note_injected(rail, fault);
  peer.send(now);  // the announcement leaves before the fault
  Rail* transport = peer.ends[rail].rail.get();
  switch (fault) {
    case Fault::carrier_loss:
      peer.link.rail_failed(rail, peer.link.epoch(rail), RailCause::injected, now);
      break;
    case Fault::black_hole:
      if (transport) transport->mute();
      break;
    case Fault::reset:
      if (transport) transport->sever();
      break;
    case Fault::slow: peer.limit(rail, bytes_per_s); break;
    case Fault::corrupt: peer.link.corrupt(rail, true); break;
    case Fault::egress_refused: break;  // inject() refuses this fault
    case Fault::none:
      peer.limit(rail, 0);
      peer.link.corrupt(rail, false);
      if (transport) transport->heal();
      peer.link.connect_soon(rail, now);
      break;
  }
  peer.act(now);
  peer.send(now);
}

void Engine::read_fault_file(TimeNs now) {
  if (config_.fault_file.empty() || now - last_fault_read_ < fault_file_interval_ns) return;
  last_fault_read_ = now;
  std::ifstream file(config_.fault_file);
  if (!file) return;
  file.seekg(static_cast<std::streamoff>(fault_file_offset_));
  std::string line;
  while (std::getline(file, line)) {
    if (file.eof()) break;  // the last line is incomplete
    fault_file_offset_ += line.size() + 1;
    std::istringstream words(line);
    unsigned rail = 0;
    std::string what;
    const auto fault = words >> rail >> what ? fault_named(what) : std::nullopt;
    if (!fault.has_value() || fault == Fault::slow || fault == Fault::corrupt ||
        fault == Fault::egress_refused) {
      log_.add(LogLevel::error,
               "R2CCL_FAULT_FILE: not '<rail> carrier_loss|black_hole|reset|heal': " + line);
      continue;
    }
    if (what != name_of(*fault))
      log_.add(LogLevel::warning, "R2CCL_FAULT_FILE: '" + what + "' is a deprecated name, use '" +
                                      std::string(name_of(*fault)) + "'");
    for (auto& [process, peer] : peers_)
      if (rail < peer->rails.size()) apply_fault(*peer, static_cast<RailId>(rail), *fault, 0, now);
  }
}

void Engine::take_aborts(Peer& peer) {
  std::vector<AbortNotice> notices = std::exchange(peer.link.received_aborts(), {});
  for (AbortNotice& notice : notices) {
    // Both ends of a connection are open before the first message, so no notice is early.
    if (peer.posted) {
      const auto posted = posted_channels_.find({peer.process, notice.communicator});
      if (posted != posted_channels_.end()) posted->second->on_abort(notice);
      continue;
    }
    const auto found = channels_.find(notice.communicator);
    if (found != channels_.end()) {
      found->second->on_abort(notice);
    } else if (!peer.link.has_closed(notice.communicator) &&
               early_aborts_.size() < most_early_aborts) {
      early_aborts_.insert_or_assign(notice.communicator, std::move(notice));
    }
  }
}

// The peer waits at the other end of connections that are closed here.
void Engine::end_orphans(Peer& peer) {
  for (const ConnectionId id : std::exchange(peer.link.posted().orphans(), {})) {
    if (posted_channels_.contains({peer.process, id})) continue;  // about to close
    if (peer.orphans_told.size() >= most_orphans_told) return;
    if (!peer.orphans_told.insert(id).second) continue;
    peer.link.send_abort({id, ErrorCode::peer_closed, "the other end of the connection is closed"});
  }
}

// ---- waiting ----

void Engine::block(const std::vector<Peer*>& peers) {
  std::vector<pollfd> fds{{arrivals_.get(), POLLIN, 0}};
  for (Peer* peer : peers) {
    for (const LinkOfRails::End& end : peer->ends) {
      // A muted rail does not read arrivals, which would wake this thread again and again.
      if (!end.rail || end.rail->muted()) continue;
      const auto events = end.rail->arm();
      if (!events.has_value()) {
        yield();  // gives the lock to threads that could end the wait (heal a fault, abort)
        return;
      }
      fds.push_back(*events);
    }
  }
  ++blocked_;
  unlock();
  (void)::poll(fds.data(), fds.size(), static_cast<int>(config_.background_interval_ms));
  lock();
  --blocked_;
  if ((fds[0].revents & POLLIN) != 0) {
    std::uint64_t count = 0;
    (void)!::read(arrivals_.get(), &count, sizeof(count));
  }
}

void Engine::notify_blocked() {
  const std::uint64_t one = 1;
  (void)!::write(arrivals_.get(), &one, sizeof(one));
}

void Engine::add_channel(EngineChannel& channel) {
  channels_[channel.id()] = &channel;
  const auto early = early_aborts_.find(channel.id());
  if (early == early_aborts_.end()) return;
  channel.on_abort(early->second);
  early_aborts_.erase(early);
}

void Engine::remove_channel(const EngineChannel& channel) {
  const auto found = channels_.find(channel.id());
  if (found != channels_.end() && found->second == &channel) channels_.erase(found);
}

Status Engine::check_new_channel(std::uint64_t id, const std::string& name) const {
  const auto used = [id](const auto& peer) { return peer.second->link.has_closed(id); };
  if (id == streams_communicator)
    return {ErrorCode::invalid_argument,
            "communicator '" + name + "': id " + std::to_string(id) + " is reserved"};
  if (channels_.contains(id) || std::ranges::any_of(peers_, used))
    return {ErrorCode::invalid_argument,
            "name: '" + name +
                "' was used by an earlier communicator of these ranks; choose a new name"};
  if (channels_.size() >= most_communicators)
    return {ErrorCode::invalid_argument, "communicator '" + name + "': this process has " +
                                             std::to_string(channels_.size()) +
                                             " open communicators, the limit; close some"};
  return {};
}

void Engine::deliver_later(std::unique_ptr<EngineChannel> channel) {
  channel->set_released();
  if (closed_ || channel->settled()) return channel->close(0);
  released_.push_back({std::move(channel), now_ns() + released_limit_ns});
}

void Engine::close_delivered(TimeNs now) {
  for (auto entry = released_.begin(); entry != released_.end();) {
    if (!entry->channel->settled() && now < entry->until) {
      ++entry;
      continue;
    }
    // A close may tick again, so an entry leaves the list first.  If memory runs out in the close,
    // the entry returns: the engine still refers to its channel.
    std::list<Released> done;
    done.splice(done.begin(), released_, entry);
    try {
      done.front().channel->close(0);
    } catch (const std::exception&) {
      released_.splice(released_.end(), done);
      throw;
    }
    entry = released_.begin();  // that tick may have taken the next entry
  }
}

}  // namespace r2ccl
