// Watches network interfaces: carrier, administrative state, existence and addresses.  Its events
// are hints that spare a rail the wait for its deadlines; the kernel may hold one back for up to a
// second and nothing may depend on its coming.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "drivers/ip_address.hpp"

namespace r2ccl {

enum class LinkEventKind : std::uint8_t {
  state,          // carrier_up, admin_up as they are now
  removed,        // the interface is gone (also: moved or renamed away), and all its addresses
  address_added,  // usable from now on: an IPv6 address counts only after duplicate detection
  address_removed,
};

struct LinkEvent {
  LinkEventKind kind = LinkEventKind::state;
  int ifindex = 0;
  std::string name;
  bool carrier_up = false;  // false also while the interface is administratively down
  bool admin_up = false;
  IpAddress address;  // of the address events
};

// Not for concurrent use.
class LinkMonitor {
 public:
  using Callback = std::function<void(const LinkEvent&)>;

  virtual ~LinkMonitor() = default;

  // From the next poll() on, which reports the state and addresses that the interface has.  An
  // index stays with one device; a name also follows a device that comes back under it.
  virtual void watch(int ifindex) = 0;
  virtual void watch(const std::string& name) = 0;

  // The usable addresses of the device of this name as of the last poll(), the lowest first.
  [[nodiscard]] virtual std::vector<IpAddress> addresses(const std::string& name) const = 0;

  // Readable (level-triggered) when poll() has something to read.
  [[nodiscard]] virtual int fd() const = 0;

  // Never waits for an event.  Call it when fd() is readable, after watch(), and about once a
  // second besides, which repeats what the system had no memory for.  Events come in order and only
  // when something changed; the callback may call watch().
  virtual void poll(const Callback& callback) = 0;
};

}  // namespace r2ccl
