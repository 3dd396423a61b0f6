// Monitor of network interfaces: carrier, administrative state, existence and addresses.  Events
// are hints; a rail without events learns of a fault by its deadlines.  The kernel may delay an
// event by up to 1 s, so correctness must not depend on events.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "drivers/ip_address.hpp"

namespace r2ccl {

enum class LinkEventKind : std::uint8_t {
  state,          // new carrier_up and admin_up
  removed,        // interface gone, renamed or in another namespace, with its addresses
  address_added,  // usable now; IPv6: after duplicate address detection
  address_removed,
};

struct LinkEvent {
  LinkEventKind kind = LinkEventKind::state;
  int ifindex = 0;
  std::string name;
  bool carrier_up = false;  // also false while administratively down
  bool admin_up = false;
  IpAddress address;  // address events only
};

// Not thread-safe.
class LinkMonitor {
 public:
  using Callback = std::function<void(const LinkEvent&)>;

  virtual ~LinkMonitor() = default;

  // Watches an interface.  The next poll() reports its current state and addresses.  An index
  // denotes one device; a name also covers a later device with the same name.
  virtual void watch(int ifindex) = 0;
  virtual void watch(const std::string& name) = 0;

  // Returns the usable addresses of the device `name` as of the last poll(), in ascending order.
  [[nodiscard]] virtual std::vector<IpAddress> addresses(const std::string& name) const = 0;

  // Returns true if the device `name` has an address in one network with `other`.
  [[nodiscard]] virtual bool shares_network(const std::string& name,
                                            const IpAddress& other) const = 0;

  // Returns a descriptor that is readable (level-triggered) while poll() has input.
  [[nodiscard]] virtual int fd() const = 0;

  // Reports the changes in order, without waiting for an event.  Call poll() when fd() is readable,
  // after watch(), and about once per second.  The periodic call repeats reads that failed for lack
  // of kernel memory.  The callback may call watch().
  virtual void poll(const Callback& callback) = 0;
};

}  // namespace r2ccl
