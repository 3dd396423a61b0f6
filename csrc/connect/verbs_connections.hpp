// Queue pairs of rails whose handshake is through, until they are connected.  What a device may
// take long for runs on threads of its own.
#pragma once

#include <poll.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/config.hpp"
#include "connect/connections.hpp"
#include "connect/verbs_devices.hpp"
#include "connect/verbs_exchange.hpp"
#include "drivers/ip_address.hpp"
#include "rails/verbs/session.hpp"

namespace r2ccl {

// One end of a verbs rail.
struct VerbsPortName {
  std::string device;
  std::uint8_t port = 1;
};

class VerbsConnections {
 public:
  struct Callbacks {
    std::function<void(EstablishedRail, std::unique_ptr<VerbsSession>)> connected;
    std::function<void(const EstablishedRail&, const std::string& why)> failed;
  };

  VerbsConnections(const Config& config, VerbsDevices& devices, Callbacks callbacks)
      : config_(config), devices_(devices), callbacks_(std::move(callbacks)) {}
  ~VerbsConnections();
  VerbsConnections(const VerbsConnections&) = delete;
  VerbsConnections& operator=(const VerbsConnections&) = delete;

  // One under way for the same rail is given up.  `local`: the rail's own address.
  void begin(EstablishedRail rail, bool connector, const VerbsPortName& port,
             const IpAddress& local, TimeNs now);

  // A connected one that nobody wants.
  void close(std::unique_ptr<VerbsSession> session, TimeNs now);

  // Gives one up without a word.  The epoch that it was about; 0: there was none.
  Epoch withdraw(std::uint32_t peer, RailId rail, TimeNs now);

  void add_poll_fds(std::vector<pollfd>& fds) const;
  void progress(TimeNs now);

 private:
  // What a thread does to a queue pair, and what came of it.
  struct QueuePairTask {
    std::atomic<bool> done{false};
    std::shared_ptr<VerbsDevice> device;
    std::unique_ptr<VerbsMemory> memory;  // the session's, if it had to be registered
    std::unique_ptr<VerbsQueuePair> pair;
    VerbsAddress address;
    VerbsPath path;
    std::string error;             // empty: it worked
    std::optional<bool> answered;  // said the device what its port is?
  };
  enum class Phase : std::uint8_t { creating, waiting_for_peer, connecting, finishing };
  struct Pending {
    EstablishedRail rail;
    std::unique_ptr<VerbsSession> session;
    std::unique_ptr<VerbsExchange> exchange;
    std::shared_ptr<QueuePairTask> task;
    Phase phase = Phase::creating;
    TimeNs deadline = 0;
  };
  // Given up: kept until its thread and its queue pair's fence are through.
  struct Closing {
    std::unique_ptr<VerbsSession> session;
    std::shared_ptr<QueuePairTask> task;
    TimeNs since = 0;
  };

  // True: over, one way or the other.
  bool advance(Pending& pending, TimeNs now);
  bool exchange(Pending& pending);  // false: the connection is of no use
  bool give_up(Pending& pending, const std::string& why, TimeNs now);
  void start_creating(Pending& pending, const VerbsPortName& port, const IpAddress& local,
                      TimeNs now);
  // What its thread has registered is the session's.  Empty: it is; else why not.
  static std::string take_memory(VerbsSession& session, QueuePairTask& task);
  void start_connecting(Pending& pending);

  const Config& config_;
  VerbsDevices& devices_;
  const Callbacks callbacks_;
  std::list<Pending> pending_;
  std::list<Closing> closing_;
};

}  // namespace r2ccl
