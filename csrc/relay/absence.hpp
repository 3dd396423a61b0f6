// Finds out whether the process of a peer is gone, while no rail to the peer is up.  A host that is
// there refuses connections to the listeners of a process that has ended; a lost NIC or a lost host
// does not answer.
#pragma once

#include <vector>

#include "base/file_descriptor.hpp"
#include "base/units.hpp"
#include "drivers/socket_address.hpp"

namespace r2ccl {

class Absence {
 public:
  explicit Absence(std::vector<SocketAddress> listeners) : listeners_(std::move(listeners)) {}

  // Returns true once the process is gone: several rounds of connects in a row were refused, and
  // none was accepted.  `railless`: no rail to the peer is up.
  [[nodiscard]] bool certain(bool railless, TimeNs now);
  // Returns true while rounds of connects go on.
  [[nodiscard]] bool probing() const { return railless_since_ != 0; }

 private:
  void begin_round();
  void end_round();

  const std::vector<SocketAddress> listeners_;
  std::vector<FileDescriptor> attempts_;
  TimeNs railless_since_ = 0;
  TimeNs next_round_ = 0;
  int refused_at_once_ = 0;  // connects of the round refused by connect() itself
  int refused_rounds_ = 0;
};

}  // namespace r2ccl
