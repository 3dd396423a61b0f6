// What is known of the interfaces, and which changes are worth an event.  The netlink monitor and
// its fake share it, so that both report alike.  Pure: no system call.
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

// Every function appends the events it causes to `events`.
class LinkTable {
 public:
  using Events = std::vector<LinkEvent>;

  void watch(int ifindex, Events& events);
  void watch(const std::string& name, Events& events);

  void set_link(int ifindex, const LinkState& state, Events& events);
  void remove_link(int ifindex, Events& events);
  // Ignored for interfaces that are not known.
  void add_address(int ifindex, const IpAddress& address, Events& events);
  void remove_address(int ifindex, const IpAddress& address, Events& events);

  // In ascending order.
  [[nodiscard]] std::vector<IpAddress> addresses(const std::string& name) const;

  // Between the two, everything that exists is set or added again; the rest is gone.
  void begin_resync();
  void end_resync(Events& events);

 private:
  struct Entry {
    LinkState state;
    std::uint64_t generation = 0;
    std::map<IpAddress, std::uint64_t> addresses;  // with their generation
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
