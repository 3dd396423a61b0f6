// Queue pairs of rails between the end of the handshake and the first frame.  Slow calls of a
// device run on separate threads.  Not thread-safe; callbacks run within progress().
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

// A port of an RDMA device: one end of a verbs rail.
struct VerbsPortName {
  std::string device;
  std::uint8_t port = 1;
};

class VerbsConnections {
 public:
  struct Callbacks {
    std::function<void(EstablishedRail, std::unique_ptr<VerbsSession>)> connected;
    std::function<void(const EstablishedRail&, const std::string& why, bool late)> failed;
  };

  VerbsConnections(const Config& config, VerbsDevices& devices, Callbacks callbacks)
      : config_(config), devices_(devices), callbacks_(std::move(callbacks)) {}
  ~VerbsConnections();
  VerbsConnections(const VerbsConnections&) = delete;
  VerbsConnections& operator=(const VerbsConnections&) = delete;

  // Begins to connect a queue pair.  A pending connection attempt of the same rail is dropped
  // without a callback.  `connector`: this end sent HELLO.  `local`: the rail's own address.  The
  // attempt fails at `deadline`.
  void begin(EstablishedRail rail, bool connector, const VerbsPortName& port,
             const IpAddress& local, TimeNs now, TimeNs deadline);

  // Closes a connected queue pair without further use.
  void close(std::unique_ptr<VerbsSession> session, TimeNs now);

  // Drops a pending connection attempt without a callback.  Returns the epoch of the attempt; 0:
  // none.
  Epoch withdraw(std::uint32_t peer, RailId rail, TimeNs now);

  void add_poll_fds(std::vector<pollfd>& fds) const;
  void progress(TimeNs now);

 private:
  // Work of a thread on a queue pair, and its result.
  struct QueuePairTask {
    std::atomic<bool> done{false};
    std::shared_ptr<VerbsDevice> device;
    std::unique_ptr<VerbsMemory> memory;  // registration of the session's memory, if one was needed
    std::unique_ptr<VerbsQueuePair> pair;
    VerbsAddress address;
    VerbsPath path;
    std::string error;  // empty: success
    // set once the device has answered (true) or refused (false) the port query
    std::optional<bool> answered;
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
  // A dropped connection attempt or a closed queue pair, kept until the task's thread and the fence
  // have finished.
  struct Closing {
    std::unique_ptr<VerbsSession> session;
    std::shared_ptr<QueuePairTask> task;
    TimeNs since = 0;
  };

  // Advances the connection attempt.  Returns true once the attempt is finished, successfully or
  // not.
  bool advance(Pending& pending, TimeNs now);
  bool exchange(Pending& pending);  // false: connection unusable
  bool give_up(Pending& pending, const std::string& why, TimeNs now);
  void start_creating(Pending& pending, const VerbsPortName& port, const IpAddress& local,
                      TimeNs now);
  // Attaches the memory registered by the task's thread to the session.  Returns the error text, or
  // an empty string.
  static std::string take_memory(VerbsSession& session, QueuePairTask& task);
  void start_connecting(Pending& pending);

  const Config& config_;
  VerbsDevices& devices_;
  const Callbacks callbacks_;
  std::list<Pending> pending_;
  std::list<Closing> closing_;
};

}  // namespace r2ccl
