// Deadlines and the interpretation of silence.  A rail goes DOWN for silence only if the peer
// answers elsewhere.  A peer silent on all rails, or a peer that does not read, takes no rail down.
#include <algorithm>

#include "link/link.hpp"
#include "link/mutants.hpp"
#include "link/posted.hpp"

namespace r2ccl {
namespace {

constexpr TimeNs ack_delay_ns = 4 * ns_per_ms;  // longest delay of an ack, to piggyback on data
constexpr TimeNs notice_interval_min_ns = 5 * ns_per_ms;
constexpr TimeNs notice_interval_max_ns = 200 * ns_per_ms;
constexpr TimeNs ack_request_min_ns = 20 * ns_per_ms;
constexpr TimeNs ack_request_max_ns = 500 * ns_per_ms;
constexpr TimeNs overdue_factor = 4;  // a missing ack is overdue after this multiple of the mean
constexpr TimeNs inquire_interval_max_ns = 1000 * ns_per_ms;
// An answer on another rail makes the path ack of a doubted rail due within the ack deadline
// divided by `due_share`.  While other rails advance, a doubted rail is suspected after
// `overtaken_factor` ack deadlines of silence.
constexpr TimeNs due_share = 8;
constexpr TimeNs overtaken_factor = 3;
constexpr TimeNs unheard_step_ns = 1000 * ns_per_ms;  // limit per tick: own pauses do not count

}  // namespace

void Link::tick(TimeNs now) {
  const TimeNs observed = std::max<TimeNs>(0, now - last_tick_);
  last_tick_ = now;
  const TimeNs unheard = unheard_ + std::min(observed, unheard_step_ns);
  unheard_ = heard_ || !options_.shape.resilience ? 0 : unheard;
  heard_ = false;
  measure_rates(observed);
  end_danger(now);
  for (RailId id = 0; id < rails_.size(); ++id) {
    Rail& rail = rails_[id];
    if (rail.state == RailState::probation) {
      const TimeNs first = options_.probation_timeout_ns;
      rail.reconnect.probation += std::min(observed, first / 4);  // own pauses do not count
      if (rail.reconnect.probation > patience(id, first))
        rail_failed(id, rail.epoch, RailCause::probation, now);
    } else if (usable(rail) && options_.shape.resilience) {
      judge_rail(id, observed, now);
    }
  }
  if (options_.shape.resilience) repeat_notices(now);
  repeat_drills(now);
  repeat_acks(now);
  if (posted_) posted_->tick(now);
}

TimeNs Link::ack_deadline(const Rail& rail) const {
  const auto scaled =
      static_cast<TimeNs>(static_cast<double>(rail.path.round_trip) * options_.ack_deadline_factor);
  return std::max(options_.ack_deadline_floor_ns, scaled);
}

void Link::judge_rail(RailId id, TimeNs observed, TimeNs now) {
  Rail& rail = rails_[id];
  // Count only time observed by our own loop, in steps of at most half a deadline.  A pause of our
  // own, a clock jump or a suspended host thus adds at most half a deadline of silence.
  const TimeNs deadline = ack_deadline(rail);
  if (rail.health.accused_at != 0) judge_accused(id, std::min(observed, deadline / due_share), now);
  if (rail.path.acked == rail.path.sent) {
    rail.health.silent = 0;
    if (now - rail.path.last_tx >= options_.probe_interval_ns) probe(id, 0);
    if (rail.health.pinged != 0) judge_unanswered(id, std::min(observed, deadline / 2), now);
    return;
  }
  rail.health.silent += std::min({observed, deadline / 2, now - rail.path.outstanding_since});
  if (rail.state == RailState::up) {
    if (rail.health.silent >= deadline / 2) doubt(id, std::min(observed, deadline / 2), now);
  } else if (rail.health.silent >= options_.dead_deadline_ns || planted(Mutant::late_ack_charged)) {
    // A resumed peer does not answer on all rails at once: after an answer elsewhere, grant this
    // rail an ack deadline.
    if (contradicted(id, rail.health.suspect_since))
      rail.health.contradicted += std::min(observed, deadline / 2);
    if (rail.health.contradicted >= deadline)
      rail_failed(id, rail.epoch, RailCause::dead_deadline, now);
    else
      inquire(id, now);
    if (now - rail.health.asked_others >= options_.probe_interval_ns) ask_others(id, now);
  }
}

// Suspects a rail with an overdue path ack if the peer answers elsewhere.  The question goes out at
// half the ack deadline, so that the answer costs no time if the rail is dead.  A process without
// CPU time also acknowledges late: its host delays the acks of unread bytes, and holds arrivals
// back while a thread stopped within a system call owns the socket.
void Link::doubt(RailId id, TimeNs watched, TimeNs now) {
  Rail& rail = rails_[id];
  if (rail.health.doubted_since == 0) {
    rail.health.doubted_since = now;
    rail.health.path_answered = 0;
    return ask_others(id, now);
  }
  // A process acknowledges all rails before it answers a probe, so the ack of this rail is due.
  const TimeNs deadline = ack_deadline(rail);
  const TimeNs due = deadline / due_share;
  if (contradicted(id, rail.health.doubted_since))
    rail.health.contradicted += std::min(watched, due);
  if (rail.health.silent < deadline) return;
  const bool overtaken = rail.health.silent >= overtaken_factor * deadline &&
                         others_advanced_since(id, rail.health.doubted_since);
  // Without an answer elsewhere, the peer's host may be lost.
  const TimeNs dark_after =
      std::min(std::max(options_.dead_deadline_ns / 2, overtaken_factor * deadline),
               options_.dead_deadline_ns);
  const bool dark = rail.health.silent >= dark_after;
  if (rail.health.contradicted > due || overtaken || dark)
    suspect(id, now);
  else if (now - rail.health.asked_others >= options_.probe_interval_ns)
    ask_others(id, now);
}

// Judges a rail with all bytes acknowledged by the path but an unanswered probe.
void Link::judge_unanswered(RailId id, TimeNs watched, TimeNs now) {
  Rail& rail = rails_[id];
  if (rail.health.overdue_since == 0) {
    rail.health.unanswered += watched;
    if (rail.health.unanswered < options_.dead_deadline_ns) return;
    // Answers before this time prove nothing: the peer may have stopped since.
    rail.health.overdue_since = now;
    rail.health.answered_elsewhere = false;
    rail.health.unanswered = 0;
    return ask_others(id, now);
  }
  // The peer reads all rails, then answers on each, and may stop between two answers.  A second
  // answer elsewhere, to a probe sent after the first answer, proves that the peer went on; this
  // rail then gets another ack deadline.  The refusal of a new connection counts as an answer,
  // because a peer whose fences do not complete answers no probe.
  if (others_answered_since(id, rail.health.overdue_since) ||
      refused_attempt_ > rail.health.overdue_since) {
    if (!rail.health.answered_elsewhere) {
      rail.health.answered_elsewhere = true;
      rail.health.overdue_since = now;
      return ask_others(id, now);
    }
    rail.health.unanswered += watched;
  } else if (planted(Mutant::unanswered_peer_charged)) {
    rail.health.unanswered += watched;
  }
  if (rail.health.unanswered >= ack_deadline(rail))
    rail_failed(id, rail.epoch, RailCause::dead_deadline, now);
  else if (now - rail.health.asked_others >= options_.probe_interval_ns)
    ask_others(id, now);
}

// Accuses a rail of bytes that its path acknowledged before `asked`, and that the peer then lacked.
void Link::accuse(RailId id, TimeNs asked, TimeNs now) {
  RailHealth& health = rails_[id].health;
  const bool open = rails_[id].state == RailState::up && health.accused_at == 0;
  if (!open || rails_[id].one_sided() || health.answered >= asked) return;
  last_probe_ = std::max(last_probe_, now - 1);
  health.accused_at = last_probe_ + 1;  // answers to probes sent so far do not count
  health.accused_of = asked;
  health.accused_watched = 0;
  ask_others(id, now);
}

// Each ack request goes out with a probe on every rail.  The peer sends its answers on all rails in
// one pass, but may stop within the pass.  An answer elsewhere to a later probe proves that the
// pass is over, so the answer over this rail is due.
void Link::judge_accused(RailId id, TimeNs watched, TimeNs now) {
  RailHealth& health = rails_[id].health;
  if (health.answered >= health.accused_of) {
    health.accused_at = 0;
  } else if (others_answered_since(id, health.accused_at)) {
    // The answer over this rail may wait behind bulk data.
    const TimeNs deadline = ack_deadline(rails_[id]);
    const bool moving = rails_[id].path.last_rx >= health.accused_at;
    health.accused_watched += watched;
    if (health.accused_watched <= (moving ? deadline : deadline / due_share)) return;
    health.withheld = true;
    suspect(id, now);
    probe(id, 0);
  } else if (now - health.asked_others >= options_.probe_interval_ns) {
    ask_others(id, now);
  }
}

// Returns true if the peer's process answers on another rail or on another connection of this path.
bool Link::contradicted(RailId id, TimeNs since) const {
  return planted(Mutant::busy_peer_charged) || others_answered_since(id, since) ||
         rails_[id].health.path_answered != 0;
}

void Link::suspect(RailId id, TimeNs now) {
  Rail& rail = rails_[id];
  rail.health.suspect_since = now;
  rail.health.path_answered = rail.health.contradicted = 0;
  rail.health.inquire_at = now;
  rail.health.inquire_interval = options_.dead_deadline_ns;
  move(id, RailState::suspect, RailCause::none, now);
  replay_from(id, /*hedge=*/true);
  ask_others(id, now);
}

// Probes all other rails, for a comparison with the silent rail.
void Link::ask_others(RailId id, TimeNs now) {
  rails_[id].health.asked_others = now;
  for (RailId other = 0; other < rails_.size(); ++other)
    if (other != id && usable(rails_[other])) probe(other, 0);
}

// Inquiry: opens a second connection over the path of a silent rail.  If every rail is silent, a
// comparison of rails cannot tell a dead rail from a stopped peer.  If the peer answers the new
// connection while the rail stays silent, the epoch is dead, even if its transport still retries.
// The answer also reports an epoch already fenced by the peer.
void Link::inquire(RailId id, TimeNs now) {
  Rail& rail = rails_[id];
  if (!options_.connects || now < rail.health.inquire_at || planted(Mutant::inquiry_never_made))
    return;
  rail.health.inquire_at = now + rail.health.inquire_interval;
  rail.health.inquire_interval =
      std::min(2 * rail.health.inquire_interval,
               std::max(inquire_interval_max_ns, rail.health.inquire_interval));
  actions_.push_back({LinkAction::Kind::connect, id, 0, now});
}

// Returns true if the peer's process answered a probe sent at or after `since` on another rail.  A
// kernel's acknowledgements and frames delayed by the network do not count.  A running process
// reads all its rails, so such an answer blames the silent rail.
bool Link::others_answered_since(RailId id, TimeNs since) const {
  for (RailId other = 0; other < rails_.size(); ++other) {
    const Rail& rail = rails_[other];
    if (other != id && usable(rail) && rail.health.answered >= since) return true;
  }
  return false;
}

// Returns true if another rail has moved bytes since, perhaps with a probe or its answer behind.
// Acks of all bytes do not count, since the kernel of a stopped peer acknowledges the probe alone.
bool Link::others_advanced_since(RailId id, TimeNs since) const {
  for (RailId other = 0; other < rails_.size(); ++other) {
    const RailPath& path = rails_[other].path;
    const bool goes_on = path.acked_at >= since && path.acked < path.sent;
    if (other != id && usable(rails_[other]) && (goes_on || path.last_rx >= since)) return true;
  }
  return false;
}

void Link::probe(RailId id, std::uint32_t bytes) {
  Control& control = rails_[id].control;
  control.ping = true;
  control.ping_bytes = bytes;
}

// Tells the peer a new finding about our port: at once, and again until the peer confirms.
void Link::tell_port(RailId id) {
  RailNotices& notices = rails_[id].notices;
  notices.interval = notice_interval_min_ns;
  notices.at = last_tick_ + notices.interval;
  each_usable([&](RailId, Rail& other) { other.control.notices |= std::uint64_t{1} << id; });
}

// RAIL_DOWN is repeated until the peer has fenced the epoch and has confirmed the state of our
// port.
void Link::repeat_notices(TimeNs now) {
  for (RailId id = 0; id < rails_.size(); ++id) {
    Rail& rail = rails_[id];
    const bool unfenced = (rail.state == RailState::down || rail.state == RailState::fencing) &&
                          rail.peer_fenced < rail.epoch;
    const bool untold = !connected(id) && rail.epoch != 0 &&
                        rail.findings.own != PortEvidence::unknown &&
                        rail.findings.own != rail.notices.confirmed;
    if ((!unfenced && !untold) || now < rail.notices.at) continue;
    rail.notices.interval =
        std::clamp(2 * rail.notices.interval, notice_interval_min_ns, notice_interval_max_ns);
    rail.notices.at = now + rail.notices.interval;
    each_usable([&](RailId, Rail& other) { other.control.notices |= std::uint64_t{1} << id; });
  }
}

// The number of the request stays that of the last overdue ack, so the answer accuses no rail.
void Link::tell_wait(InStream& stream, const StreamWait& wait) {
  stream.own_wait = wait;
  each_usable([&](RailId, Rail& rail) {
    auto& requests = rail.control.ack_requests;
    if (std::ranges::find(requests, stream.reverse) == requests.end())
      requests.push_back(stream.reverse);
  });
}

void Link::repeat_acks(TimeNs now) {
  for (auto& [communicator, pair] : streams_) {
    InStream& in = pair->in;
    const bool overdue = in.owed_since_ns != 0 && now - in.owed_since_ns >= ack_delay_ns;
    if (in.owes_ack_now() || (in.owes_ack() && overdue)) queue_ack(in, best_);

    OutStream& out = pair->out;
    if (!options_.shape.resilience || !out.wants_ack()) continue;
    const TimeNs overdue_ns = overdue_factor * out.usual_ack_ns;
    const TimeNs interval = std::max(
        out.ack_request_after, std::clamp(overdue_ns, ack_request_min_ns, ack_request_max_ns));
    if (now - std::max(out.last_ack_ns, out.ack_requested_ns) < interval) continue;
    out.ack_request_after = std::min(2 * interval, ack_request_max_ns);
    out.ack_requested_ns = now;
    last_probe_ = std::max(last_probe_, now - 1);
    each_usable([&](RailId id, Rail& rail) {
      probe(id, 0);
      auto& requests = rail.control.ack_requests;
      if (std::find(requests.begin(), requests.end(), &out) == requests.end())
        requests.push_back(&out);
    });
  }
}

}  // namespace r2ccl
