// Finds out whether the process of a peer is gone, while no rail to the peer is up.  A host that is
// there refuses connections to the listeners of a process that has ended; a lost NIC or a lost host
// does not answer.
#pragma once

#include <cstddef>
#include <functional>
#include <utility>
#include <vector>

#include "base/file_descriptor.hpp"
#include "base/units.hpp"
#include "drivers/socket_address.hpp"

namespace r2ccl {

// Starts a connection to a listener.  Returns an invalid descriptor on failure, with the cause in
// errno.
using ConnectTo = std::function<FileDescriptor(std::size_t listener)>;
// Returns the connects from any address of this host.
[[nodiscard]] ConnectTo connect_to(std::vector<SocketAddress> listeners);

class Absence {
 public:
  // With the defaults, an outage shorter than 0.5 s causes no connects, and a dead process is
  // certain after 1.5 s.
  struct Limits {
    TimeNs first_after = 500 * ns_per_ms;
    TimeNs round = 250 * ns_per_ms;
    int rounds = 4;
  };

  Absence(std::size_t listeners, ConnectTo connect, const Limits& limits)
      : listeners_(listeners), connect_(std::move(connect)), limits_(limits) {}

  // Returns true once the process is gone: several rounds of connects were refused, and none was
  // accepted since.  `railless`: no rail to the peer is up.
  [[nodiscard]] bool certain(bool railless, TimeNs now);
  // Returns true while rounds of connects go on.
  [[nodiscard]] bool probing() const { return railless_since_ != 0; }

 private:
  void begin_round();
  void end_round();

  const std::size_t listeners_;
  const ConnectTo connect_;
  const Limits limits_;
  std::vector<FileDescriptor> attempts_;
  TimeNs railless_since_ = 0;
  TimeNs next_round_ = 0;
  int refused_at_once_ = 0;  // connects of the round refused by connect() itself
  int refused_rounds_ = 0;
};

}  // namespace r2ccl
