#include "engine/engine_channel.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <exception>
#include <numeric>
#include <string>
#include <thread>
#include <utility>

#include "base/interrupt.hpp"

namespace r2ccl {
namespace {

// Every `rounds_per_check` polls or `check_interval_ns`, a wait also polls the other rails and
// peers and checks deadlines.  A count of polls alone is no time limit: a poll takes long while
// other threads use the CPU.
constexpr unsigned rounds_per_check = 16;
constexpr TimeNs check_interval_ns = 100'000;
// A yield of at least this duration has run another thread.
constexpr TimeNs switched_ns = 3000;
// Interval between two looks at the states of all rails.  A stall ends the interval.
constexpr TimeNs loss_interval_ns = 10 * ns_per_ms;

// Time in which a polling thread did not run, as its own rounds show.
class Pauses {
 public:
  explicit Pauses(TimeNs now) : last_(now) {}
  // A round begins.  `slept`: the longest sleep that the round before asked for.
  void look(TimeNs now, TimeNs slept) {
    if (now - last_ >= slept + round_limit_ns) total_ += now - last_ - slept;
    last_ = now;
  }
  // Returns the rest of a period that began with this object or at the last forget().
  [[nodiscard]] TimeNs without(TimeNs period) const { return std::max<TimeNs>(period - total_, 0); }
  void forget() { total_ = 0; }

 private:
  TimeNs last_;
  TimeNs total_ = 0;
};

// Writes a line to standard error.  Allocates nothing.
void warn(const char* text, const std::exception& error) {
  std::array<char, 320> line{};
  const int length = std::snprintf(line.data(), line.size(), "r2ccl: %s%s\n", text, error.what());
  const auto bytes = std::min(static_cast<std::size_t>(std::max(length, 0)), line.size() - 1);
  (void)!::write(STDERR_FILENO, line.data(), bytes);
}

}  // namespace

EngineChannel::EngineChannel(Engine& engine, std::uint64_t id, std::string name, int rank)
    : LinkChannel(id, std::move(name), rank, static_cast<std::size_t>(engine.config().slot_bytes),
                  static_cast<TimeNs>(engine.config().link_timeout_s * 1e9)),
      engine_(&engine) {
  set_consensus(engine.config().consensus);
}

void EngineChannel::add_peer(Peer* peer) {
  peers_.push_back(peer);
  if (peer != nullptr) others_.push_back(peer);
  add_member(peer == nullptr ? nullptr : &peer->link);
}

void EngineChannel::open() {
  group_ = engine_->journal_.add_group(name(), id(), rank(), size());
  if (group_ == nullptr)
    engine_->log_.add(LogLevel::info, "communicator '" + name() +
                                          "' is not shown in journal and metrics: the journal's "
                                          "table of communicators is full");
  engine_->add_channel(*this);
}

void EngineChannel::close(TimeNs limit) {
  linger(limit, [this] { return settled(); });
  leave();
  note_closed(group_);
  engine_->remove_channel(*this);
}

Status EngineChannel::check_waiting(TimeNs since) const {
  if (failed()) return failure();
  for (int peer = 0; peer < size(); ++peer)
    if (peer_of(peer) != nullptr) R2CCL_TRY(check_liveness(peer, since));
  if (!has_waited_too_long(since, now_ns())) return {};
  return waited_too_long("an exchange inside the node");
}

// ---- calls ----

void EngineChannel::begin(Collective noted, std::size_t bytes, JournalGroup* group) {
  noted_ = noted;
  call_bytes_ = bytes;
  const Config& config = engine_->config();
  bulk_ =
      bytes > static_cast<std::size_t>(std::min(config.small_message_bytes, config.staging_bytes));
  stalled_ = 0;
  looked_ = call_began_ = asked_ = now_ns();
  note_call_begins(group, noted, looked_);
}

Status EngineChannel::enter(const CallTag& tag) {
  const StepLock lock(*this);
  return begin_call(tag);
}

void EngineChannel::prepare() {
  if (!bandwidths().can_shift()) return;
  const StepLock lock(*this);
  exchange_bandwidths();
}

Status EngineChannel::conclude(Status status) {
  if (stalled_ == 0 && status.ok() && scratch().empty()) {
    note_call_ended();
    return status;
  }
  const StepLock lock(*this);
  if (stalled_ > 0) {
    note_stall(group_, stalled_);
    engine_->journal_.record({.time_ns = now_ns(),
                              .kind = JournalKind::stall,
                              .from = static_cast<std::uint8_t>(noted_),
                              .rail = no_rail_entry,
                              .epoch_or_step = engine_->step_,
                              .call = tag().number,
                              .communicator = id(),
                              .value = static_cast<std::uint64_t>(stalled_),
                              .detail = call_bytes_});
    engine_->stalled_ns_ += static_cast<std::uint64_t>(stalled_);
    loss_measured_ = 0;  // the next call looks at the rails again
  }
  return end_call(std::move(status));
}

// Memory may be what has failed, and the end of a call needs memory, too.  Nothing may access the
// caller's buffers after the return, so the end is repeated until it succeeds.  A process that
// cannot end a call for link_timeout_s ends instead: its peers then learn of its death.
Status EngineChannel::conclude_after(const std::exception& error) {
  const auto limit = static_cast<TimeNs>(engine_->config().link_timeout_s * 1e9);
  TimeNs began = 0;  // of the attempts; 0: none has failed
  for (;;) {
    try {
      const StepLock lock(*this);
      (void)end_call({ErrorCode::internal, std::string("exception in a call: ") + error.what()});
      return failure();
    } catch (const std::exception& again) {
      const TimeNs now = now_ns();
      if (began == 0) {
        began = now;
        warn("an exception in a call, and one at the end of the call, which is tried again: ",
             again);
      } else if (now - began >= limit) {
        warn("no end of a call within link_timeout_s, so this process ends: ", again);
        std::terminate();
      }
      await_memory();
    }
  }
}

// Pauses without the engine's lock: other threads send what the rails hold, and free memory.
// Allocates nothing.
void EngineChannel::await_memory() {
  const bool held = holds_lock_;
  if (held) engine_->unlock();
  std::this_thread::sleep_for(std::chrono::milliseconds(engine_->config().background_interval_ms));
  if (held) engine_->lock();
}

Status EngineChannel::expect(int peer, std::size_t skip, std::span<std::byte> memory) {
  // Link::offer_target() ignores small memory as well; this check saves the lock.
  if (memory.size() <= static_cast<std::size_t>(engine_->config().small_message_bytes)) return {};
  return LinkChannel::expect(peer, skip, memory);
}

// ---- waiting: poll, yield, then sleep ----

Status EngineChannel::wait(int awaited, const std::function<std::uint64_t()>& come,
                           std::uint64_t goal) {
  // A result before a failure: the peer may have left right after its last data.
  std::uint64_t had = come();
  if (had >= goal) return {};
  if (failed()) return failure();
  Peer& peer = *peer_of(awaited);
  const TimeNs spin = engine_->config().spin_us * 1000;
  TimeNs now = now_ns();
  const TimeNs began = now;
  TimeNs last_arrival = began;  // last arrival of awaited data
  TimeNs last_byte = began;     // last arrival of any frame: more may follow soon
  std::uint64_t disturbances = disturbances_before(peer);
  TimeNs checked = began;
  // A rail event does not explain a pause of this thread.
  Pauses pauses(began);
  TimeNs slept = 0;
  for (unsigned round = 0;; ++round, now = now_ns()) {
    looked_ = now;
    pauses.look(now, slept);
    slept = 0;
    const bool check =
        round % rounds_per_check == rounds_per_check - 1 || now - checked >= check_interval_ns;
    if (check) checked = now;
    // The first polls of a small call look only at the rail where data is likely to arrive.
    const bool everywhere = check || (bulk_ && round > 0);
    if (engine_->progress(peer, now, everywhere)) last_byte = now;
    if (everywhere) {
      for (Peer* other : others_)
        if (other != &peer) engine_->progress(*other, now, /*all_rails=*/true);
      engine_->tick_if_due(now);
    }
    // Only awaited data counts as an arrival.  Probe answers and acks of earlier messages also
    // arrive.
    if (const std::uint64_t has = come(); has != had) {
      had = has;
      // The time since the last awaited arrival is a stall if a rail event happened meanwhile.
      if (disturbances != peer.link.disturbances()) stalled_ += pauses.without(now - last_arrival);
      pauses.forget();
      disturbances = disturbances_before(peer);
      last_arrival = now;
    }
    if (had >= goal) return {};
    if (failed()) return failure();
    if (check) {
      R2CCL_TRY(check_patience(now));
      R2CCL_TRY(compare_waits(awaited, began, now));
    }
    if (now - std::max(last_arrival, last_byte) < spin) {
      if (check) R2CCL_TRY(check_liveness(awaited, began));
      if (round % rounds_per_yield_ == rounds_per_yield_ - 1) give_way();
      continue;
    }
    R2CCL_TRY(check_liveness(awaited, began));
    engine_->block(bulk_ ? others_ : std::vector<Peer*>{&peer});
    slept = engine_->config().background_interval_ms * ns_per_ms;
  }
}

Status EngineChannel::check_patience(TimeNs now) {
  if (ask_to_end(now))
    return {ErrorCode::aborted, "rank " + std::to_string(rank()) +
                                    " was interrupted by a signal in " + describe(tag()) +
                                    " of communicator '" + name() + "'"};
  if (!has_waited_too_long(call_began_, now)) return {};
  return waited_too_long(describe(tag()));
}

bool EngineChannel::has_waited_too_long(TimeNs since, TimeNs now) const {
  const double limit_s = engine_->config().call_timeout_s;
  return limit_s > 0 && static_cast<double>(now - since) >= limit_s * 1e9;
}

Status EngineChannel::waited_too_long(const std::string& call) const {
  return {ErrorCode::aborted, "rank " + std::to_string(rank()) +
                                  " has waited for call_timeout_s = " +
                                  std::to_string(engine_->config().call_timeout_s) + " s in " +
                                  call + " of communicator '" + name() + "'"};
}

// The handlers of the program may take its own locks, so the engine's lock is free meanwhile.
bool EngineChannel::ask_to_end(TimeNs now) {
  if (released_ || now - asked_ < interrupt_interval_ns) return false;
  asked_ = now;
  engine_->unlock();
  const bool ends = interrupted();
  engine_->lock();
  return ends;
}

// Yields the CPU and the lock.  On a busy CPU every poll yields, since the awaited data may come
// from a process that needs this CPU.
void EngineChannel::give_way() {
  const TimeNs before = now_ns();
  engine_->yield();
  const bool crowded = now_ns() - before >= switched_ns;
  rounds_per_yield_ = crowded ? 1 : std::min(rounds_per_check, 2 * rounds_per_yield_);
}

// Returns the count of rail events that a wait beginning now must ignore.  The count is 0 if the
// link has no rail.  The wait then counts as stalled by the loss of the last rail, even if the loss
// happened between two calls or before the last arrival.
std::uint64_t EngineChannel::disturbances_before(const Peer& peer) {
  return peer.link.has_no_rail() ? 0 : peer.link.disturbances();
}

void EngineChannel::linger(TimeNs limit, const std::function<bool()>& done) {
  const auto sum = [this](const auto& of) {
    return std::accumulate(
        others_.begin(), others_.end(), std::uint64_t{0},
        [&of](std::uint64_t total, const Peer* peer) { return total + of(*peer); });
  };
  const std::uint64_t before = sum(disturbances_before);
  // A rail may have been lost before, in a part of the call that did not wait.
  const bool ending = std::any_of(others_.begin(), others_.end(),
                                  [](const Peer* peer) { return peer->link.is_losing_a_rail(); });
  const TimeNs began = now_ns();
  Pauses pauses(began);
  while (!done() && now_ns() < began + limit) {
    pauses.look(now_ns(), engine_->config().background_interval_ms * ns_per_ms);
    for (Peer* peer : others_) engine_->progress(*peer, now_ns(), /*all_rails=*/true);
    engine_->tick_if_due(now_ns());
    if (done()) break;
    if (ask_to_end(now_ns())) {
      fail(ErrorCode::aborted, "rank " + std::to_string(rank()) + " was interrupted by a signal");
      break;
    }
    engine_->block(others_);
  }
  looked_ = now_ns();
  pauses.look(looked_, engine_->config().background_interval_ms * ns_per_ms);
  // Waiting until a lost rail releases caller memory counts as a stall.
  const std::uint64_t after = sum([](const Peer& peer) { return peer.link.disturbances(); });
  const TimeNs waited = pauses.without(looked_ - began);
  const bool long_wait = ending && waited >= ns_per_ms;
  if (stalled_ > 0 || before != after || long_wait) stalled_ += waited;
}

// ---- output to links, journal and log ----

TimeNs EngineChannel::clock() const { return now_ns(); }

TimeNs EngineChannel::recently() const { return holds_lock_ ? looked_ : now_ns(); }

void EngineChannel::flush(int peer, TimeNs now) { peer_of(peer)->send(now); }

bool EngineChannel::detach(int peer, const DetachScope& scope) {
  return peer_of(peer)->detach(scope, now_ns());
}

std::string EngineChannel::describe_peer(int peer) const { return peer_of(peer)->label; }

std::string EngineChannel::describe_rails(int peer) const {
  return peer_of(peer)->describe_rails();
}

void EngineChannel::on_other_site(const std::string& text) {
  engine_->log_.add(LogLevel::warning, text);
}

std::uint8_t EngineChannel::loss_to_announce(const CallTag& /*tag*/) {
  if (call_began_ - loss_measured_ < loss_interval_ns) return announcer_.announced();
  loss_measured_ = call_began_;
  const std::size_t own = bandwidths().node_of(rank());
  return announcer_.update(measure_loss(), bandwidths().lost(), own, call_began_);
}

// Visits the rails to other nodes that count as bandwidth, with true if the rail carries data.
template <typename Visit>
void EngineChannel::each_rail_of_node(Visit visit) const {
  for (int peer = 0; peer < size(); ++peer) {
    if (bandwidths().node_of(peer) == bandwidths().node_of(rank())) continue;
    const Peer& to = *peer_of(peer);
    for (RailId rail = 0; rail < to.link.rail_count(); ++rail) {
      const RailEnd& end = to.rails[rail];
      if (end.kind == RailKind::control || to.link.reserve(rail) || !to.link.been_up(rail))
        continue;
      const RailState state = to.link.state(rail);
      visit(end, state == RailState::up || state == RailState::suspect);
    }
  }
}

// A port of this node is lost if no rail from the port to another node is UP.  A port that has a
// rail UP works: the other ends of its rails DOWN have lost their ports.
std::uint8_t EngineChannel::measure_loss() const {
  bool all_up = true;
  each_rail_of_node([&](const RailEnd&, bool up) { all_up = all_up && up; });
  if (all_up) return 0;  // without an allocation
  struct Port {
    std::string name;
    bool up;
  };
  std::vector<Port> ports;
  each_rail_of_node([&](const RailEnd& end, bool up) {
    std::string name = end.port();
    if (name.empty()) name = end.name;
    auto port = std::ranges::find(ports, name, &Port::name);
    if (port == ports.end()) port = ports.insert(port, {std::move(name), false});
    port->up = port->up || up;
  });
  const auto lost = static_cast<std::size_t>(std::ranges::count(ports, false, &Port::up));
  return static_cast<std::uint8_t>(
      std::min<std::size_t>(lost * whole_bandwidth / ports.size(), most_lost));
}

// The log line needs memory and comes last.
void EngineChannel::on_failed(ErrorCode code, const std::string& text) {
  engine_->journal_.record({.time_ns = now_ns(),
                            .kind = JournalKind::abort,
                            .rail = no_rail_entry,
                            .call = tag().number,
                            .communicator = id(),
                            .value = static_cast<std::uint64_t>(code)});
  if (engine_->blocked_ > 0) engine_->notify_blocked();
  engine_->log_.add(LogLevel::error, "communicator '" + name() + "' failed: " + text);
}

}  // namespace r2ccl
