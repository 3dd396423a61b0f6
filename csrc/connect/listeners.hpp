// Listening sockets of the rails, and the current addresses of this process's ports.
#pragma once

#include <poll.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/errors.hpp"
#include "base/file_descriptor.hpp"
#include "drivers/ip_address.hpp"
#include "drivers/socket_address.hpp"

namespace r2ccl {

// Binds a socket to a device, so that a rail stays on its own port even if the routing table
// prefers another port.  Failures are ignored: where a container forbids the binding, the source
// address alone selects the port.
void bind_to_device(int fd, const std::string& device);

// Returns the address with the device's scope, which a link-local IPv6 address needs for bind and
// connect.  Other addresses stay unchanged, as well as all addresses of an absent device.
[[nodiscard]] SocketAddress scoped_to(const SocketAddress& address, const std::string& device);

// Ports that listeners may use.
struct PortWindow {
  std::uint16_t first = 0;  // 0: any port that the kernel chooses
  std::uint16_t last = 0;

  // Parses "40000-40050", "40000" or an empty text; returns nullopt for any other text.
  [[nodiscard]] static std::optional<PortWindow> parse(std::string_view text);
  [[nodiscard]] bool any() const { return first == 0; }
  [[nodiscard]] int count() const { return any() ? 0 : last - first + 1; }
};

class Listeners {
 public:
  // All TCP listeners take their port from `ports`.
  explicit Listeners(const PortWindow& ports = {}) : ports_(ports) {}

  // A listener that has moved to another address.
  struct AddressChange {
    IpAddress given;  // address at start
    SocketAddress now;
  };

  // Starts listening.  Returns the bound TCP port; 0 for unix sockets.  An unspecified address of a
  // device (0.0.0.0) stands for a port that is absent or has no address so far: the TCP port is
  // kept, and device_changed() listens once the device has an address.  In a window
  // of ports, takes the lowest port that is free at this address.
  Result<std::uint16_t> listen(const SocketAddress& address, const std::string& device);

  // Adapts the listeners of a changed device to its present addresses.  Returns the listeners moved
  // to another address; `errors` receives the first failure of each listener.  A listener takes the
  // first match in this order:
  //   1. the address given at start, if present
  //   2. the current address, if present
  //   3. a present address of the same family and scope, unless another listener of the device has
  //      or was given the address
  // Without a match, the listener stays unchanged.  The port never changes.  A socket bound to a
  // removed device stays with the removed device.  A device plugged in again therefore gets new
  // sockets.
  std::vector<AddressChange> device_changed(const std::string& device,
                                            const std::vector<IpAddress>& present,
                                            std::vector<std::string>& errors);
  // Returns the devices with a listener that could not be reopened.
  [[nodiscard]] std::vector<std::string> broken() const;

  // Returns true if a listener has the IP address of `remote`, apart from loopback addresses.
  [[nodiscard]] bool has(const SocketAddress& remote) const;
  // Returns the current listening address of the port with the address `given` at start, or null.
  [[nodiscard]] const SocketAddress* at(const std::string& device, const IpAddress& given) const;

  void add_poll_fds(std::vector<pollfd>& fds) const;
  template <typename Visit>
  void each_socket(Visit visit) const {
    for (const Listener& listener : listeners_)
      if (listener.socket.valid() && !listener.waits()) visit(listener.socket.get());
  }

 private:
  struct Listener {
    FileDescriptor socket;
    SocketAddress address;  // includes the port
    IpAddress given;        // address at start; AF_UNSPEC for unix sockets
    std::string device;
    unsigned ifindex = 0;  // index of the device; 0 = no device
    bool failed = false;   // reopening failed

    // Returns true while the port has no address to listen on.
    [[nodiscard]] bool waits() const {
      return !device.empty() &&
             IpAddress::from_sockaddr(address.get()).value_or(IpAddress()).is_unspecified();
    }
  };

  // `error` receives the errno of a failure.
  static Status open(Listener& listener, int& error);
  Status open_in_window(Listener& listener) const;
  [[nodiscard]] IpAddress choose(const Listener& listener,
                                 const std::vector<IpAddress>& present) const;

  PortWindow ports_;
  std::vector<Listener> listeners_;
};

}  // namespace r2ccl
