// The relay of a node: carries TCP connections between virtual addresses of a job's nodes over the
// links to the other nodes' relays.
//
// Node n has the virtual address PREFIX.(n+1) in 127.0.0.0/8.  A listener of this user at the own
// virtual address is mirrored: every other node's relay listens at the same address and port.  What
// connects there becomes a stream to the listener's node.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/errors.hpp"
#include "base/file_descriptor.hpp"
#include "base/units.hpp"
#include "engine/engine.hpp"
#include "relay/loopback.hpp"
#include "streams/stream_mux.hpp"

namespace r2ccl {

struct RelayOptions {
  struct Peer {
    std::uint32_t process = 0;
    std::uint32_t node = 0;
  };
  std::uint32_t node = 0;
  std::uint32_t prefix = 0;  // 127.x.y.0, in host byte order
  std::vector<Peer> peers;
  TimeNs link_timeout_ns = 30'000 * ns_per_ms;
  int parent = -1;  // the relay ends once the other end of this pipe is closed; -1: none
  // A peer that ends in good order takes its connections along; false: the relay ends, too.
  bool peers_may_end = false;
};

// Port at PREFIX.254 that holds the prefix for one relay of the host.
inline constexpr std::uint16_t prefix_lock_port = 29499;
[[nodiscard]] inline std::uint32_t virtual_address(std::uint32_t prefix, std::uint32_t node) {
  return prefix + node + 1;
}
inline constexpr std::uint32_t most_relay_nodes = 252;

// Holds a prefix for this process: while the descriptor is open, no other process of the host gets
// it.  Returns an error if the prefix is taken or is no 127.x.y.0 beside 127.0.*.
Result<FileDescriptor> hold_prefix(std::uint32_t prefix);
// Returns the name of the abstract unix socket at which processes of the node call SYNC.
[[nodiscard]] std::string sync_socket_name(std::uint32_t prefix, std::uint32_t node);

// Returns the time between two looks at the listeners of this node.  `unchanged`: since the last
// change.  A parent may never tell that its engine has started, so looks become rare without
// changes, too.
[[nodiscard]] TimeNs look_interval(TimeNs unchanged, bool started);

class Relay {
 public:
  // Needs peers that are added to the engine, and connected.
  static Result<std::unique_ptr<Relay>> create(std::shared_ptr<Engine> engine,
                                               const RelayOptions& options);
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;
  ~Relay();

  // Carries connections until the parent ends (ok), a peer is lost or ends, or a signal arrives.
  // After the end of the parent, the bytes that its node has sent still go to the peers.  Further
  // calls go on.
  Status run();
  // Adds a node that joins later; its engine is connected already.  Another thread may call this
  // during run().
  Status add_peer(const RelayOptions::Peer& peer);
  [[nodiscard]] std::size_t connections() const { return connections_; }  // from any thread

 private:
  struct Peer {
    Peer(const RelayOptions::Peer& described, bool even)
        : process(described.process), node(described.node), mux({.even = even}) {}
    const std::uint32_t process;
    const std::uint32_t node;
    StreamMux mux;
    bool closed = false;      // the peer's relay has said that it ends
    bool ended = false;       // its connections have ended, and the others go on
    bool awaits_ack = false;  // the link expects acknowledgements soon
    bool railless = false;
    bool gone = false;            // the engine has proof that the process has ended
    std::uint64_t delivered = 0;  // messages that the peer has acknowledged
    std::string lost;
  };
  struct Mirror {
    FileDescriptor socket;
    std::size_t peer;
    std::uint16_t port;
  };
  struct Carried {
    FileDescriptor socket;
    std::size_t peer = 0;
    StreamId stream = 0;
    bool connecting = false;
    bool read_end = false;   // our process has sent everything
    bool write_end = false;  // our process has got everything
    std::uint32_t watched = 0;
  };
  struct SyncClient {
    FileDescriptor socket;
    std::set<std::size_t> waits_for;  // peers
  };

  Relay(std::shared_ptr<Engine> engine, const RelayOptions& options, SocketTable table,
        FileDescriptor lock, FileDescriptor sync, FileDescriptor epoll, FileDescriptor wake);

  // relay.cc: the loop
  bool carry_links();
  [[nodiscard]] Status check_peers();
  void take_joining();
  void insert(const RelayOptions::Peer& peer);
  [[nodiscard]] bool parent_is_gone();
  void sleep(TimeNs now, TimeNs until);
  int serve_sockets();
  void drain();
  void on_events(std::size_t peer);

  // relay_sockets.cc: carried connections
  void carry(FileDescriptor socket, std::size_t peer, StreamId stream, bool connecting);
  void connect(std::size_t peer, StreamId stream, std::uint16_t port);
  void on_socket(int fd, std::uint32_t events);
  void read_socket(int fd, Carried& carried);
  void write_socket(int fd, Carried& carried);
  void end_writing(int fd, Carried& carried);
  void watch(int fd, Carried& carried);
  void end_connections(std::size_t peer);
  void end_reading(int fd, Carried& carried);
  void drop(int fd, bool reset_socket);
  void drop_finished();
  [[nodiscard]] int fd_of(std::size_t peer, StreamId stream) const;

  // relay_mirrors.cc: listeners and SYNC
  bool look();
  void add_mirror(std::size_t peer, std::uint16_t port);
  void remove_mirror(std::size_t peer, std::uint16_t port);
  [[nodiscard]] static FileDescriptor open_spare();
  [[nodiscard]] FileDescriptor accept_at(int listener, sockaddr* from, socklen_t* size);
  void accept_from(Mirror& mirror);
  void accept_sync();
  void on_synced(std::size_t peer, std::uint32_t token);
  void answer(std::uint32_t token);
  void log(LogLevel level, const std::string& text) { engine_->log().add(level, text); }

  const std::shared_ptr<Engine> engine_;
  const RelayOptions options_;
  const std::uint32_t own_address_;
  const uid_t user_;
  const int parent_process_;
  SocketTable table_;
  FileDescriptor lock_;
  FileDescriptor sync_;
  FileDescriptor epoll_;
  FileDescriptor wake_;   // eventfd: a node joins
  FileDescriptor spare_;  // makes room for a connection to refuse, see accept_at()
  std::mutex mutex_;      // protects the next two
  std::vector<RelayOptions::Peer> joining_;
  std::set<std::uint32_t> nodes_;
  std::vector<std::unique_ptr<Peer>> peers_;
  std::map<std::uint32_t, std::size_t> by_process_;
  std::unordered_map<int, Mirror> mirrors_;  // by descriptor
  std::unordered_map<int, Carried> carried_;
  std::atomic<std::size_t> connections_{0};  // size of carried_
  std::map<std::pair<std::size_t, StreamId>, int> by_stream_;
  std::set<int> ending_;  // connections whose process has sent and got everything
  std::set<std::uint16_t> announced_;
  std::map<std::uint16_t, std::string> refused_;  // own listeners without a mirror: where
  std::map<std::uint32_t, SyncClient> sync_clients_;
  std::uint32_t next_token_ = 1;
  TimeNs next_look_ = 0;
  TimeNs changed_ = 0;           // time of the last change of own listeners
  TimeNs asked_ = 0;             // for a signal
  bool parent_told_up_ = false;  // the engine has started: listeners are rare from now on
  std::array<std::byte, 64U << 10> buffer_{};
};

}  // namespace r2ccl
