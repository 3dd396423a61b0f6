// Engine: faults, the background thread and shutdown.
#include "engine/engine.hpp"

#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string_view>

#include "base/clock.hpp"
#include "engine/engine_channel.hpp"
#include "engine/posted_channel.hpp"

namespace r2ccl {
namespace {

// Lowest rate of an injected `slow` fault.  A rail sends up to 256 KiB at a time.  At a lower rate
// the next frame would come too late for the dead deadline.
constexpr double slowest_bytes_per_s = 1e6;

std::uint64_t fingerprint_of(const Config& config) {
  const std::array<std::uint64_t, 10> settings{
      static_cast<std::uint64_t>(config.slot_bytes),
      static_cast<std::uint64_t>(config.slots),
      static_cast<std::uint64_t>(config.chunk_bytes),
      static_cast<std::uint64_t>(config.spare_slots),
      static_cast<std::uint64_t>(config.algorithm),
      config.resilience ? 1U : 0U,
      config.checksum ? 1U : 0U,
      config.fallback ? 1U : 0U,
      static_cast<std::uint64_t>(std::max(config.consensus, Consensus::off)),
      static_cast<std::uint64_t>(config.consensus_result),
  };
  return config_fingerprint(settings);
}

std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "";
}

FileDescriptor make_eventfd() {
  return FileDescriptor::made_by([] { return ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC); });
}

}  // namespace

Engine::Engine(const Config& config, std::uint32_t process, Journal journal,
               std::unique_ptr<LinkMonitor> monitor, std::shared_ptr<VerbsDriver> verbs)
    : config_(config),
      process_(process),
      fingerprint_(fingerprint_of(config)),
      host_(host_name()),
      tick_interval_(std::max<std::int64_t>(1, config.background_interval_ms) * ns_per_ms / 2),
      journal_(std::move(journal)),
      monitor_(std::move(monitor)),
      wake_(make_eventfd()),
      arrivals_(make_eventfd()),
      verbs_devices_(std::move(verbs), log_) {
  Connections::Callbacks callbacks;
  callbacks.find_key = [this](std::uint32_t connector) -> std::optional<HandshakeKey> {
    const Peer* peer = find(connector);
    if (peer == nullptr) return std::nullopt;
    return peer->key;
  };
  callbacks.decide = [this](const Hello& hello, bool fresh) { return decide(hello, fresh); };
  callbacks.established = [this](EstablishedRail rail) { on_established(std::move(rail)); };
  callbacks.failed = [this](const FailedConnection& failed) {
    Peer* peer = find(failed.peer);
    if (peer == nullptr) return;
    if (!failed.final.empty()) peer->refusal = failed.final;
    if (failed.rail < peer->rails.size()) {
      RailEnd& end = peer->rails[failed.rail];
      end.connect_error = failed.why;
      end.connect_fault = failed.fault;
      if (!failed.refused) end.narrow = 0;  // a refusal passed the path, as a handshake does
      end.unanswered = failed.fault == ConnectFault::no_answer;
      const bool counts = peer->is_running(failed.rail);
      end.misses = failed.fault == ConnectFault::rejected ? 0 : end.misses + (counts ? 1U : 0U);
      if (peer->connects) pair_by_trial(*peer, failed.rail);
    }
    peer->connect_failed(failed.rail, failed.answered, failed.refused, now_ns());
  };
  callbacks.patience = [this](std::uint32_t peer, RailId rail) { return patience(peer, rail); };
  callbacks.late = [this](std::uint32_t peer, RailId rail) { note_late(peer, rail); };
  connections_ =
      std::make_unique<Connections>(AcceptorHandshake::Self{process, job_number, fingerprint_},
                                    config.handshake_timeout_ms * ns_per_ms,
                                    config.socket_buffer_bytes, std::move(callbacks), log_);
  connections_->listeners = Listeners(PortWindow::parse(config.ports).value_or(PortWindow()));
  VerbsConnections::Callbacks verbs_callbacks;
  verbs_callbacks.connected = [this](EstablishedRail rail, std::unique_ptr<VerbsSession> session) {
    on_verbs_connected(std::move(rail), std::move(session));
  };
  verbs_callbacks.failed = [this](const EstablishedRail& rail, const std::string& why, bool late) {
    Peer* peer = find(rail.peer);
    if (peer == nullptr) return;
    log_.add(LogLevel::warning, peer->rails[rail.rail].name + " to " + peer->label + ": " + why);
    peer->rails[rail.rail].connect_error = why;
    peer->rails[rail.rail].connect_fault = late ? ConnectFault::no_answer : ConnectFault::rejected;
    if (late) note_late(rail.peer, rail.rail);
    peer->connect_failed(rail.rail, rail.epoch, {}, now_ns());
  };
  verbs_connections_ =
      std::make_unique<VerbsConnections>(config_, verbs_devices_, std::move(verbs_callbacks));
}

Engine::~Engine() {
  close(0.0);
  if (!foreign()) return;
  // In a forked child, threads, queue pairs and devices belong to the parent.
  if (background_.joinable()) background_.detach();
  for (auto& [process, peer] : peers_)
    for (LinkOfRails::End& end : peer->ends)
      for (auto* rail : {&end.rail, &end.fencing})
        if (*rail &&
            peer->link.kind(static_cast<RailId>(&end - peer->ends.data())) == RailKind::verbs)
          (void)rail->release();
  (void)verbs_connections_.release();
  verbs_devices_.abandon();
}

Result<std::uint16_t> Engine::listen(const ListenSpec& spec) {
  R2CCL_TRY(check_origin());
  auto address = spec.kind == RailKind::shm ? SocketAddress::abstract_unix(spec.address)
                                            : SocketAddress::ip(spec.address, 0);
  if (!address.ok()) return address.take_status();
  const Lock guard(*this);
  if (closed_) return Status(ErrorCode::aborted, "the engine is closed");
  if (!spec.device.empty()) monitor_->watch(spec.device);
  return connections_->listeners.listen(address.value(), spec.device);
}

void Engine::close(double linger_s) {
  if (foreign()) return;
  {
    const Lock guard(*this);
    if (closed_) return;
    closed_ = true;
    const TimeNs deadline = now_ns() + static_cast<TimeNs>(linger_s * 1e9);
    const auto delivered = [this] {
      return std::all_of(peers_.begin(), peers_.end(), [](const auto& entry) {
        const Peer& peer = *entry.second;
        return peer.link.has_no_rail() || peer.link.peer_closed() || peer.link.all_delivered();
      });
    };
    while (now_ns() < deadline && !delivered()) {
      unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      lock();
      progress_all(now_ns());
    }
    for (const Released& left : std::exchange(released_, {})) left.channel->close(0);
    closing_ = true;
    const TimeNs now = now_ns();
    for (auto& [process, peer] : peers_) {
      peer->closing = true;
      peer->link.send_close();
      peer->send(now);
    }
    // The last frames tell the peers why this rank ends, and nothing can bring them later.
    const auto told = [](const auto& entry) { return entry.second->has_all_frames(); };
    while (now_ns() < deadline && !std::ranges::all_of(peers_, told)) {
      unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      lock();
      tick(now_ns());
    }
  }
  stop_.store(true);
  const std::uint64_t one = 1;
  (void)!::write(wake_.get(), &one, sizeof(one));
  if (background_.joinable()) background_.join();
  const Lock guard(*this);
  fence_verbs();
  for (auto& [process, peer] : peers_)
    for (LinkOfRails::End& end : peer->ends) end.rail.reset();
  connections_.reset();
  verbs_connections_.reset();
  for (auto& [process, peer] : peers_) peer->publish();
  journal_.closed();
  log_.close();
}

void Engine::set_label(const std::string& label) {
  const Lock guard(*this);
  journal_.set_label(label);
}

void Engine::set_serving_engine(const std::string& name) {
  const Lock guard(*this);
  journal_.set_serving_engine(name);
}

Status Engine::check_fault(Fault fault, double bytes_per_s) const {
  R2CCL_TRY(check_origin());
  if (fault == Fault::corrupt && !config_.checksum)
    return {ErrorCode::invalid_argument,
            "fault: corrupt needs checksums (R2CCL_CHECKSUM=on), else no rank detects it"};
  if (fault == Fault::egress_refused)
    return {ErrorCode::invalid_argument,
            "fault: only the operating system makes egress_refused; must be another fault"};
  if (fault == Fault::slow && !(bytes_per_s >= slowest_bytes_per_s))
    return {ErrorCode::invalid_argument,
            "bytes_per_s: must be at least 1 MB/s (8 Mbit/s); a slower rail counts as silent"};
  return {};
}

Status Engine::inject(RailId rail, Fault fault, std::uint32_t process, double bytes_per_s) {
  R2CCL_TRY(check_fault(fault, bytes_per_s));
  const Lock guard(*this);
  const TimeNs now = now_ns();
  return with_rails(rail, process,
                    [&](Peer& peer) { apply_fault(peer, rail, fault, bytes_per_s, now); });
}

Status Engine::note_injected(RailId rail, Fault fault, std::uint32_t process) {
  R2CCL_TRY(check_origin());
  const Lock guard(*this);
  return with_rails(rail, process, [&](Peer& peer) { peer.note_injected(rail, fault); });
}

Status Engine::announce_drill(RailId rail, Fault fault, double seconds, std::uint32_t process) {
  R2CCL_TRY(check_origin());
  if (fault == Fault::none || !(seconds >= 0))
    return {ErrorCode::invalid_argument, "drill: must have a fault and a time of at least 0 s"};
  const double longest_s = static_cast<double>(longest_drill_ns) * 1e-9;
  const auto duration = static_cast<TimeNs>(std::min(seconds, longest_s) * 1e9);
  const Lock guard(*this);
  return with_rails(rail, process, [&](Peer& peer) { peer.announce_drill(rail, fault, duration); });
}

Status Engine::end_drill(RailId rail, std::uint32_t process) {
  R2CCL_TRY(check_origin());
  const Lock guard(*this);
  return with_rails(rail, process, [&](Peer& peer) { peer.end_drill(rail); });
}

Status Engine::check_drill(RailId rail, std::uint32_t process, bool& known) {
  R2CCL_TRY(check_origin());
  const Lock guard(*this);
  known = true;
  return with_rails(rail, process,
                    [&](Peer& peer) { known = known && peer.link.drill_known(rail); });
}

template <typename Act>
Status Engine::with_rails(RailId rail, std::uint32_t process, Act act) {
  bool found = false;
  for (auto& [id, peer] : peers_) {
    if ((process != 0 && id != process) || rail >= peer->rails.size()) continue;
    act(*peer);
    found = true;
  }
  if (found) return {};
  return {ErrorCode::invalid_argument,
          "rail " + std::to_string(rail) + ": no peer has a rail of this index"};
}

std::vector<Engine::RailInfo> Engine::rails() {
  const Lock guard(*this);
  const TimeNs now = now_ns();
  std::vector<RailInfo> infos;
  for (auto& [id, peer] : peers_) {
    for (RailId rail = 0; rail < peer->rails.size(); ++rail) {
      const RailEnd& end = peer->rails[rail];
      if (end.dormant) continue;
      const bool shm = end.kind == RailKind::shm;
      const ConnectFault never_up = peer->never_up(rail);
      infos.push_back(
          {.name = end.name,
           .peer = peer->label,
           .device = end.port(),
           .local = shm ? "" : end.route.local.text(),
           .remote = shm ? "" : end.route.remote.text(),
           .peer_host = end.peer_names.host,
           .peer_device = end.peer_names.port,
           .index = rail,
           .peer_engine = id,
           .kind = end.kind,
           .state = peer->link.state(rail),
           .cause = peer->link.cause(rail),
           .verdict = peer->verdict(rail),
           .slow = peer->link.slow(rail),
           .been_up = peer->link.been_up(rail),
           .never_up = never_up == ConnectFault::none ? "" : std::string(name_of(never_up)),
           .reserve = peer->link.reserve(rail),
           .unit = end.unit,
           .drill = peer->link.drill(rail, now),
           .epoch = peer->link.epoch(rail),
           .round_trip = peer->link.round_trip(rail),
           .rate = peer->link.rate(rail),
           .counters = peer->link.counters(rail)});
    }
  }
  return infos;
}

std::string Engine::journal_bytes() {
  const Lock guard(*this);
  for (auto& [id, peer] : peers_) peer->publish();
  return journal_.copy();
}

// An exception (out of memory, for example) ends every communicator with an error.  The thread goes
// on, because other communicators may be made later.  The end itself needs memory, too: the thread
// tries again until the end succeeds, with a pause after each exception in a row.
void Engine::run_background() {
  std::array<char, 160> what{};
  bool failing = false;     // the communicators must still be ended
  unsigned exceptions = 0;  // in a row
  while (!stop_.load()) {
    try {
      if (failing) {
        const Lock guard(*this);
        fail_all(std::string("exception in the engine: ") + what.data());
      }
      failing = false;
      run_background_round();
      exceptions = 0;
    } catch (const std::exception& error) {
      if (!failing) what[std::string_view(error.what()).copy(what.data(), what.size() - 1)] = '\0';
      failing = true;
      if (++exceptions > 1) pause_background();
    }
  }
}

// Allocates nothing.
void Engine::pause_background() {
  pollfd wake{wake_.get(), POLLIN, 0};
  if (::poll(&wake, 1, static_cast<int>(config_.background_interval_ms)) <= 0) return;
  std::uint64_t count = 0;
  (void)!::read(wake_.get(), &count, sizeof(count));
}

void Engine::fail_all(const std::string& text) {
  for (auto& [id, channel] : channels_) channel->fail(ErrorCode::internal, text);
  for (auto& [key, channel] : posted_channels_) channel->fail(ErrorCode::internal, text);
}

void Engine::run_background_round() {
  std::vector<pollfd> fds;
  int sleep_ms = static_cast<int>(config_.background_interval_ms);
  std::vector<int> listening;
  std::vector<FileDescriptor> ended;  // closed without the lock
  {
    fds.clear();
    {
      const Lock guard(*this);
      fds.push_back({wake_.get(), POLLIN, 0});
      fds.push_back({monitor_->fd(), POLLIN, 0});
      const TimeNs now = now_ns();
      connections_->add_poll_fds(fds, now);
      sleep_ms = connections_->sleep_ms(sleep_ms, now);
      connections_->listeners.each_socket([&](int socket) { listening.push_back(socket); });
      verbs_connections_->add_poll_fds(fds);
      verbs_devices_.add_poll_fds(fds);
    }
    const TimeNs asleep = now_ns();
    const int ready = ::poll(fds.data(), fds.size(), sleep_ms);
    const TimeNs awake = now_ns();
    if (ready < 0 && errno != EINTR) log_.add(LogLevel::error, "background poll failed");
    if (stop_.load()) return;
    if ((fds[0].revents & POLLIN) != 0) {
      std::uint64_t count = 0;
      (void)!::read(wake_.get(), &count, sizeof(count));
    }
    // Without the lock, which calling threads need.  Only this thread closes listeners.
    std::vector<Arrival> arrivals = connections_->acceptor.accept(listening, awake);
    const Lock guard(*this);
    const TimeNs now = now_ns();
    note_short_of_cpu(awake - asleep - sleep_ms * ns_per_ms, awake);
    if ((fds[1].revents & POLLIN) != 0 || now - last_monitor_poll_ > 1000 * ns_per_ms) {
      last_monitor_poll_ = now;
      monitor_->poll([this](const LinkEvent& event) { on_link_event(event); });
      for (const std::string& device : connections_->listeners.broken())
        device_changed(device, now);
    }
    ended = connections_->progress(now, std::move(arrivals));
    verbs_connections_->progress(now);
    verbs_devices_.progress(
        now,
        [this, now](const std::string& device, const VerbsEvent& event) {
          on_verbs_event(device, event, now);
        },
        [this, now](const std::string& device, std::uint8_t port, Result<VerbsPort> is) {
          on_verbs_port(device, port, std::move(is), now);
        });
    read_fault_file(now);
    start_due_connects(now);
    localiser_.progress(now);
    tell_never_up(now);
    // Skip if a polling caller has ticked recently.
    if (now - last_tick_ >= tick_interval_) progress_all(now_ns());
  }
}

}  // namespace r2ccl
