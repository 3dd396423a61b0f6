// Peers of the exchange: keys of pairs, and rails.
#include <algorithm>
#include <string>

#include "netplugin/exchange.hpp"

namespace r2ccl::net {
namespace {

std::string addresses(const std::vector<RailListener>& rails) {
  std::string text;
  for (const RailListener& rail : rails)
    text += (text.empty() ? "" : ", ") + rail.place.address.to_string();
  return text;
}

}  // namespace

// Returns the key of a pair if this process makes the key: its number is lower.
Result<std::optional<PairKey>> Exchange::key_for(std::uint32_t process) {
  if (process == own_.process)
    return Status(ErrorCode::invalid_argument, "two processes of the job have drawn the number " +
                                                   std::to_string(process) +
                                                   ": start the job again");
  if (process < own_.process) return std::optional<PairKey>();
  const auto found = keys_.find(process);
  if (found != keys_.end()) return std::optional(found->second);
  PairKey key;
  R2CCL_TRY(fill_random(key));
  keys_[process] = key;
  return std::optional(key);
}

Status Exchange::learn(const Description& peer, const std::optional<PairKey>& peer_key) {
  const auto found = known_.find(peer.process);
  if (found != known_.end() && found->second.engine != peer.engine)
    return {ErrorCode::invalid_argument, "two processes of the job have drawn the number " +
                                             std::to_string(peer.process) +
                                             ": start the job again"};
  const auto own_key = keys_.find(peer.process);
  const bool peer_makes = peer.process < own_.process;
  if (peer_makes != peer_key.has_value() || (!peer_makes && own_key == keys_.end()))
    return {ErrorCode::invalid_argument, "the peer does not agree on who makes the key"};
  const PairKey& key = peer_makes ? *peer_key : own_key->second;
  if (found != known_.end()) {
    if (found->second.key == key) return {};
    return {ErrorCode::invalid_argument, "the peer has another key for this pair"};
  }
  Known known{.engine = peer.engine, .key = key, .rails = {}};
  auto description = describe(peer, known);
  if (!description.ok()) return description.take_status();
  R2CCL_TRY(engine_->add_peer(description.value()));
  known_.emplace(peer.process, std::move(known));
  return {};
}

Result<PeerDescription> Exchange::describe(const Description& peer, Known& known) const {
  PeerDescription description;
  description.process = peer.process;
  description.label = "process " + std::to_string(peer.process) + " of " + peer.host;
  description.secret.assign(known.key.begin(), known.key.end());
  description.posted = true;
  if (peer.node == own_.node) {
    description.rails.push_back({.kind = RailKind::shm,
                                 .name = "shm@" + own_.host,
                                 .device = "",
                                 .local_address = "",
                                 .remote_address = peer.shm,
                                 .verbs = {}});
    known.rails.emplace_back(0, 0);
    return description;
  }
  const auto& mine = own_.rails;
  const auto& theirs = peer.rails;
  const bool lower = own_.process < peer.process;
  for (const auto& [low, high] : lower ? pair_nics(mine, theirs) : pair_nics(theirs, mine)) {
    const std::size_t own_nic = lower ? low : high;
    const std::size_t peer_nic = lower ? high : low;
    const std::size_t rail = description.rails.size();
    description.rails.push_back(
        {.kind = RailKind::tcp,
         .name = "rail" + std::to_string(rail) + "@" + own_.host,
         .device = nics_[own_nic].device,
         .local_address = mine[own_nic].place.address.to_string(),
         .remote_address = theirs[peer_nic].place.address.to_string(),
         .remote_port = theirs[peer_nic].place.port,
         .verbs = {},
         .reserve = is_reserve(mine, own_nic) || is_reserve(theirs, peer_nic)});
    known.rails.emplace_back(own_nic, peer_nic);
  }
  if (description.rails.empty())
    return Status(ErrorCode::invalid_argument,
                  "R2CCL_RAILS: no NIC of " + own_.host + " (" + addresses(mine) +
                      ") reaches a NIC of " + peer.host + " (" + addresses(theirs) +
                      "); must have addresses of the same family and scope");
  return description;
}

// Returns the rail between two NICs, else a rail of the own NIC, else the first.
RailId Exchange::home_of(std::uint32_t process, std::size_t nic, std::size_t peer_nic) const {
  const auto& rails = known_.at(process).rails;
  auto found = std::ranges::find(rails, std::pair(nic, peer_nic));
  if (found == rails.end())
    found = std::ranges::find(rails, nic, &std::pair<std::size_t, std::size_t>::first);
  return found == rails.end() ? RailId{0} : static_cast<RailId>(found - rails.begin());
}

}  // namespace r2ccl::net
