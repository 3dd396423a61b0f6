// The sockets that rails are accepted on, and the addresses that this process's ports have now.
#pragma once

#include <poll.h>

#include <cstdint>
#include <string>
#include <vector>

#include "base/errors.hpp"
#include "base/file_descriptor.hpp"
#include "drivers/ip_address.hpp"
#include "drivers/socket_address.hpp"

namespace r2ccl {

// Keeps a rail on its own port even where the routing table prefers another.  Not permitted in
// every container; the source address then has to do.
void bind_to_device(int fd, const std::string& device);

class Listeners {
 public:
  // A listener whose address is another one now.
  struct AddressChange {
    IpAddress given;  // at start
    SocketAddress now;
  };

  // Returns the port that was bound (0 for unix sockets).
  Result<std::uint16_t> listen(const SocketAddress& address, const std::string& device);

  // Something has changed about a device; these are the addresses that it has now.  Of its
  // listeners, one that was given an address which is there listens on it; else it stays with the
  // one it has, if that is there; else it takes the first that can replace it (another one of the
  // same family and scope) and that no other listener of the device has or was given.  If there is
  // none, nothing changes.  The port stays the same.  A socket that is bound to a device stays with
  // the one that is gone, so a device that was removed and plugged in again gets new sockets.
  std::vector<AddressChange> device_changed(const std::string& device,
                                            const std::vector<IpAddress>& present,
                                            std::vector<std::string>& errors);
  // Devices with a listener that could not be opened anew.
  [[nodiscard]] std::vector<std::string> broken() const;

  // Where the port that was given this address at start listens now; null: there is no such port.
  [[nodiscard]] const SocketAddress* at(const std::string& device, const IpAddress& given) const;

  void add_poll_fds(std::vector<pollfd>& fds) const;
  template <typename Visit>
  void each_socket(Visit visit) const {
    for (const Listener& listener : listeners_)
      if (listener.socket.valid()) visit(listener.socket.get());
  }

 private:
  struct Listener {
    FileDescriptor socket;
    SocketAddress address;  // with the port
    IpAddress given;        // none: a unix socket
    std::string device;
    unsigned ifindex = 0;  // of the device, 0 if there is none
    bool failed = false;   // to open anew
  };

  static Status open(Listener& listener);
  [[nodiscard]] IpAddress choose(const Listener& listener,
                                 const std::vector<IpAddress>& present) const;

  std::vector<Listener> listeners_;
};

}  // namespace r2ccl
