// The engine of a process: its peers, the progress of all links, and the background thread that
// makes progress when nobody is in a collective.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/config.hpp"
#include "base/log.hpp"
#include "connect/connections.hpp"
#include "connect/verbs_devices.hpp"
#include "drivers/link_monitor.hpp"
#include "engine/localiser.hpp"
#include "engine/peer.hpp"
#include "journal/journal.hpp"

namespace r2ccl {

class Communicator;
class EngineChannel;

class Engine {
 public:
  struct ListenSpec {
    RailKind kind = RailKind::tcp;
    std::string device;
    std::string address;  // shm: the name of an abstract unix socket
  };

  // Starts the background thread.  `process` numbers processes within the job (any unique number);
  // of two peers the lower one accepts connections.  Call in the network namespace of the rails.
  // A monitor and RDMA devices of a test take the place of the system's.
  static Result<std::shared_ptr<Engine>> create(const Config& config, std::uint32_t process,
                                                std::unique_ptr<LinkMonitor> monitor = nullptr,
                                                std::shared_ptr<VerbsDriver> verbs = nullptr);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Returns the port.  Before the peers are told of it.
  Result<std::uint16_t> listen(const ListenSpec& spec);
  // Before a rail is described that uses it.  An error: verbs rails of the port cannot work.
  Status open_verbs(const VerbsPortName& port);
  Status add_peer(const PeerDescription& description);
  [[nodiscard]] bool has_peer(std::uint32_t process);
  // Opens the rails to peers and waits until each has a data rail UP.  When every peer knows us:
  // to one that does not, we are a stranger.
  Status connect(const std::vector<std::uint32_t>& peers, double timeout_s);

  // Sends each peer a close, lingers until what was sent is delivered (at most linger_s) and closes
  // all.
  void close(double linger_s);

  // Injects a fault into a rail of one peer (process) or, with peer = 0, of all; Fault::none heals.
  // bytes_per_s: of Fault::slow.
  Status inject(RailId rail, Fault fault, std::uint32_t peer = 0, double bytes_per_s = 0);
  // Records a fault that is injected, or healed, outside of this process.
  Status note_injected(RailId rail, Fault fault, std::uint32_t peer = 0);

  struct RailInfo {
    std::string name, peer, device, local, remote;
    RailId index;
    std::uint32_t peer_engine;
    RailKind kind;
    RailState state;
    RailCause cause;
    Verdict verdict;
    bool slow;
    Epoch epoch;
    TimeNs round_trip;
    double rate;  // bytes per second; 0: not known
    RailCounters counters;
  };
  [[nodiscard]] std::vector<RailInfo> rails();
  // Memory of a caller that RDMA devices then read themselves: what is sent from it is not copied.
  Status register_buffer(std::span<std::byte> buffer);
  // Memory of a GPU, as it was given out: NICs reach it, and the CPU touches no such address.
  Status register_dma_buf(std::span<std::byte> addresses, FileDescriptor dma_buf);
  Status deregister_buffer(const std::byte* buffer);  // of either
  // Ok: to each of these processes there are rails that have the CPU not look at what they carry.
  [[nodiscard]] Status check_reach(std::span<const std::uint32_t> processes);
  void set_label(const std::string& label);  // what the journal calls this process: "rank 0"
  [[nodiscard]] std::string journal_bytes();
  // Number of the engine's step that follows; stalls are recorded with it.
  void set_step(std::uint32_t step) { step_ = step; }
  // What rail events have cost the calls of all communicators so far, in ns.
  [[nodiscard]] std::uint64_t stalled_ns() const { return stalled_ns_; }
  [[nodiscard]] const std::string& journal_path() const { return journal_.path(); }
  [[nodiscard]] LogQueue& log() { return log_; }
  [[nodiscard]] const Config& config() const { return config_; }
  [[nodiscard]] std::uint32_t process() const { return process_; }
  // This operating-system process is a fork of the engine's: its threads are not here, and its
  // sockets are not for us.
  [[nodiscard]] bool foreign() const { return ::getpid() != pid_; }

 private:
  friend class Communicator;
  friend class EngineChannel;

  // The progress lock.  A thread that spins lets one that wants in go first.
  void lock();
  void unlock();
  void yield();  // lets waiting threads in, and other processes run
  class Lock {
   public:
    explicit Lock(Engine& engine) : engine_(engine) { engine_.lock(); }
    ~Lock() { engine_.unlock(); }
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

   private:
    Engine& engine_;
  };

  Engine(const Config& config, std::uint32_t process, Journal journal,
         std::unique_ptr<LinkMonitor> monitor, std::shared_ptr<VerbsDriver> verbs,
         FileDescriptor wake);

  // engine_progress.cc; all with the lock held.
  bool progress(Peer& peer, TimeNs now, bool all_rails);
  void progress_all(TimeNs now);
  void tick(TimeNs now);
  void tick_if_due(TimeNs now) {
    if (now - last_tick_ >= tick_interval_) tick(now);
  }
  void take_aborts(Peer& peer);
  void on_established(EstablishedRail rail);
  [[nodiscard]] Decision decide(const Hello& hello, bool fresh);
  void start_due_connects(TimeNs now);
  void on_link_event(const LinkEvent& event);

  // engine_verbs.cc: queue pairs and their devices
  void on_verbs_connected(EstablishedRail rail, std::unique_ptr<VerbsSession> session);
  void on_verbs_event(const std::string& device, const VerbsEvent& event, TimeNs now);
  void on_verbs_port(const std::string& device, std::uint8_t port, Result<VerbsPort> is,
                     TimeNs now);
  void withdraw_exchange(Peer& peer, RailId rail);
  void fence_verbs();

  // engine_addresses.cc: ports that return with another address
  void device_changed(const std::string& device, TimeNs now);
  void announce_if_moved(Peer& peer, RailId rail);
  void take_addresses(Peer& peer, TimeNs now);
  // Where a rail is to be connected from next.
  [[nodiscard]] IpAddress local_address(const RailEnd& end) const;
  [[nodiscard]] bool address_is_gone(const RailEnd& end, const IpAddress& local) const;
  [[nodiscard]] bool came_too_late(const RailEnd& end, int socket) const;
  void note_addresses(const Peer& peer, RailEnd& end, int socket) const;

  // Of one peer (process) or, with 0, of all that have such a rail.
  template <typename Act>
  Status with_rails(RailId rail, std::uint32_t process, Act act);
  void apply_fault(Peer& peer, RailId rail, Fault fault, double bytes_per_s, TimeNs now);
  void read_fault_file(TimeNs now);
  // Waits for bytes of the peers, at most one tick; releases the lock meanwhile.
  void block(const std::vector<Peer*>& peers);
  void notify_blocked();

  void run_background();
  [[nodiscard]] Peer* find(std::uint32_t process);
  [[nodiscard]] Hello hello_for(const Peer& peer, RailId rail) const;

  void add_channel(EngineChannel& channel);
  void remove_channel(EngineChannel& channel);

  const Config config_;
  const std::uint32_t process_;
  const pid_t pid_ = ::getpid();
  const std::uint64_t fingerprint_;
  const TimeNs tick_interval_;
  LogQueue log_;
  Journal journal_;
  std::unique_ptr<LinkMonitor> monitor_;
  FileDescriptor wake_;      // eventfd: the background thread is to look at once
  FileDescriptor arrivals_;  // eventfd: somebody else received what a blocked caller waits for

  std::mutex mutex_;
  std::atomic<int> contenders_{0};
  VerbsDevices verbs_devices_;  // whose memory the peers' links use
  std::map<std::uint32_t, std::unique_ptr<Peer>> peers_;
  std::unique_ptr<Connections> connections_;
  std::unique_ptr<VerbsConnections> verbs_connections_;
  Localiser localiser_{peers_};
  std::map<std::uint64_t, EngineChannel*> channels_;   // by communicator
  std::map<std::uint64_t, AbortNotice> early_aborts_;  // of communicators not made here yet
  TimeNs last_tick_ = 0;
  TimeNs last_monitor_poll_ = 0;
  TimeNs last_fault_read_ = 0;
  std::size_t fault_file_offset_ = 0;
  int blocked_ = 0;
  bool closing_ = false;
  bool closed_ = false;
  std::atomic<std::uint64_t> stalled_ns_{0};
  std::atomic<std::uint32_t> step_{0};
  std::atomic<bool> stop_{false};
  std::thread background_;
};

}  // namespace r2ccl
