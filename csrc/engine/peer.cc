#include "engine/peer.hpp"

#include <iomanip>
#include <sstream>

#include "base/clock.hpp"

namespace r2ccl {
namespace {

std::vector<RailKind> kinds_of(const PeerDescription& description) {
  std::vector<RailKind> kinds;
  for (const RailDescription& rail : description.rails) kinds.push_back(rail.kind);
  return kinds;
}

}  // namespace

std::string_view name_of(Fault fault) {
  switch (fault) {
    case Fault::none: return "heal";
    case Fault::carrier_loss: return "carrier_loss";
    case Fault::black_hole: return "black_hole";
    case Fault::reset: return "reset";
    case Fault::slow: return "slow";
    case Fault::corrupt: return "corrupt";
    case Fault::egress_refused: return "egress_refused";
  }
  return "unknown";
}

std::optional<Fault> fault_named(std::string_view name) {
  for (const Fault fault : {Fault::none, Fault::carrier_loss, Fault::black_hole, Fault::reset,
                            Fault::slow, Fault::corrupt, Fault::egress_refused})
    if (name == name_of(fault)) return fault;
  if (name == "cut") return Fault::carrier_loss;
  if (name == "drop") return Fault::black_hole;
  if (name == "error") return Fault::reset;
  return std::nullopt;
}

std::string RailEnd::port() const {
  return kind == RailKind::verbs ? verbs.device + ":" + std::to_string(verbs.port) : route.device;
}

Peer::Peer(const PeerDescription& description, const LinkOptions& options, Journal& journal,
           LogQueue& log, std::uint64_t jitter_seed)
    : CarriedLink(options, kinds_of(description), jitter_seed),
      process(description.process),
      label(description.label),
      rails(description.rails.size()),
      journal_(journal),
      log_(log) {
  for (std::size_t i = 0; i < rails.size(); ++i) {
    rails[i].kind = description.rails[i].kind;
    rails[i].name = description.rails[i].name;
    rails[i].verbs = description.rails[i].verbs;
    rails[i].route.device = description.rails[i].device;
    rails[i].since = now_ns();
    rails[i].journal_entry = journal.add_rail(
        {.name = rails[i].name, .peer = label, .device = rails[i].port(), .peer_engine = process});
    if (rails[i].journal_entry == no_rail_entry)
      log.add(LogLevel::warning, rails[i].name + " to " + label +
                                     " is not shown in journal and metrics: the journal's table of "
                                     "rails is full");
  }
  link.set_observer(this);
  publish();
}

void Peer::on_rail_moved(RailId rail, RailState from, RailState to, RailCause cause) {
  RailEnd& end = rails[rail];
  end.since = now_ns();
  const bool in_use = from == RailState::up || from == RailState::suspect;
  const bool failover =
      in_use && to == RailState::down && end.kind != RailKind::control && !in_graceful_close();
  note(rail, {.time_ns = end.since,
              .kind = JournalKind::rail_state,
              .from = static_cast<std::uint8_t>(from),
              .to = static_cast<std::uint8_t>(to),
              .cause = static_cast<std::uint8_t>(cause),
              .value = failover ? 1U : 0U});
  // Operators need no log line when a suspicion clears.
  const bool notable =
      !in_graceful_close() &&
      (to == RailState::down || (to == RailState::up && from == RailState::probation));
  std::string text = end.name + " to " + label + ": " + std::string(name_of(from)) + " -> " +
                     std::string(name_of(to));
  if (cause != RailCause::none) text += " (" + std::string(name_of(cause)) + ")";
  if (to == RailState::up && from == RailState::probation && link.epoch(rail) > 1)
    text += ", rejoined";
  const LogLevel level = !notable                ? LogLevel::debug
                         : to == RailState::down ? LogLevel::warning
                                                 : LogLevel::info;
  log_.add(level, std::move(text));
}

void Peer::on_replay(RailId rail, std::uint32_t chunks, bool hedge) {
  note(rail, {.time_ns = now_ns(),
              .kind = hedge ? JournalKind::hedge : JournalKind::replay,
              .value = chunks});
}

void Peer::on_located(RailId rail, Verdict verdict) {
  note(rail, {.time_ns = now_ns(),
              .kind = JournalKind::verdict,
              .to = static_cast<std::uint8_t>(verdict)});
  if (in_graceful_close()) return;
  const std::string& device = rails[rail].route.device;
  std::string text = rails[rail].name + " to " + label + ": the fault is " +
                     (verdict == Verdict::transient ? "" : "at the ") +
                     std::string(name_of(verdict));
  if (verdict == Verdict::local_nic && !device.empty()) text += " " + device;
  const EndNames& there = rails[rail].peer_names;
  if (verdict == Verdict::remote_nic && !there.port.empty())
    text += " " + there.port + " of host " + there.host;
  log_.add(LogLevel::warning, std::move(text));
}

void Peer::on_slow(RailId rail, bool slow, double bytes_per_s) {
  note(rail, {.time_ns = now_ns(),
              .kind = JournalKind::speed,
              .to = static_cast<std::uint8_t>(slow ? 1 : 0),
              .value = static_cast<std::uint64_t>(bytes_per_s)});
  std::ostringstream text;
  text << rails[rail].name << " to " << label << (slow ? ": slow" : ": no longer slow");
  if (bytes_per_s > 0) text << ", " << std::setprecision(3) << bytes_per_s * 1e-6 << " MB/s";
  log_.add(slow ? LogLevel::warning : LogLevel::info, text.str());
}

void Peer::on_injected(RailId rail) {
  note(rail, {.time_ns = now_ns(), .kind = JournalKind::injected, .from = 1});
  log_.add(LogLevel::info,
           rails[rail].name + ": a test or drill at " + label + " has taken this rail down");
}

void Peer::note_injected(RailId rail, Fault fault) {
  link.set_injected(rail, takes_down(fault));
  note(
      rail,
      {.time_ns = now_ns(), .kind = JournalKind::injected, .to = static_cast<std::uint8_t>(fault)});
}

// Updates the rail table before the record, so that a reader of the record finds the new state.
void Peer::note(RailId rail, JournalRecord record) {
  record.rail = rails[rail].journal_entry;
  record.epoch = link.epoch(rail);
  publish(rail);
  journal_.record(record);
}

void Peer::publish() {
  for (RailId id = 0; id < rails.size(); ++id) publish(id);
}

void Peer::publish(RailId id) {
  JournalRail* entry = journal_.rail(rails[id].journal_entry);
  if (entry == nullptr) return;
  const RailCounters& counters = link.counters(id);
  entry->kind = static_cast<std::uint8_t>(rails[id].kind);
  entry->state = static_cast<std::uint8_t>(link.state(id));
  entry->cause = static_cast<std::uint8_t>(link.cause(id));
  entry->epoch = link.epoch(id);
  entry->tx_bytes = counters.tx_bytes;
  entry->rx_bytes = counters.rx_bytes;
  entry->data_tx_bytes = counters.data_tx_bytes;
  entry->replayed_chunks = counters.replayed_chunks;
  entry->hedged_chunks = counters.hedged_chunks;
  entry->last_tx_ns = counters.last_tx_ns;
  entry->round_trip_ns = link.round_trip(id);
  entry->slow = link.slow(id) ? 1 : 0;
  entry->may_carry = link.may_carry_data(id) ? 1 : 0;
  entry->graceful_close = in_graceful_close() ? 1 : 0;
  entry->since_ns = rails[id].since;
  entry->verdict = static_cast<std::uint8_t>(link.verdict(id));
  entry->rate = static_cast<std::uint64_t>(link.rate(id));
}

std::string Peer::describe_rails() const {
  std::string text;
  for (RailId id = 0; id < rails.size(); ++id) {
    if (!text.empty()) text += ", ";
    text += rails[id].name + " " + std::string(name_of(link.state(id)));
    std::string why;
    const auto add = [&why](std::string_view more) {
      if (!more.empty()) why += (why.empty() ? "" : ", ") + std::string(more);
    };
    if (link.cause(id) != RailCause::none) add(name_of(link.cause(id)));
    if (link.cause(id) != RailCause::none && link.verdict(id) != Verdict::none)
      add(name_of(link.verdict(id)));
    if (link.state(id) == RailState::connecting) add(rails[id].connect_error);
    if (!why.empty()) text += " (" + why + ")";
  }
  return text;
}

}  // namespace r2ccl
