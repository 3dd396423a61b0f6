// Half of the proof that a peer's process has ended: its host refuses connections to the listeners
// of the process.  A lost NIC or a lost host does not answer.  A filter that rejects packets also
// refuses, so the other half is an orderly close (Engine::watch_process).
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
// As ConnectTo: starts a connection from any address of this host.
[[nodiscard]] FileDescriptor connect_to(const SocketAddress& listener);

class Absence {
 public:
  struct Limits {
    TimeNs round;  // time for the answers to a round of connects
    int rounds;    // refused rounds that make the end certain
  };

  Absence(std::size_t listeners, ConnectTo connect, const Limits& limits)
      : listeners_(listeners), connect_(std::move(connect)), limits_(limits) {}

  // Returns true once several rounds of connects were refused, and none was accepted since.
  // `suspected`: the peer has closed all connections; without suspicion, nothing is asked.  A proof
  // ends the count: the next suspicion asks again.
  [[nodiscard]] bool certain(bool suspected, TimeNs now);

 private:
  void begin_round();
  void end_round();

  const std::size_t listeners_;
  const ConnectTo connect_;
  const Limits limits_;
  std::vector<FileDescriptor> attempts_;
  TimeNs next_round_ = 0;    // 0: nothing is asked
  int refused_at_once_ = 0;  // connects of the round refused by connect() itself
  int refused_rounds_ = 0;
};

}  // namespace r2ccl
