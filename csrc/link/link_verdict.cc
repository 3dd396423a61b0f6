// Localisation of the fault that ended a rail's epoch.
#include <algorithm>

#include "link/link.hpp"

namespace r2ccl {
namespace {

constexpr std::uint32_t starts_not_located = 3;

}  // namespace

bool Link::wants_location(RailId id) const {
  const Rail& rail = rails_[id];
  if (rail.epoch == 0 || connected(id) || rail.verdict != Verdict::none) return false;
  // The first attempts of a start may fail because many ranks start at once.
  if (!rail.reconnect.been_up && rail.reconnect.failures < starts_not_located) return false;
  switch (rail.cause) {
    case RailCause::socket_error:
    case RailCause::peer_notice:
    case RailCause::dead_deadline:
    case RailCause::completion_error:
    case RailCause::probation: return true;
    case RailCause::none:
    case RailCause::carrier_loss:
    case RailCause::address_loss:
    case RailCause::protocol:
    case RailCause::injected:
    case RailCause::checksum:
    case RailCause::recalled:
    case RailCause::device_loss: return false;
  }
  return false;
}

void Link::located(RailId id, Epoch epoch, const Findings& findings) {
  Rail& rail = rails_[id];
  if (epoch != rail.epoch || connected(id)) return;
  // The peer's report on its own port overrides our findings from outside.
  const PortEvidence peer = rail.findings.peer;
  rail.findings = findings;
  if (peer != PortEvidence::unknown) rail.findings.peer = peer;
  tell_port(id);
  conclude(id);
}

// The port is lost as well, after another cause ended the epoch: perhaps the peer's notice was
// faster than this host's.
void Link::port_broken(RailId id) {
  Rail& rail = rails_[id];
  if (rail.epoch == 0 || rail.findings.own == PortEvidence::broken) return;
  rail.findings.own = PortEvidence::broken;
  tell_port(id);
  conclude(id);
}

void Link::conclude(RailId id) {
  Rail& rail = rails_[id];
  const Verdict verdict = judge(rail.findings);
  if (verdict == rail.verdict) return;
  rail.verdict = verdict;
  if (observer_ != nullptr) observer_->on_located(id, verdict);
}

// Returns local_nic or remote_nic if all data rails have this verdict, else peer.
Verdict Link::overall_verdict() const {
  if (peer_gone_) return Verdict::peer;
  const auto all = [this](Verdict verdict) {
    return std::all_of(rails_.begin(), rails_.end(), [verdict](const Rail& rail) {
      return !rail.carries_data() || rail.verdict == verdict;
    });
  };
  for (const Verdict verdict : {Verdict::local_nic, Verdict::remote_nic})
    if (all(verdict)) return verdict;
  return Verdict::peer;
}

}  // namespace r2ccl
