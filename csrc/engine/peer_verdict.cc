// Peer: the location of faults, told once it has settled, and the death of the peer's process.
#include <algorithm>
#include <string>
#include <utility>

#include "base/clock.hpp"
#include "engine/peer.hpp"

namespace r2ccl {
namespace {

// Both ends look for the fault, and each tells the other of its own port.  The location is told
// this long after the loss; without a rail for the peer's report, up to `blind_ns` later.
constexpr TimeNs settle_ns = 600 * ns_per_ms;
constexpr TimeNs blind_ns = 2400 * ns_per_ms;
// A kernel closes all connections of a process that ends within this time.
constexpr TimeNs one_end_ns = 2000 * ns_per_ms;

}  // namespace

void Peer::on_located(RailId rail, Verdict verdict) {
  RailEnd& end = rails[rail];
  if (end.told_epoch == link.epoch(rail)) return;
  end.located = verdict;
  end.located_epoch = link.epoch(rail);
  if (end.tell_at == 0) end.tell_at = std::max(end.lost_at + settle_ns, now_ns() + settle_ns / 2);
}

void Peer::tell_located(TimeNs now) {
  for (RailId rail = 0; rail < rails.size(); ++rail) {
    const TimeNs at = rails[rail].tell_at;
    if (at == 0 || now < at || (link.best_rail() == any_rail && now < at + blind_ns)) continue;
    tell_where(rail);
  }
}

// A drill counts if it explained the loss: a drill may begin, or end, before the location is known.
void Peer::tell_where(RailId rail) {
  RailEnd& end = rails[rail];
  end.tell_at = 0;
  end.told_epoch = end.located_epoch;
  note(rail, {.time_ns = now_ns(),
              .kind = JournalKind::verdict,
              .to = static_cast<std::uint8_t>(end.located),
              .epoch_or_step = end.located_epoch});
  if (in_graceful_close()) return;
  std::string text = end.name + " to " + label + ": the fault is " +
                     (end.located == Verdict::transient ? "" : "at the ") +
                     std::string(name_of(end.located));
  const std::string port = end.port();
  if (end.located == Verdict::local_nic && !port.empty())
    text += " " + port + (host.empty() ? "" : " of host " + host);
  const EndNames& there = end.peer_names;
  if (end.located == Verdict::remote_nic && !there.port.empty())
    text += " " + there.port + " of host " + there.host;
  text += drill_words(end.lost_by);
  const LogLevel level = end.lost_by == no_drill ? LogLevel::warning : LogLevel::info;
  log_.add(link.been_up(rail) ? level : LogLevel::debug, std::move(text));
}

Verdict Peer::verdict(RailId rail) const {
  const RailEnd& end = rails[rail];
  return end.told_epoch == link.epoch(rail) ? end.located : Verdict::none;
}

// A living process ends a connection in order in two cases alone, which prove nothing: it rejects
// the connection after the handshake, before the rail is UP, or it makes the drill `reset`.
// A connection from before the close that is not UP proves nothing, either: a path that drops large
// packets keeps a rail in PROBATION, and its loss comes when the probation ends.
bool Peer::closed_by_peer() const {
  TimeNs last_lost = 0;
  TimeNs last_closed = 0;
  TimeNs last_met = 0;  // of the connections that are open
  for (RailId rail = 0; rail < rails.size(); ++rail) {
    const RailEnd& end = rails[rail];
    if (link.connected(rail)) {
      if (link.state(rail) != RailState::probation) return false;
      last_met = std::max(last_met, end.met_at);
      continue;
    }
    // A connection that was never UP tells of a life after the close only by its begin.
    last_lost = std::max(last_lost, end.was_up ? end.lost_at : end.met_at);
    if (ends[rail].closed_by_peer && end.was_up && end.lost_by == no_drill)
      last_closed = std::max(last_closed, end.lost_at);
  }
  return last_closed != 0 && last_met < last_closed && last_lost - last_closed < one_end_ns;
}

// The word comes over other connections, and may be earlier than the end of the rails.  A word that
// the rails contradict for longer is no evidence in a later outage.
bool Peer::ended_by_word(TimeNs now) const {
  if (word_at_ == 0 || now - word_at_ >= one_end_ns) return false;
  for (RailId rail = 0; rail < rails.size(); ++rail)
    if (link.connected(rail)) return false;
  return true;
}

// Verdicts told before stay: each loss has a single verdict.
void Peer::on_process_gone(TimeNs now) {
  link.set_peer_gone();
  for (RailId rail = 0; rail < rails.size(); ++rail) {
    RailEnd& end = rails[rail];
    if (end.told_epoch == link.epoch(rail)) continue;
    end.located = Verdict::peer;
    end.located_epoch = link.epoch(rail);
    end.tell_at = now;
  }
  tell_located(now + blind_ns);
}

}  // namespace r2ccl
