#include "drivers/link_table.hpp"

namespace r2ccl {

void LinkTable::watch(int ifindex, Events& events) {
  const auto found = entries_.find(ifindex);
  const bool reported = found != entries_.end() && watched(ifindex, found->second.state.name);
  watched_indexes_.insert(ifindex);
  if (found != entries_.end() && !reported) report_all(ifindex, found->second, events);
}

void LinkTable::watch(const std::string& name, Events& events) {
  for (const auto& [ifindex, entry] : entries_) {
    if (entry.state.name == name && !watched(ifindex, name)) report_all(ifindex, entry, events);
  }
  watched_names_.insert(name);
}

void LinkTable::set_link(int ifindex, const LinkState& state, Events& events) {
  const auto [found, is_new] = entries_.try_emplace(ifindex);
  Entry& entry = found->second;
  const bool was_watched = !is_new && watched(ifindex, entry.state.name);
  const bool is_watched = watched(ifindex, state.name);
  const bool changed = entry.state != state;
  // An interface renamed away from a watched name counts as removed.
  if (was_watched && !is_watched) events.push_back(event(LinkEventKind::removed, ifindex, entry));
  entry.state = state;
  entry.generation = generation_;
  if (!is_watched) return;
  if (!was_watched) {
    report_all(ifindex, entry, events);
  } else if (changed) {
    events.push_back(event(LinkEventKind::state, ifindex, entry));
  }
}

void LinkTable::remove_link(int ifindex, Events& events) {
  const auto found = entries_.find(ifindex);
  if (found == entries_.end()) return;
  if (watched(ifindex, found->second.state.name)) {
    events.push_back(event(LinkEventKind::removed, ifindex, found->second));
  }
  entries_.erase(found);
}

void LinkTable::add_address(int ifindex, const IpAddress& address, Events& events, int bits) {
  const auto found = entries_.find(ifindex);
  if (found == entries_.end()) return;
  const Network network{.generation = generation_, .bits = bits};
  const bool is_new = found->second.addresses.insert_or_assign(address, network).second;
  if (is_new && watched(ifindex, found->second.state.name)) {
    report_address(LinkEventKind::address_added, ifindex, found->second, address, events);
  }
}

void LinkTable::remove_address(int ifindex, const IpAddress& address, Events& events) {
  const auto found = entries_.find(ifindex);
  if (found == entries_.end() || found->second.addresses.erase(address) == 0) return;
  if (watched(ifindex, found->second.state.name)) {
    report_address(LinkEventKind::address_removed, ifindex, found->second, address, events);
  }
}

std::vector<IpAddress> LinkTable::addresses(const std::string& name) const {
  std::vector<IpAddress> found;
  for (const auto& [ifindex, entry] : entries_) {
    if (entry.state.name != name) continue;
    for (const auto& [address, network] : entry.addresses) found.push_back(address);
  }
  return found;
}

std::vector<int> LinkTable::watched_links() const {
  std::vector<int> found;
  for (const auto& [ifindex, entry] : entries_)
    if (watched(ifindex, entry.state.name)) found.push_back(ifindex);
  return found;
}

bool LinkTable::shares_network(const std::string& name, const IpAddress& other) const {
  for (const auto& [ifindex, entry] : entries_) {
    if (entry.state.name != name) continue;
    for (const auto& [address, network] : entry.addresses)
      if (address.shares_network(other, network.bits)) return true;
  }
  return false;
}

void LinkTable::begin_resync() { ++generation_; }

void LinkTable::end_resync(Events& events) {
  std::vector<int> gone;
  std::vector<std::pair<int, IpAddress>> gone_addresses;
  for (const auto& [ifindex, entry] : entries_) {
    if (entry.generation != generation_) {
      gone.push_back(ifindex);
      continue;
    }
    for (const auto& [address, network] : entry.addresses) {
      if (network.generation != generation_) gone_addresses.emplace_back(ifindex, address);
    }
  }
  for (const int ifindex : gone) remove_link(ifindex, events);
  for (const auto& [ifindex, address] : gone_addresses) remove_address(ifindex, address, events);
}

bool LinkTable::watched(int ifindex, const std::string& name) const {
  return watched_indexes_.contains(ifindex) || watched_names_.contains(name);
}

LinkEvent LinkTable::event(LinkEventKind kind, int ifindex, const Entry& entry) {
  const bool there = kind != LinkEventKind::removed;
  return {.kind = kind,
          .ifindex = ifindex,
          .name = entry.state.name,
          .carrier_up = there && entry.state.carrier_up,
          .admin_up = there && entry.state.admin_up,
          .address = {}};
}

void LinkTable::report_address(LinkEventKind kind, int ifindex, const Entry& entry,
                               const IpAddress& address, Events& events) {
  events.push_back(event(kind, ifindex, entry));
  events.back().address = address;
}

void LinkTable::report_all(int ifindex, const Entry& entry, Events& events) {
  events.push_back(event(LinkEventKind::state, ifindex, entry));
  for (const auto& [address, network] : entry.addresses) {
    report_address(LinkEventKind::address_added, ifindex, entry, address, events);
  }
}

}  // namespace r2ccl
