#include "engine/localiser.hpp"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

namespace r2ccl {
namespace {

constexpr TimeNs answer_ns = 300 * ns_per_ms;         // time limit of a probe
constexpr TimeNs heard_lately_ns = 1500 * ns_per_ms;  // rails heard this recently are evidence
constexpr std::size_t most_probes = 4;                // concurrent probes of a survey
constexpr TimeNs survey_ns = 60'000 * ns_per_ms;      // interval between surveys

// Returns true for rails that TCP probes can test.  RoCE ports answer TCP as well.
bool asks_over(RailKind kind) { return kind == RailKind::tcp || kind == RailKind::verbs; }

bool same_port(const RailEnd& a, const RailEnd& b) {
  if (!a.route.device.empty() || !b.route.device.empty()) return a.route.device == b.route.device;
  return a.route.local.text() == b.route.local.text();
}

}  // namespace

void Localiser::progress(TimeNs now) {
  for (auto& [process, peer] : peers_) {
    if (!peer->started || peer->closing || peer->link.peer_closed() || peer->link.peer_gone()) {
      reachability_.erase(process);
      continue;
    }
    Reachability& reachability = reachability_[process];
    reachability.reached.resize(peer->rails.size());
    survey(*peer, reachability, now);
    for (RailId rail = 0; rail < peer->rails.size(); ++rail) {
      const auto found = reachability.investigations.find(rail);
      if (!asks_over(peer->rails[rail].kind) || !peer->link.wants_location(rail)) {
        if (found != reachability.investigations.end()) reachability.investigations.erase(found);
        continue;
      }
      if (found == reachability.investigations.end() ||
          found->second.epoch != peer->link.epoch(rail)) {
        reachability.investigations.insert_or_assign(rail, open(*peer, reachability, rail, now));
        continue;
      }
      Investigation& of = found->second;
      // Wait the full time even if all probes are answered: other peers are heard only once per
      // probe interval.
      (void)advance(of.probes);
      if (now - of.began < answer_ns) continue;
      peer->link.located(rail, of.epoch, conclude(*peer, rail, of));
      peer->send(now);
      reachability.investigations.erase(rail);
    }
  }
}

void Localiser::survey(Peer& peer, Reachability& reachability, TimeNs now) {
  (void)advance(reachability.probes);
  std::erase_if(reachability.probes, [&](const Probe& probe) {
    if (probe.socket.valid() && now - probe.asked_at < answer_ns) return false;
    const std::uint64_t bit = std::uint64_t{1} << probe.to;
    reachability.reached[probe.from] =
        (reachability.reached[probe.from] & ~bit) | (probe.answered ? bit : 0);
    return true;
  });
  const std::size_t rails = peer.rails.size();
  if (reachability.next == rails * rails) {
    if (!reachability.probes.empty() || now - reachability.begun_at < survey_ns) return;
    reachability.next = 0;
  }
  for (RailId rail = 0; rail < rails; ++rail)
    if (asks_over(peer.rails[rail].kind) && !peer.rails[rail].dormant &&
        peer.link.state(rail) != RailState::up)
      return;
  if (reachability.next == 0) reachability.begun_at = now;
  for (; reachability.next < rails * rails && reachability.probes.size() < most_probes;
       ++reachability.next) {
    const auto from = static_cast<RailId>(reachability.next / rails);
    const auto to = static_cast<RailId>(reachability.next % rails);
    // Without a device name a connection may use any NIC and proves nothing.
    const auto surveyed = [](const RailEnd& end) {
      return asks_over(end.kind) && !end.dormant && !end.route.device.empty();
    };
    if (from != to && surveyed(peer.rails[from]) && surveyed(peer.rails[to]))
      reachability.probes.push_back(ask(peer, from, to, now));
  }
}

Localiser::Investigation Localiser::open(const Peer& peer, const Reachability& reachability,
                                         RailId rail, TimeNs now) {
  Investigation made{.epoch = peer.link.epoch(rail), .began = now, .probes = {}};
  made.probes.push_back(ask(peer, rail, rail, now));
  for (RailId other = 0; other < peer.rails.size(); ++other) {
    if (other == rail || !peer.link.connected(other)) continue;
    if ((reachability.reached[rail] >> other & 1U) != 0)
      made.probes.push_back(ask(peer, rail, other, now));
    if ((reachability.reached[other] >> rail & 1U) != 0)
      made.probes.push_back(ask(peer, other, rail, now));
  }
  return made;
}

Localiser::Probe Localiser::ask(const Peer& peer, RailId from, RailId to, TimeNs now) {
  RailRoute route = peer.rails[from].route;
  route.remote = peer.rails[to].route.remote;
  return {
      .from = from, .to = to, .asked_at = now, .socket = begin_connect(route), .answered = false};
}

// Checks probes for answers.  Returns true while probes are in progress.
bool Localiser::advance(std::vector<Probe>& probes) {
  bool waiting = false;
  for (Probe& probe : probes) {
    if (!probe.socket.valid()) continue;
    pollfd ready{probe.socket.get(), POLLOUT, 0};
    if (::poll(&ready, 1, 0) == 0) {
      waiting = true;
      continue;
    }
    int error = 0;
    socklen_t size = sizeof(error);
    ::getsockopt(probe.socket.get(), SOL_SOCKET, SO_ERROR, &error, &size);
    // A refusal counts only on the rail's own path: a host refuses connections to any of its
    // addresses over any NIC, while a listener accepts over its own NIC alone.
    probe.answered = error == 0 || (error == ECONNREFUSED && probe.from == probe.to);
    const linger at_once{.l_onoff = 1, .l_linger = 0};
    ::setsockopt(probe.socket.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
    probe.socket.reset();
  }
  return waiting;
}

Findings Localiser::conclude(const Peer& peer, RailId rail, const Investigation& of) const {
  Findings findings{.own = ask_other_peers(peer, rail, of.began), .peer = {}, .complete = true};
  const auto ask_all = [&](bool ours, PortEvidence& port) {
    for (const Probe& probe : of.probes) {
      if ((ours ? probe.from : probe.to) != rail) continue;
      if (probe.answered) port = PortEvidence::works;
      // A failed probe of the rail's own path does not tell which end is broken.
      if (probe.from != probe.to && port == PortEvidence::unknown) port = PortEvidence::broken;
    }
  };
  ask_all(/*ours=*/true, findings.own);
  ask_all(/*ours=*/false, findings.peer);
  findings.answered = of.probes.front().answered;
  return findings;
}

PortEvidence Localiser::ask_other_peers(const Peer& peer, RailId rail, TimeNs since) const {
  PortEvidence port = PortEvidence::unknown;
  for (const auto& [process, other] : peers_) {
    // The silence of a process that has ended is no evidence of a port.
    const bool ended = other->closing || other->link.peer_closed() || other->link.peer_gone();
    if (other.get() == &peer || ended) continue;
    for (RailId id = 0; id < other->rails.size(); ++id) {
      if (!asks_over(other->rails[id].kind) || !same_port(other->rails[id], peer.rails[rail]))
        continue;
      if (other->link.connected(id) && other->link.last_heard(id) > since)
        return PortEvidence::works;
      // A rail silent since long before the fault is no evidence.
      if (since - other->link.last_heard(id) < heard_lately_ns) port = PortEvidence::broken;
    }
  }
  return port;
}

}  // namespace r2ccl
