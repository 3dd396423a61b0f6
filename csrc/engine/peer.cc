#include "engine/peer.hpp"

#include <algorithm>
#include <array>
#include <iomanip>
#include <limits>
#include <sstream>
#include <utility>

#include "base/clock.hpp"

namespace r2ccl {
namespace {

std::vector<RailKind> kinds_of(const PeerDescription& description) {
  std::vector<RailKind> kinds;
  for (const RailDescription& rail : description.rails) kinds.push_back(rail.kind);
  return kinds;
}

// A rail that never came up is news this long after the first rail of the peer.
constexpr TimeNs never_up_after_ns = 10'000 * ns_per_ms;
// A start waits this long for better rails than reserves.
constexpr TimeNs reserve_wait_ns = 2000 * ns_per_ms;
// A close no longer waits for a peer without a rail UP that has sent nothing for so long.
constexpr TimeNs silent_limit_ns = 1000 * ns_per_ms;
// Losses of a shared port within this time are one cause: Linux may report the second loss late.
constexpr TimeNs one_cause_ns = 1000 * ns_per_ms;
// A start waits this long for data rails if a port of each is known not to work.
constexpr TimeNs late_patience_ns = 2000 * ns_per_ms;
// Segments of TCP for paths with a smaller MTU than that of the port, in bytes: the smallest MTU of
// IPv6, and a datagram that every host of IPv4 accepts.  0: by the MTU of the port.
constexpr std::array<int, 3> segment_sizes{0, 1220, 516};
// Headers of IP and TCP, in bytes.
constexpr int packet_headers_v4 = 40;
constexpr int packet_headers_v6 = 60;
// Probations in a row that the peer has ended, before the path is suspected.
constexpr unsigned most_lost_probes = 3;
// A probe without any acknowledgement for this long is lost: TCP has sent it twice.
constexpr TimeNs lost_probe_ns = 400 * ns_per_ms;

// Connections of an attempt over a silent path.  If half of the members are dead, one attempt of
// 256 finds none that works.
constexpr int flows_at_once = 8;

bool is_loss_of_port(RailCause cause) {
  return cause == RailCause::carrier_loss || cause == RailCause::device_loss;
}

}  // namespace

std::string RailEnd::port() const {
  if (kind != RailKind::verbs) return route.device;
  const std::string rdma = verbs.device + ":" + std::to_string(verbs.port);
  return route.device.empty() ? rdma : route.device + "/" + rdma;
}

Peer::Peer(const PeerDescription& description, const LinkOptions& options, Journal& journal,
           LogQueue& log, std::uint64_t jitter_seed)
    : LinkOfRails(options, kinds_of(description), jitter_seed),
      process(description.process),
      label(description.label),
      rails(description.rails.size()),
      posted(description.posted),
      journal_(journal),
      log_(log) {
  for (std::size_t i = 0; i < rails.size(); ++i) {
    rails[i].kind = description.rails[i].kind;
    rails[i].name = description.rails[i].name;
    rails[i].verbs = description.rails[i].verbs;
    rails[i].unit = description.rails[i].unit;
    rails[i].route.device = description.rails[i].device;
    rails[i].unnumbered = description.rails[i].unnumbered;
    rails[i].remote_device = description.rails[i].remote_device;
    rails[i].remote_port = description.rails[i].remote_port;
    rails[i].since = now_ns();
    rails[i].reserve = description.rails[i].reserve;
    rails[i].late = description.rails[i].late;
    rails[i].dormant = description.rails[i].dormant;
    rails[i].told = description.rails[i].told || rails[i].dormant;
    if (!rails[i].dormant) enter(static_cast<RailId>(i));
  }
  link.set_observer(this);
  publish();
}

// Adds a rail to the journal.
void Peer::enter(RailId rail) {
  RailEnd& end = rails[rail];
  end.journal_entry = journal_.add_rail(
      {.name = end.name, .peer = label, .device = end.port(), .peer_engine = process});
  if (end.journal_entry == no_rail_entry)
    log_.add(LogLevel::warning, end.name + " to " + label +
                                    " is not shown in journal and metrics: the journal's table of "
                                    "rails is full");
}

// Shared memory keeps the frames for the peer; a socket or a device loses what is not acknowledged.
bool Peer::has_all_frames() const {
  const bool silent = link.has_no_rail() && link.unheard() >= silent_limit_ns;
  if (silent || link.peer_closed()) return true;
  bool none_left = true;
  for (RailId id = 0; id < ends.size(); ++id) {
    if (link.state(id) != RailState::up && link.state(id) != RailState::suspect) continue;
    none_left = false;
    const bool passed_on = !ends[id].rail->wants_write() && !link.has_frames(id);
    if (passed_on && (rails[id].kind == RailKind::shm || !link.awaits_path_ack(id))) return true;
  }
  return none_left;
}

void Peer::on_rail_moved(RailId rail, RailState from, RailState to, RailCause cause) {
  RailEnd& end = rails[rail];
  if (to == RailState::probation) {
    show(rail);
    end.misses = 0;
    end.met_at = now_ns();
    if (end.tell_at != 0) tell_where(rail);
  }
  note_narrow(rail, from, to, cause);
  end.since = now_ns();
  if (to == RailState::up && first_up == 0) first_up = end.since;
  const std::uint8_t drill = link.drill(rail, end.since);
  if (to == RailState::down) {
    end.lost_at = end.since;
    end.was_up = from != RailState::probation;
    end.lost_by = drill;
  }
  // An idle reserve is no rail in use.
  const bool idle = link.reserve(rail) && link.tier() < RailTier::reserve;
  const bool in_use = (from == RailState::up || from == RailState::suspect) && !idle;
  const bool failover =
      in_use && to == RailState::down && end.kind != RailKind::control && !in_graceful_close();
  note(rail, {.time_ns = end.since,
              .kind = JournalKind::rail_state,
              .from = static_cast<std::uint8_t>(from),
              .to = static_cast<std::uint8_t>(to),
              .cause = static_cast<std::uint8_t>(cause),
              .value = failover ? 1U : 0U});
  // Operators need no log line when a suspicion clears.  A rail that was never UP is not lost; see
  // tell_never_up().
  const bool notable =
      !in_graceful_close() && ((to == RailState::down && link.been_up(rail)) ||
                               (to == RailState::up && from == RailState::probation));
  std::string text = end.name + " to " + label + ": " + std::string(name_of(from)) + " -> " +
                     std::string(name_of(to));
  if (cause != RailCause::none) text += " (" + std::string(name_of(cause)) + ")";
  text += drill_words(drill);
  if (to == RailState::up && from == RailState::probation && link.epoch(rail) > 1)
    text += ", rejoined";
  if (to == RailState::down) text += shared_loss(rail);
  if (notable) text += ports_of(rail);
  const bool fault = to == RailState::down && drill == no_drill;
  const LogLevel level = !notable ? LogLevel::debug : fault ? LogLevel::warning : LogLevel::info;
  log_.add(level, std::move(text));
}

// Returns the ports at both ends of a rail: an operator looks for a host and a port.
std::string Peer::ports_of(RailId rail) const {
  const RailEnd& end = rails[rail];
  if (end.port().empty()) return "";
  const auto at = [](const std::string& port, const std::string& on) {
    if (port.empty()) return on.empty() ? std::string() : "host " + on;
    return on.empty() ? port : port + " of host " + on;
  };
  const std::string there = at(end.peer_names.port, end.peer_names.host);
  return "; " + at(end.port(), host) + (there.empty() ? "" : " to " + there);
}

// Names the rails whose loss has the same cause: the loss of the port that they share.
std::string Peer::shared_loss(RailId rail) const {
  const RailEnd& end = rails[rail];
  if (end.unit.empty() || !is_loss_of_port(link.cause(rail))) return "";
  std::string others;
  for (RailId id = 0; id < rails.size(); ++id) {
    const RailEnd& other = rails[id];
    const bool same = id != rail && other.unit == end.unit && is_loss_of_port(link.cause(id)) &&
                      !link.connected(id) && end.lost_at - other.lost_at <= one_cause_ns;
    if (same) others += (others.empty() ? "" : ", ") + other.name;
  }
  return others.empty() ? "" : ", one cause with " + others + ": they share " + end.unit;
}

void Peer::on_replay(RailId rail, std::uint32_t chunks, bool hedge) {
  const std::uint64_t withheld = link.counters(rail).withheld_chunks;
  const bool lacked = std::exchange(rails[rail].withheld_chunks, withheld) != withheld;
  note(rail, {.time_ns = now_ns(),
              .kind = hedge ? JournalKind::hedge : JournalKind::replay,
              .from = static_cast<std::uint8_t>(lacked ? 1 : 0),
              .value = chunks});
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

// Updates the rail table before the record, so that a reader of the record finds the new state.
void Peer::note(RailId rail, JournalRecord record) {
  if (rails[rail].dormant) return;  // a record without an entry would be of no rail
  record.rail = rails[rail].journal_entry;
  if (record.epoch_or_step == 0) record.epoch_or_step = link.epoch(rail);
  const std::uint8_t drill =
      record.kind == JournalKind::verdict ? rails[rail].lost_by : link.drill(rail, record.time_ns);
  record.detail = drill == no_drill ? 0 : 1;
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
  entry->verdict = static_cast<std::uint8_t>(verdict(id));
  entry->rate = static_cast<std::uint64_t>(link.rate(id));
  entry->been_up = link.been_up(id) ? 1 : 0;
  entry->connect_fault = static_cast<std::uint8_t>(never_up(id));
  entry->reserve = link.reserve(id) ? 1 : 0;
  entry->unit = link.unit(id);
  entry->drill = link.drill(id, now_ns());
  constexpr TimeNs longest = std::numeric_limits<std::uint32_t>::max();
  entry->unheard_ms = static_cast<std::uint32_t>(std::min(link.unheard() / ns_per_ms, longest));
}

bool Peer::may_begin(TimeNs now) const {
  if (!link.has_data_rail()) return false;
  bool awaits_better = false;
  for (RailId id = 0; id < rails.size(); ++id)
    awaits_better = awaits_better || (!link.reserve(id) && rails[id].kind != RailKind::control &&
                                      !rails[id].dormant);
  return link.tier() < RailTier::reserve || !awaits_better || now - first_up >= reserve_wait_ns;
}

ConnectFault Peer::never_up(RailId rail) const {
  const RailEnd& end = rails[rail];
  if (link.been_up(rail)) return ConnectFault::none;
  if (end.own_address) return ConnectFault::own_address;
  if (link.cause(rail) == RailCause::probation) return ConnectFault::probe_unanswered;
  if (end.connect_fault != ConnectFault::none || connects) return end.connect_fault;
  return ConnectFault::no_connection;
}

std::string Peer::describe_never_up(RailId rail) const {
  const RailEnd& end = rails[rail];
  const std::string local =
      IpAddress::from_sockaddr(end.route.local.get()).value_or(IpAddress()).to_string();
  const std::string remote = end.route.remote.text();
  const std::string from = end.kind == RailKind::shm  ? "shared memory"
                           : end.route.device.empty() ? local
                                                      : end.route.device + " (" + local + ")";
  switch (never_up(rail)) {
    case ConnectFault::none:
      return end.connect_error.empty() ? "still connecting to " + remote : end.connect_error;
    case ConnectFault::refused:
      return remote + " refuses the connection from " + from + ": no listener, or a packet filter";
    case ConnectFault::no_route:
      return "no route from " + from + " to " + remote + " (" + end.connect_error + ")";
    case ConnectFault::own_address:
      return remote + " has an address of this host, too: both ends need different addresses";
    case ConnectFault::no_answer:
      return "no answer of " + remote + " to " + from +
             ": no common network, a packet filter, or a port that is down";
    case ConnectFault::rejected:
      return "the connection from " + from + " to " + remote + " failed: " + end.connect_error;
    case ConnectFault::probe_unanswered:
      return "connected from " + from + " to " + remote + ", but a probe of full size (" +
             std::to_string(max_probe_bytes) +
             " bytes) got no answer: check the MTU of the whole path";
    case ConnectFault::no_connection:
      return "no connection of the peer has arrived at " + from + "; its log has the reason";
  }
  return "";
}

void Peer::tell_never_up(TimeNs connect_timeout, TimeNs now) {
  if (!started || in_graceful_close()) return;
  const TimeNs half = started_at + connect_timeout / 2;
  if (now < (first_up == 0 ? half : std::min(half, first_up + never_up_after_ns))) return;
  std::string text;
  for (RailId id = 0; id < rails.size(); ++id) {
    const bool early = rails[id].ready_at != 0 && now < rails[id].ready_at + never_up_after_ns;
    if (rails[id].told || early) continue;
    rails[id].told = true;
    if (link.been_up(id) || rails[id].blocked()) continue;
    if (!text.empty()) text += "; ";
    text += rails[id].name + " to " + label + " has never been up: " + describe_never_up(id);
  }
  if (!text.empty()) log_.add(LogLevel::warning, std::move(text));
}

std::string Peer::describe_start() const {
  std::string text;
  for (RailId id = 0; id < rails.size(); ++id) {
    if (!text.empty()) text += ", ";
    text += rails[id].name + " " + std::string(name_of(link.state(id)));
    if (!link.been_up(id)) text += " (" + describe_never_up(id) + ")";
  }
  return text;
}

std::string Peer::describe_rails() const {
  std::string text;
  for (RailId id = 0; id < rails.size(); ++id) {
    if (rails[id].dormant) continue;
    if (!text.empty()) text += ", ";
    text += rails[id].name + " " + std::string(name_of(link.state(id)));
    std::string why;
    const auto add = [&why](std::string_view more) {
      if (!more.empty()) why += (why.empty() ? "" : ", ") + std::string(more);
    };
    if (link.cause(id) != RailCause::none) add(name_of(link.cause(id)));
    const Verdict told = verdict(id);
    const Verdict where = told == Verdict::none ? link.verdict(id) : told;
    if (link.cause(id) != RailCause::none && where != Verdict::none) add(name_of(where));
    if (link.state(id) == RailState::connecting) add(rails[id].connect_error);
    if (!why.empty()) text += " (" + why + ")";
  }
  return text;
}

TimeNs Peer::patience(TimeNs connect_timeout) const {
  for (const RailEnd& end : rails)
    if (end.kind != RailKind::control && !end.late && !end.dormant) return connect_timeout / 2;
  return std::min(late_patience_ns, connect_timeout / 2);
}

bool Peer::is_running(RailId except) const {
  bool controlled = false;
  for (RailId id = 0; id < rails.size(); ++id) {
    if (id == except) continue;
    if (link.been_up(id) || link.connected(id)) return true;
    controlled = controlled || rails[id].kind == RailKind::control;
  }
  return !controlled;
}

void Peer::port_is_ready(RailId rail, TimeNs now) {
  RailEnd& end = rails[rail];
  // A port that comes and goes is news once.
  if (link.been_up(rail) || !end.told || end.ready_at != 0) return;
  end.ready_at = now;
  end.told = end.dormant;
}

void Peer::show(RailId rail) {
  RailEnd& end = rails[rail];
  if (!std::exchange(end.dormant, false)) return;
  enter(rail);
  end.told = false;
  end.ready_at = now_ns();
  log_.add(LogLevel::info,
           end.name + " to " + label + ": " + end.route.device + " is ready, the rail joins");
}

void Peer::swap_ports(RailId one, RailId other) {
  RailEnd& a = rails[one];
  RailEnd& b = rails[other];
  std::swap(a.route.device, b.route.device);
  std::swap(a.route.local, b.route.local);
  std::swap(a.given, b.given);
  std::swap(a.unnumbered, b.unnumbered);
  std::swap(a.ifindex, b.ifindex);
  for (const RailEnd* end : {&a, &b}) journal_.set_device(end->journal_entry, end->port());
}

std::string Peer::describe_narrow(const RailEnd& end) const {
  const int size = segment_sizes[end.narrow];
  const int headers = end.given.family == AF_INET6 ? packet_headers_v6 : packet_headers_v4;
  const IpAddress local = IpAddress::from_sockaddr(end.route.local.get()).value_or(IpAddress());
  const std::string large = end.mtu > 0 ? std::to_string(end.mtu) + " bytes" : "full size";
  return end.name + " to " + label + ": packets of " + large + " vanish between " +
         (end.route.device.empty() ? local.to_string() : end.route.device) + " and " +
         end.route.remote.text() + ", packets of " + std::to_string(size + headers) +
         " bytes pass: the rail uses segments of " + std::to_string(size) +
         " bytes; check the MTU of the whole path";
}

// A silent path may have several members, and the flow of the last connection a dead one.  Other
// losses need no rivals: many peers rejoin at once when a port comes back.
int Peer::flows(RailId rail) const {
  const bool silent = link.connected(rail) || link.cause(rail) == RailCause::dead_deadline ||
                      rails[rail].unanswered;
  return silent && rails[rail].kind != RailKind::shm ? flows_at_once : 1;
}

std::uint16_t Peer::remote_port(RailId rail, const IpAddress& remote) const {
  const RailEnd& end = rails[rail];
  const std::string& port = end.peer_names.port;
  const std::string device = port.substr(0, port.find('/'));
  if (device.empty()) return end.remote_port;
  const RailEnd* found = device == end.remote_device ? &end : nullptr;
  for (const RailEnd& other : rails) {
    if (other.remote_device != device) continue;
    if (other.remote_given == remote) return other.remote_port;
    if (found == nullptr) found = &other;  // the address has changed since the start
  }
  return found == nullptr ? end.remote_port : found->remote_port;
}

int Peer::segment(RailId rail) const { return segment_sizes[rails[rail].narrow]; }

// A path that drops large packets lets the handshake pass and loses the probe.  The connecting end
// then tries smaller segments, at the next attempt alone: an attempt without a handshake proves
// another fault.  The peer's probation may end first, and resets the connection.
void Peer::note_narrow(RailId rail, RailState from, RailState to, RailCause cause) {
  RailEnd& end = rails[rail];
  if (!connects || (end.kind != RailKind::tcp && end.kind != RailKind::control)) return;
  if (to == RailState::up && from == RailState::probation) {
    end.lost_probes = 0;
    const bool again = std::exchange(end.narrowed, end.narrow != 0);
    if (end.narrow != 0) log_.add(again ? LogLevel::info : LogLevel::warning, describe_narrow(end));
    return;
  }
  if (to != RailState::down) return;
  if (from != RailState::probation) {
    end.narrow = 0;  // the path may have changed
    return;
  }
  if (link.been_up(rail) && !end.narrowed) return;
  const bool ended_by_peer = cause == RailCause::peer_notice || cause == RailCause::socket_error;
  const bool waited = now_ns() - end.since >= lost_probe_ns;
  const bool lost =
      (cause == RailCause::probation || (ended_by_peer && waited)) && link.has_unacked_bytes(rail);
  if (cause == RailCause::peer_notice) ++end.lost_probes;
  if (!lost && end.lost_probes < most_lost_probes) return;
  end.lost_probes = 0;
  end.narrow = (end.narrow + 1) % segment_sizes.size();
}

}  // namespace r2ccl
