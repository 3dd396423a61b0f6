// Table of the known interfaces.  The table decides which changes become events.
// NetlinkLinkMonitor and FakeLinkMonitor share the table, so both report alike.  Pure: no system
// calls.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "drivers/link_monitor.hpp"

namespace r2ccl {

struct LinkState {
  std::string name;
  bool carrier_up = false;
  bool admin_up = false;

  friend bool operator==(const LinkState&, const LinkState&) = default;
};

// Every function appends the resulting events to `events`.
class LinkTable {
 public:
  using Events = std::vector<LinkEvent>;

  void watch(int ifindex, Events& events);
  void watch(const std::string& name, Events& events);

  void set_link(int ifindex, const LinkState& state, Events& events);
  void remove_link(int ifindex, Events& events);
  // Addresses of unknown interfaces are ignored.  `bits`: length of the network's prefix; 0:
  // unknown.
  void add_address(int ifindex, const IpAddress& address, Events& events, int bits = 0);
  void remove_address(int ifindex, const IpAddress& address, Events& events);

  // Returns the addresses of the interface in ascending order.
  [[nodiscard]] std::vector<IpAddress> addresses(const std::string& name) const;
  // Returns the indexes of the known interfaces that are watched.
  [[nodiscard]] std::vector<int> watched_links() const;
  // Returns true if the interface has an address in one network with `other`.
  [[nodiscard]] bool shares_network(const std::string& name, const IpAddress& other) const;

  // Between begin_resync() and end_resync(), the caller sets or adds everything that exists.
  // end_resync() removes the rest.
  void begin_resync();
  void end_resync(Events& events);

 private:
  struct Network {
    std::uint64_t generation = 0;  // resync that last saw the address
    int bits = 0;                  // length of the prefix; 0: unknown
  };
  struct Entry {
    LinkState state;
    std::uint64_t generation = 0;  // resync that last saw the interface
    std::map<IpAddress, Network> addresses;
  };

  [[nodiscard]] bool watched(int ifindex, const std::string& name) const;
  static LinkEvent event(LinkEventKind kind, int ifindex, const Entry& entry);
  static void report_address(LinkEventKind kind, int ifindex, const Entry& entry,
                             const IpAddress& address, Events& events);
  static void report_all(int ifindex, const Entry& entry, Events& events);

  std::map<int, Entry> entries_;
  std::set<int> watched_indexes_;
  std::set<std::string, std::less<>> watched_names_;
  std::uint64_t generation_ = 0;
};

}  // namespace r2ccl
