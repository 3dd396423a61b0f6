// States of the link's rails and the effects of state changes; reconnection; streams.
#include "link/link.hpp"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <utility>

#include "base/text.hpp"
#include "link/mutants.hpp"
#include "link/posted.hpp"

namespace r2ccl {
namespace {

constexpr TimeNs hanging_ns = 50 * ns_per_ms;  // age of a connection attempt considered hung
constexpr std::uint32_t most_failures = 30;    // of connection attempts, for the back-off

}  // namespace

Link::Link(const LinkOptions& options, std::span<const RailKind> rails, std::uint64_t jitter_seed)
    : options_(options),
      rails_(rails.size()),
      refusals_(most_refused_communicators),
      aborts_(most_aborts),
      scratch_(64U << 10),
      jitter_(jitter_seed | 1U) {
  assert(!rails.empty() && rails.size() <= max_rails_per_link);
  for (std::size_t id = 0; id < rails.size(); ++id) {
    rails_[id].kind = rails[id];
    rails_[id].place.reserve = (options.reserves >> id & 1) != 0 && rails_[id].carries_data();
    rails_[id].place.unit = options.units[id];
    rails_[id].place.distance = options.distances[id];
    rails_[id].own_fenced = rails_[id].peer_fenced = options.first_epoch;
  }
  (void)update_tiers(0);
  if (options.posted) posted_ = std::make_unique<Posted>(*this);
}

Link::~Link() = default;

// ---- states ----

void Link::move(RailId id, RailState to, RailCause cause, TimeNs now) {
  Rail& rail = rails_[id];
  const RailState from = rail.state;
  assert(may_move(from, to));
  // The loss of an idle reserve disturbs no call.
  const bool carried = rail.carries_data() && (!rail.place.reserve || rail.place.tier == tier_);
  rail.state = to;
  rail.cause = cause;
  const bool was_used = from == RailState::up || from == RailState::suspect;
  if (was_used && to == RailState::down && cause != RailCause::recalled) endanger_unit(id, now);
  const bool reordered = rail.place.unit != 0 && update_tiers(now);
  if (from == RailState::up || to == RailState::up || id == best_ || reordered) choose_best();
  if (from == RailState::up || to == RailState::up) update_has_no_rail(now);
  if (from == RailState::up && carried) ++disturbances_;
  if (from == RailState::suspect) rail.health.withheld = false;
  rail.health.accused_at = 0;
  if (from == RailState::up) rail.copies.clear();
  // Replays bound to this rail may now go to any rail.
  if (from == RailState::up)
    for (Replay& replay : replays_)
      if (replay.target == id) replay.target = any_rail;
  if (observer_ != nullptr) observer_->on_rail_moved(id, from, to, cause);
  if (from == RailState::probation && to == RailState::up)
    for (Drill* drill : {&rail.drills.own, &rail.drills.peers}) drill->rejoined(now);
  step(LinkStep::rail_moved, id);
  if (posted_) posted_->rail_moved(id, to, now);
  if (to != RailState::up || !may_carry_data(rail)) return;
  // Hedge again for all SUSPECT rails: if no rail was UP before, their hedges had no destination.
  for (RailId other = 0; other < rails_.size(); ++other)
    if (rails_[other].state == RailState::suspect) replay_from(other, /*hedge=*/true);
}

bool Link::has_data_rail() const {
  return std::any_of(rails_.begin(), rails_.end(), [](const Rail& rail) {
    return rail.carries_data() && rail.state == RailState::up;
  });
}

bool Link::is_losing_a_rail() const {
  return std::any_of(rails_.begin(), rails_.end(), [](const Rail& rail) {
    return rail.carries_data() &&
           (rail.state == RailState::suspect || rail.state == RailState::down);
  });
}

void Link::update_has_no_rail(TimeNs now) {
  const bool none = std::none_of(rails_.begin(), rails_.end(), [this](const Rail& rail) {
    return may_carry_data(rail) && rail.state == RailState::up;
  });
  if (none && !has_no_rail_) no_rail_since_ = now;
  has_no_rail_ = none;
}

void Link::start(TimeNs now) {
  no_rail_since_ = now;
  last_tick_ = now;
  for (RailId id = 0; id < rails_.size(); ++id) {
    rails_[id].reconnect.penalty_at = now;
    if (!options_.connects) continue;
    rails_[id].reconnect.connecting = true;
    rails_[id].reconnect.at = now;
    actions_.push_back({LinkAction::Kind::connect, id, 0, now});
  }
}

// Drops unsent notices about an epoch before the next one: a notice carries the rail's epoch at
// send time, and would take down the new epoch.  That a drill has ended the old epoch is still
// told.
void Link::drop_notices(RailId id) {
  const std::uint64_t bit = std::uint64_t{1} << id;
  bool unsent = false;
  for (Rail& other : rails_) {
    unsent = unsent || (other.control.notices & bit) != 0;
    other.control.notices &= ~bit;
  }
  Rail& rail = rails_[id];
  if (!unsent || !rail.ended_by_drill()) return;
  rail.notices.owed = rail.epoch;
  each_usable([&](RailId, Rail& other) { other.control.owed |= bit; });
}

bool Link::rail_established(RailId id, Epoch epoch, TimeNs now) {
  Rail& rail = rails_[id];
  if (rail.state != RailState::connecting || epoch <= rail.epoch || epoch <= rail.own_fenced)
    return false;
  if (wants_location(id)) {
    rail.findings = {.own = {}, .peer = {}, .answered = true, .complete = true};
    conclude(id);
  }
  rail.verdict = Verdict::none;
  peer_gone_ = false;  // an authenticated connection disproves the death
  drop_notices(id);
  rail.epoch = epoch;
  // Lower epochs cannot open any more on either side, so all count as fenced.
  rail.own_fenced = rail.peer_fenced = epoch - 1;
  rail.reconnect.connecting = false;
  rail.path.sent = rail.path.acked = rail.path.landed = 0;
  rail.health.path_alive();
  rail.path.outstanding_since = rail.path.acked_at = 0;
  rail.health.inquire_at = rail.health.pinged = rail.health.unanswered = rail.health.overdue_since =
      0;
  rail.incoming = {};
  rail.control = {};
  rail.control.addresses = announced_;
  rail.path.last_rx = rail.path.last_tx = rail.reconnect.probation_since = now;
  rail.reconnect.probation = 0;
  ++rail.counters.epochs;
  assert(rail.path.attempts.empty());
  move(id, RailState::probation, RailCause::none, now);
  for (auto& [communicator, pair] : streams_) offer_slots(pair->in, id);
  probe(id, rail.one_sided() ? max_eager_bytes : max_probe_bytes);
  return true;
}

void Link::rail_failed(RailId id, Epoch epoch, RailCause cause, TimeNs now) {
  Rail& rail = rails_[id];
  if (epoch != rail.epoch) return;
  const bool port_lost = cause == RailCause::carrier_loss || cause == RailCause::address_loss ||
                         cause == RailCause::device_loss;
  if (!connected(id)) {
    if (port_lost) port_broken(id);
    return;
  }
  // The peer's kernel has the probe, but its process has not answered.  A path that drops the probe
  // needs a new connection soon instead.
  if (cause == RailCause::probation && rail.path.acked == rail.path.sent) handshake_late(id);
  move(id, RailState::down, cause, now);
  forget_rate(id);
  rail.findings = {};
  if (port_lost) rail.findings.own = PortEvidence::broken;
  rail.verdict = Verdict::none;
  conclude(id);

  if (rail.reconnect.been_up) {
    rail.reconnect.penalty = penalty(rail, now) + 1;
    rail.reconnect.penalty_at = now;
  } else if (rail.reconnect.failures < most_failures) {
    ++rail.reconnect.failures;  // a failed start, not a flap
  }

  if (options_.shape.resilience)
    replay_from(id, /*hedge=*/false);
  else
    lost_bytes_ = lost_bytes_ || rail.carries_data();
  for (auto& [communicator, pair] : streams_) pair->in.owe_again();  // the last acks may be lost
  rail.control = {};
  rail.notices.at = now;
  rail.notices.interval = 0;
  rail.notices.confirmed = PortEvidence::unknown;
  repeat_notices(now);
  actions_.push_back({LinkAction::Kind::close, id, epoch, now});
}

void Link::rail_closed(RailId id, Epoch epoch, TimeNs now) {
  Rail& rail = rails_[id];
  if (epoch != rail.epoch || rail.state != RailState::down) return;
  step(LinkStep::rail_closed, id);
  rail.own_fenced = epoch;
  rail.incoming = {};
  forget_memory(id);
  move(id, RailState::fencing, rail.cause, now);
  each_usable([&](RailId, Rail& other) { other.control.fenced |= std::uint64_t{1} << id; });
  schedule_connect(id, now);
  maybe_reopen(id, now);
}

std::optional<Epoch> Link::epoch_to_offer(RailId id, Epoch connector_fenced) const {
  const Rail& rail = rails_[id];
  if (connector_fenced < rail.epoch || rail.state == RailState::down) return std::nullopt;
  return std::max({rail.epoch, rail.own_fenced, connector_fenced}) + 1;
}

void Link::peer_fenced(RailId id, Epoch epoch, TimeNs now) { on_fenced(id, epoch, now); }

void Link::on_fenced(RailId id, Epoch epoch, TimeNs now) {
  Rail& rail = rails_[id];
  // The peer may also have fenced a later epoch, offered but never confirmed as open.
  epoch = planted(Mutant::fenced_epoch_not_checked) ? rail.epoch : std::min(epoch, rail.epoch);
  if (epoch <= rail.peer_fenced) return;
  rail.peer_fenced = epoch;
  // The peer fenced the epoch still in use here: its RAIL_DOWN was lost or is late.
  if (epoch == rail.epoch) rail_failed(id, epoch, RailCause::peer_notice, now);
  maybe_reopen(id, now);
}

void Link::maybe_reopen(RailId id, TimeNs now) {
  Rail& rail = rails_[id];
  if (rail.state != RailState::fencing || rail.peer_fenced < rail.epoch) return;
  resolve_epoch(id);
  move(id, RailState::connecting, rail.cause, now);
  for (auto& [communicator, pair] : streams_) open_and_queue(pair->out, now);
}

void Link::resolve_epoch(RailId id) {
  Rail& rail = rails_[id];
  for (; !rail.path.attempts.empty(); rail.path.attempts.pop_front()) {
    const Attempt& attempt = rail.path.attempts.front();
    attempt.stream->attempt_resolved(attempt.stream->in_slot(attempt.slot), id, 0);
  }
}

// ---- reconnection ----

void Link::schedule_connect(RailId id, TimeNs now) {
  Rail& rail = rails_[id];
  if (!options_.connects || close_sent_ || peer_closed_) return;
  rail.reconnect.connecting = true;
  rail.reconnect.at = now + backoff(rail, now);
  actions_.push_back({LinkAction::Kind::connect, id, 0, rail.reconnect.at});
}

double Link::penalty(const Rail& rail, TimeNs now) const {
  if (options_.flap_half_life_s <= 0) return 0;
  const double age_s = static_cast<double>(now - rail.reconnect.penalty_at) * 1e-9;
  return rail.reconnect.penalty * std::exp2(-age_s / options_.flap_half_life_s);
}

TimeNs Link::backoff(const Rail& rail, TimeNs now) {
  jitter_ ^= jitter_ << 13;
  jitter_ ^= jitter_ >> 7;
  jitter_ ^= jitter_ << 17;
  const double jitter = 0.75 + 0.5 * static_cast<double>(jitter_ >> 11) * 0x1p-53;
  const double doublings = std::clamp(
      penalty(rail, now) - 1.0 + static_cast<double>(rail.reconnect.failures), 0.0, 30.0);
  const double delay = std::min(
      static_cast<double>(options_.rejoin_backoff_min_ns) * std::exp2(doublings),
      planted(Mutant::backoff_never_ends) ? 1e18
                                          : static_cast<double>(options_.rejoin_backoff_max_ns));
  return static_cast<TimeNs>(delay * jitter);
}

TimeNs Link::patience(RailId id, TimeNs first) const {
  return first << std::min(rails_[id].reconnect.late, most_patience_doublings);
}

void Link::handshake_late(RailId id) {
  std::uint32_t& late = rails_[id].reconnect.late;
  late = std::min(late + 1, most_patience_doublings);
}

void Link::never_opened(RailId id, Epoch epoch) {
  Rail& rail = rails_[id];
  if (epoch > rail.epoch) rail.own_fenced = std::max(rail.own_fenced, epoch);
}

void Link::connect_failed(RailId id, TimeNs now) {
  Rail& rail = rails_[id];
  if (rail.state != RailState::connecting && rail.state != RailState::fencing) return;
  if (rail.reconnect.failures < most_failures) ++rail.reconnect.failures;
  schedule_connect(id, now);
}

void Link::connect_refused(RailId id, Epoch peer_fenced, TimeNs now) {
  Rail& rail = rails_[id];
  on_fenced(id, peer_fenced, now);
  heard_ = true;
  refused_attempt_ = std::max(refused_attempt_, rail.reconnect.at);
  if (rail.state == RailState::suspect) rail.health.path_answered = now;
}

void Link::connect_soon(RailId id, TimeNs now) {
  Rail& rail = rails_[id];
  // Keep a connection attempt started less than hanging_ns ago; restart an attempt that hangs.
  if (!rail.reconnect.connecting ||
      (rail.reconnect.at <= now && now - rail.reconnect.at < hanging_ns))
    return;
  // Flap damping: keep the back-off of a flapping rail while an equal or better data rail is UP.
  const bool damped = std::any_of(rails_.begin(), rails_.end(), [&rail](const Rail& other) {
    return other.carries_data() && other.state == RailState::up &&
           (rail.place.reserve || !other.place.reserve);
  });
  if (damped && now < rail.reconnect.at && rail.reconnect.failures == 0) return;
  rail.reconnect.failures = 0;
  rail.reconnect.at = damped ? now + backoff(rail, now) : now;
  actions_.push_back({LinkAction::Kind::connect, id, 0, rail.reconnect.at});
}

void Link::connect_anew(RailId id, TimeNs at) {
  Rail& rail = rails_[id];
  if (!rail.reconnect.connecting) return;
  rail.reconnect.failures = 0;
  rail.reconnect.at = at;
  actions_.push_back({LinkAction::Kind::connect, id, 0, at});
}

// ---- path ----

void Link::path_acked(RailId id, Epoch epoch, std::uint64_t position, bool peer_limited,
                      TimeNs now) {
  Rail& rail = rails_[id];
  if (epoch != rail.epoch || position > rail.path.sent) return;
  if (peer_limited) {
    rail.health.path_alive();
    rail.health.meter.restart(rail.path.sent, rail.path.acked);
  }
  if (position <= rail.path.acked) return;
  rail.path.acked = position;
  rail.path.acked_at = now;
  rail.health.path_alive();
  step(LinkStep::path_acked, id);
  clear_suspicion(id, now);
  reap(rail);
  if (!deferred_frees_.empty()) free_deferred();
  if (planted(Mutant::lost_wake_up)) return;
  for (auto& [communicator, pair] : streams_) open_and_queue(pair->out, now);
}

void Link::path_advanced(RailId id, Epoch epoch, TimeNs now) {
  Rail& rail = rails_[id];
  if (epoch != rail.epoch) return;
  rail.health.path_alive();
  clear_suspicion(id, now);
}

void Link::path_round_trip(RailId id, TimeNs smoothed, TimeNs base, std::uint64_t held_back) {
  Rail& rail = rails_[id];
  rail.path.round_trip = smoothed;
  rail.path.base_round_trip = base;
  rail.path.held_back = held_back;
  choose_best();
}

void Link::clear_suspicion(RailId id, TimeNs now) {
  const Rail& rail = rails_[id];
  if (rail.state == RailState::suspect && !rail.health.withheld)
    move(id, RailState::up, RailCause::none, now);
}

// ---- streams ----

Link::Streams& Link::streams(std::uint64_t communicator) {
  if (const auto found = streams_.find(communicator); found != streams_.end())
    return *found->second;
  auto made =
      std::make_unique<Streams>(options_.shape_of(communicator), communicator, options_.memory);
  Streams& pair = *streams_.emplace(communicator, std::move(made)).first->second;
  for (RailId id = 0; id < rails_.size(); ++id)
    if (connected(id)) offer_slots(pair.in, id);
  return pair;
}

OutStream& Link::out_stream(std::uint64_t communicator) { return streams(communicator).out; }

InStream& Link::in_stream(std::uint64_t communicator) { return streams(communicator).in; }

void Link::close_streams(std::uint64_t communicator) {
  if (closed_.size() >= most_closed_communicators) {
    closed_.erase(closed_order_.front());
    closed_order_.pop_front();
  }
  if (closed_.try_emplace(communicator).second) closed_order_.push_back(communicator);
  const auto found = streams_.find(communicator);
  if (found == streams_.end()) return;
  OutStream* out = &found->second->out;
  InStream* in = &found->second->in;
  closed_[communicator] = {in->delivered(), in->consumed()};
  std::erase(posting_, out);
  std::erase_if(replays_, [&](const Replay& replay) { return replay.stream == out; });
  if (last_in_ == in) last_in_ = nullptr;
  for (Rail& rail : rails_) {
    rail.path.attempts.erase_if([&](const Attempt& attempt) { return attempt.stream == out; });
    std::erase_if(rail.copies, [&](const Copy& copy) { return copy.stream == out; });
    std::erase(rail.control.ack_requests, out);
    std::erase(rail.control.acks, in);
    if (rail.incoming.stream == in) rail.incoming.stream = nullptr;
  }
  defer_free(*found->second);
  streams_.erase(found);
}

bool Link::all_delivered() const {
  return std::all_of(streams_.begin(), streams_.end(),
                     [](const auto& entry) {
                       return entry.second->out.idle() && !entry.second->in.owes_ack();
                     }) &&
         (!posted_ || posted_->settled());
}

QueueDepths Link::queue_depths() const {
  QueueDepths depths{.streams = streams_.size(),
                     .replays = replays_.size(),
                     .actions = actions_.size(),
                     .deferred_frees = deferred_frees_.size(),
                     .refusals = refusals_.size(),
                     .aborts = aborts_.size()};
  for (const Rail& rail : rails_) {
    depths.attempts += rail.path.attempts.size();
    depths.copies += rail.copies.size();
    depths.control += rail.control.acks.size() + rail.control.ack_requests.size() +
                      rail.control.answers.size() + rail.control.slots.size() +
                      rail.control.released.size() + rail.control.targets.size();
    depths.posted += rail.control.posted;
  }
  return depths;
}

void Link::send_abort(const AbortNotice& notice) {
  AbortNotice added = notice;
  cut(added.text, max_abort_bytes);
  const bool sent = std::ranges::none_of(rails_, [this](const Rail& rail) {
    return rail.state == RailState::down ||
           (usable(rail) && rail.control.aborts_sent < aborts_.end());
  });
  aborts_.add(std::move(added), sent);
}

void Link::announce_address(RailId id, const Endpoint& at) {
  assert(!options_.connects);
  Rail& rail = rails_[id];
  rail.notices.address = at;
  ++rail.notices.address_sequence;
  const std::uint64_t bit = std::uint64_t{1} << id;
  announced_ |= bit;
  for (Rail& other : rails_) other.control.addresses |= bit;
}

void Link::send_close() {
  close_sent_ = true;
  each_usable([](RailId, Rail& rail) { rail.control.close = true; });
}

bool Link::has_unacked_bytes(RailId id) const {
  return rails_[id].path.acked < rails_[id].path.sent;
}

bool Link::awaits_path_ack(RailId id) const { return connected(id) && has_unacked_bytes(id); }

}  // namespace r2ccl
