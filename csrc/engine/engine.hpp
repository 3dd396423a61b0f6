// The engine of a process: its peers, the progress of all links, and a background thread.  The
// background thread makes progress while no thread is in a collective.  Thread-safe.
#pragma once

#include <poll.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/config.hpp"
#include "base/fork.hpp"
#include "base/log.hpp"
#include "connect/connections.hpp"
#include "connect/verbs_devices.hpp"
#include "drivers/link_monitor.hpp"
#include "engine/localiser.hpp"
#include "engine/peer.hpp"
#include "engine/short_of_cpu.hpp"
#include "journal/journal.hpp"
#include "link/posted.hpp"

namespace r2ccl {

// Job field of every handshake.  The value is constant, since pair keys keep jobs apart.
inline constexpr std::uint64_t job_number = 0x7232'7365'7276'6531;

// A round of a polling loop takes less than this, unless its thread does not run.
inline constexpr TimeNs round_limit_ns = 5 * ns_per_ms;

class Communicator;
class EngineChannel;
class PostedChannel;
class PostedReceiver;
class PostedSender;

class Engine {
 public:
  struct ListenSpec {
    RailKind kind = RailKind::tcp;
    std::string device;
    std::string address;  // shm: name of an abstract unix socket
  };

  // Creates an engine and starts the background thread.  `process` is a number above 0, unique in
  // the job; of two peers the process with the lower number accepts connections.  Call create() in
  // the network namespace of the rails.  `monitor` and `verbs` replace the system's devices in
  // tests.
  static Result<std::shared_ptr<Engine>> create(const Config& config, std::uint32_t process,
                                                std::unique_ptr<LinkMonitor> monitor = nullptr,
                                                std::shared_ptr<VerbsDriver> verbs = nullptr);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Listens for rails and returns the TCP port; 0 for shm.  Call listen() before describing the
  // port to peers.
  Result<std::uint16_t> listen(const ListenSpec& spec);
  // Opens an RDMA port.  Call open_verbs() before add_peer() with a rail of this port.  Returns an
  // error if verbs rails of the port cannot work.
  Status open_verbs(const VerbsPortName& port);
  // Adds the link to a peer, without connecting.  No effect if the peer exists.
  Status add_peer(const PeerDescription& description);
  [[nodiscard]] bool has_peer(std::uint32_t process);
  // The relay of a peer's node says that the peer's process has ended.  The word counts if all
  // connections to the peer end, too.  No effect for an unknown peer.
  void on_word_of_end(std::uint32_t process);
  // Opens the rails to peers and waits until each peer has a data rail UP, at most timeout_s.  Each
  // peer must add this process in time: until then, a peer rejects the connections.  Returns
  // timeout if a peer has no data rail UP in time, and invalid_argument if a peer has another
  // configuration.  `option`: name of timeout_s in the error.
  Status connect(const std::vector<std::uint32_t>& peers, double timeout_s,
                 const std::string& option = "connect_timeout_s (R2CCL_CONNECT_TIMEOUT_S)");
  // Parts of connect() without a wait.  begin_connect() opens the rails to a peer.  connected()
  // returns true once calls with the peer may begin, and from then on; timeout if no data rail has
  // been UP within connect_timeout_s.
  Status begin_connect(std::uint32_t peer);
  Result<bool> connected(std::uint32_t peer);

  // Waits until everything sent is delivered (at most linger_s seconds), sends each peer a `close`
  // frame, and closes all rails.  Afterwards only queries are allowed: rails(), journal and log.
  void close(double linger_s);

  // Injects a fault into rail `rail` to the process `peer`, or into the rails of this index to all
  // peers if peer = 0.  Fault::none heals.  `bytes_per_s`: rate of Fault::slow.
  Status inject(RailId rail, Fault fault, std::uint32_t peer = 0, double bytes_per_s = 0);
  // Returns the error that inject() would return for a fault of any rail.
  [[nodiscard]] Status check_fault(Fault fault, double bytes_per_s) const;
  // Records a fault injected or healed outside of this process.
  Status note_injected(RailId rail, Fault fault, std::uint32_t peer = 0);
  // Tells the peers of a drill, before a fault is injected.  Faults may come and go until
  // end_drill(), or for `seconds`.
  Status announce_drill(RailId rail, Fault fault, double seconds, std::uint32_t peer = 0);
  Status end_drill(RailId rail, std::uint32_t peer = 0);
  // Sets `known` once all these peers have confirmed the drill, or have ended.
  Status check_drill(RailId rail, std::uint32_t peer, bool& known);

  struct RailInfo {
    std::string name, peer, device, local, remote, peer_host, peer_device;
    RailId index;
    std::uint32_t peer_engine;
    RailKind kind;
    RailState state;
    RailCause cause;
    Verdict verdict;
    bool slow;
    bool been_up;          // false and not UP: the rail has never been up; true and not UP: lost
    std::string never_up;  // reason why the rail has never been UP; empty: none, or unknown yet
    bool reserve;
    std::string unit;
    std::uint8_t drill;  // Fault of a running drill by either end; unknown_drill; 0: none
    Epoch epoch;
    TimeNs round_trip;
    double rate;  // bytes/s; 0 = unknown
    RailCounters counters;
  };
  [[nodiscard]] std::vector<RailInfo> rails();
  // Registers a caller's buffer with the RDMA devices: verbs rails then read sends from the buffer
  // and write results into the buffer without a copy.  Each call needs a matching
  // deregister_buffer().
  Status register_buffer(std::span<std::byte> buffer);
  // Registers GPU memory exported as a dma-buf.  NICs access the memory; the CPU must not touch the
  // addresses.
  Status register_dma_buf(std::span<std::byte> addresses, FileDescriptor dma_buf);
  Status deregister_buffer(const std::byte* buffer);  // buffer or dma-buf
  // Returns ok if GPUDirect reaches each of these processes: checksums are off, no rail is shared
  // memory, and at least one rail to each process is RDMA.  Else invalid_argument with the reason.
  [[nodiscard]] Status check_reach(std::span<const std::uint32_t> processes);
  // ---- streams (communicator streams_communicator); for a single owner thread ----
  // Reads the rails of every peer, calls `use` with each link, and sends.  `use` runs with the
  // engine's lock held and must not call the engine.  No effect once the engine is closed.
  using UseLink = std::function<void(std::uint32_t process, Link& link, TimeNs now)>;
  void carry_streams(const UseLink& use);
  // Appends the descriptors to poll before the next carry_streams().  Returns false if bytes or
  // room are already there: the caller must not sleep.
  [[nodiscard]] bool arm_streams(std::vector<pollfd>& fds);

  void set_label(const std::string& label);  // name in the journal, for example "rank 0"
  // Sets the name of the serving engine (vLLM) in the journal.
  void set_serving_engine(const std::string& name);
  // Returns ok while every member of the open communicators is present.  Needs no call.  peer_lost:
  // a member had no rail for link_timeout.  Other codes: a member closed, or a communicator failed.
  [[nodiscard]] Status check_members();
  // Returns a copy of the journal's contents, with the current state of all rails.
  [[nodiscard]] std::string journal_bytes();
  // Sets the number of the engine's next step; stalls are recorded with this number.
  void set_step(std::uint32_t step) { step_ = step; }
  // Returns the time that calls of all communicators lost to rail events so far, in ns.
  [[nodiscard]] std::uint64_t stalled_ns() const { return stalled_ns_; }
  [[nodiscard]] const std::string& journal_path() const { return journal_.path(); }
  // Returns the reason why the journal has no file although a folder is set; empty: none.
  [[nodiscard]] const std::string& no_journal() const { return no_journal_; }
  [[nodiscard]] LogQueue& log() { return log_; }
  [[nodiscard]] const Config& config() const { return config_; }
  [[nodiscard]] std::uint32_t process() const { return process_; }
  // Returns true in a forked child: the engine's threads and sockets belong to the parent.
  [[nodiscard]] bool foreign() const { return origin_.foreign(); }
  // Returns invalid_argument in a forked child; every call that returns a Status does the same.
  [[nodiscard]] Status check_origin() const { return origin_.check("engine"); }

 private:
  friend class Communicator;
  friend class EngineChannel;
  friend class PostedChannel;
  friend class PostedReceiver;
  friend class PostedSender;

  // The engine's lock, which protects all links.  A spinning thread calls yield() regularly, so
  // that waiting threads get the lock.
  void lock();
  // Returns false at once if the lock is held, or a thread waits for the lock.
  [[nodiscard]] bool try_lock();
  void unlock();
  void yield();  // releases the lock and the CPU for a moment
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
         std::unique_ptr<LinkMonitor> monitor, std::shared_ptr<VerbsDriver> verbs);

  // engine_progress.cc: progress of the links; all with the lock held.
  bool progress(Peer& peer, TimeNs now, bool all_rails);
  void progress_all(TimeNs now);
  void tick(TimeNs now);
  void tick_if_due(TimeNs now) {
    if (now - last_tick_ >= tick_interval_) tick(now);
  }
  void tell_loss(Peer& peer, TimeNs now);
  void watch_process(Peer& peer, TimeNs now);
  [[nodiscard]] bool proved_by_refusals(Peer& peer, TimeNs now) const;
  void take_aborts(Peer& peer);
  void end_orphans(Peer& peer);
  void on_established(EstablishedRail rail);
  [[nodiscard]] Decision decide(const Hello& hello, bool fresh);
  void start_due_connects(TimeNs now);
  [[nodiscard]] std::string absent_end(const RailEnd& end) const;
  [[nodiscard]] TimeNs patience(std::uint32_t process, RailId rail);
  void note_late(std::uint32_t process, RailId rail);
  void tell_never_up(TimeNs now);
  void on_link_event(const LinkEvent& event);

  // engine_verbs.cc: queue pairs and their devices
  void on_verbs_connected(EstablishedRail rail, std::unique_ptr<VerbsSession> session);
  void on_verbs_event(const std::string& device, const VerbsEvent& event, TimeNs now);
  void on_verbs_port(const std::string& device, std::uint8_t port, Result<VerbsPort> is,
                     TimeNs now);
  void withdraw_exchange(Peer& peer, RailId rail);
  void fence_verbs();

  // engine_addresses.cc: ports that become ready after the start
  void port_is_ready(Peer& peer, RailId rail, TimeNs now);
  void pair_anew(Peer& peer, TimeNs now);
  void pair_by_trial(Peer& peer, RailId rail);
  [[nodiscard]] bool may_exchange(const Peer& peer, RailId one, RailId other) const;
  void exchange_ports(Peer& peer, RailId one, RailId other, LogLevel level);
  [[nodiscard]] bool may_pair_anew(const Peer& peer, RailId rail) const;
  [[nodiscard]] bool fits(const RailEnd& own, const RailEnd& other) const;
  void show_if_ready(Peer& peer, RailId rail);

  // engine_addresses.cc: ports whose address changes
  void device_changed(const std::string& device, TimeNs now);
  void announce_if_moved(Peer& peer, RailId rail);
  void announce(Peer& peer, RailId rail);
  void take_addresses(Peer& peer, TimeNs now);
  // Returns the local address of the rail's next connection.
  [[nodiscard]] IpAddress local_address(const RailEnd& end) const;
  [[nodiscard]] bool address_is_gone(const RailEnd& end, const IpAddress& local) const;
  [[nodiscard]] bool came_too_late(const RailEnd& end, int socket) const;
  void note_addresses(Peer& peer, RailId rail, int socket) const;

  // Applies `act` to the peer of this process number, or to all peers with this rail index if
  // process = 0.
  template <typename Act>
  Status with_rails(RailId rail, std::uint32_t process, Act act);
  void apply_fault(Peer& peer, RailId rail, Fault fault, double bytes_per_s, TimeNs now);
  void read_fault_file(TimeNs now);
  // Waits for bytes of the peers, at most background_interval_ms; releases the lock meanwhile.
  void block(const std::vector<Peer*>& peers);
  void notify_blocked();

  void run_background();
  void run_background_round();
  void pause_background();
  void note_short_of_cpu(TimeNs late, TimeNs now);
  void fail_all(const std::string& text);  // with the lock held
  [[nodiscard]] Peer* find(std::uint32_t process);
  void start(Peer& peer, TimeNs now);  // the first connection attempts
  [[nodiscard]] Hello hello_for(const Peer& peer, RailId rail) const;
  [[nodiscard]] Status set_order(const PeerDescription& description, LinkOptions& options);

  // Connections of posted messages, by the peer's process and the number of the connection.
  using PostedKey = std::pair<std::uint32_t, ConnectionId>;

  void add_channel(EngineChannel& channel);
  void remove_channel(const EngineChannel& channel);
  // Returns invalid_argument if the communicator's name has been used, or if a limit is reached.
  [[nodiscard]] Status check_new_channel(std::uint64_t id, const std::string& name) const;
  // Keeps the channel of a released communicator until everything is delivered, a few seconds at
  // most.
  void deliver_later(std::unique_ptr<EngineChannel> channel);
  void close_delivered(TimeNs now);

  const Config config_;
  const std::uint32_t process_;
  const Origin origin_;
  const std::uint64_t fingerprint_;
  const std::string host_;  // name of this host, for peers
  const TimeNs tick_interval_;
  LogQueue log_;
  Journal journal_;
  std::string no_journal_;
  std::unique_ptr<LinkMonitor> monitor_;
  FileDescriptor wake_;      // eventfd: wakes the background thread
  FileDescriptor arrivals_;  // eventfd: another thread received data for a blocked caller

  std::mutex mutex_;
  std::atomic<int> contenders_{0};
  VerbsDevices verbs_devices_;                 // owns the memory used by the peers' links
  std::map<std::string, std::uint8_t> units_;  // number of each unit name, from 1
  std::map<std::uint32_t, std::unique_ptr<Peer>> peers_;
  std::unique_ptr<Connections> connections_;
  std::unique_ptr<VerbsConnections> verbs_connections_;
  Localiser localiser_{peers_};
  std::map<std::uint64_t, EngineChannel*> channels_;  // by communicator
  std::map<PostedKey, PostedChannel*> posted_channels_;
  struct Released {
    std::unique_ptr<EngineChannel> channel;
    TimeNs until;
  };
  std::list<Released> released_;  // communicators without an owner, until delivered
  std::map<std::uint64_t, AbortNotice> early_aborts_;  // communicators not created here yet
  TimeNs last_tick_ = 0;
  TimeNs last_monitor_poll_ = 0;
  TimeNs last_never_up_ = 0;  // last call of Peer::tell_never_up()
  ShortOfCpu short_of_cpu_;   // pauses of the background thread
  TimeNs last_fault_read_ = 0;
  std::size_t fault_file_offset_ = 0;
  int blocked_ = 0;
  bool has_stream_owner_ = false;  // a thread waits for arrivals of streams
  bool closing_ = false;
  bool closed_ = false;
  std::atomic<std::uint64_t> stalled_ns_{0};
  std::atomic<std::uint32_t> step_{0};
  std::atomic<bool> stop_{false};
  std::thread background_;
};

}  // namespace r2ccl
