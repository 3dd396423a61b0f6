// Rail connections until they are established: listeners, connects and handshakes, all
// non-blocking.  Accepted connections with an unfinished handshake are limited in number, in bytes
// and in time.
#pragma once

#include <poll.h>

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/file_descriptor.hpp"
#include "base/log.hpp"
#include "base/units.hpp"
#include "connect/acceptor.hpp"
#include "connect/connect_fault.hpp"
#include "connect/drop_log.hpp"
#include "connect/handshake.hpp"
#include "connect/listeners.hpp"
#include "connect/rooms.hpp"
#include "drivers/socket_address.hpp"
#include "link/link_types.hpp"

namespace r2ccl {

// Ends of a rail's connection.  The socket binds to the interface `device` where permitted.
struct RailRoute {
  std::string device;
  SocketAddress local;   // always port 0
  SocketAddress remote;  // set at the connecting end only
  int segment = 0;       // largest TCP segment in bytes, both ways; 0: by the MTU of the port
  // Connections begun at once for an attempt, each from another source port; the first to connect
  // stays.  Several pass a path of several members, of which some have died.  Fewer are begun if
  // many attempts are in progress.
  int flows = 1;
};

// Starts a TCP connection along the route.  Returns an invalid descriptor on failure, with the
// cause in errno.  Source ports of even and odd flows differ in their lowest bit, in general.
[[nodiscard]] FileDescriptor begin_connect(const RailRoute& route, int flow = 0);

struct EstablishedRail {
  std::uint32_t peer = 0;
  RailId rail = 0;
  Epoch epoch = 0;
  Epoch peer_last_fenced = 0;
  FileDescriptor socket;
  FileDescriptor memory;            // shm rails: shared rings
  std::vector<std::byte> leftover;  // bytes received after the handshake
  HandshakeKey channel_key{};       // authenticates messages before the first frame
  EndNames peer_names;
};

// A failed connection attempt of this process, or an attempt of a peer with another configuration.
struct FailedConnection {
  std::uint32_t peer = 0;
  RailId rail = 0;
  Epoch answered = 0;            // epoch of an AUTH without READY; 0 = none
  std::optional<Epoch> refused;  // set if the peer refused: the peer's last fenced epoch
  std::string why;
  ConnectFault fault = ConnectFault::rejected;
  std::string final;  // reason why no attempt can succeed; empty: a retry may
};

// Not thread-safe.  Callbacks run within progress(); `failed` also within connect().
class Connections {
 public:
  struct Callbacks {
    AcceptorHandshake::FindKey find_key;
    AcceptorHandshake::Decide decide;
    std::function<void(EstablishedRail)> established;
    std::function<void(const FailedConnection&)> failed;
    // Limit for the handshake with a peer's rail, from the connect on.  The acceptor keeps a
    // connection with a valid HELLO for the longest limit.
    std::function<TimeNs(std::uint32_t peer, RailId rail)> patience;
    // Such a handshake did not end in time; at the acceptor: it ended, and took longer.
    std::function<void(std::uint32_t peer, RailId rail)> late;
  };

  Connections(const AcceptorHandshake::Self& self, TimeNs handshake_timeout,
              std::int64_t socket_buffer_bytes, Callbacks callbacks, LogQueue& log);

  // Starts a connection.  A pending connection of the same rail is replaced without a callback.  No
  // effect if the pending connection has sent AUTH already.
  void connect(const RailRoute& route, const Hello& hello, const HandshakeKey& key, TimeNs now);
  // Returns false while the limit of attempts is in progress.  An attempt counts until it ends, but
  // no longer than 1 s, or 100 ms without an answer of the peer's host.
  [[nodiscard]] bool may_connect(TimeNs now) const;
  // Makes room for the connections of another peer, one for each of its rails.
  void expect_peer(std::size_t rails) { expected_ += rails; }
  // Connections from an address of a peer have a room apart from those of strangers.
  void expect_from(const IpAddress& address) { known_.add(address); }
  void cancel(std::uint32_t peer);  // drops all own attempts to this peer silently

  void add_poll_fds(std::vector<pollfd>& fds, TimeNs now) const;
  // Returns the longest sleep of a thread that polls, in ms: at most `interval_ms`.
  [[nodiscard]] int sleep_ms(int interval_ms, TimeNs now) const;
  // Goes on with all handshakes, new ones from `arrivals`.  Returns sockets that the caller closes,
  // best without a lock.
  [[nodiscard]] std::vector<FileDescriptor> progress(TimeNs now, std::vector<Arrival> arrivals);
  // Accepts, goes on with all handshakes and closes.
  void progress(TimeNs now);
  [[nodiscard]] std::size_t pending() const { return pending_.size(); }

  Listeners listeners;
  Acceptor acceptor;  // of the thread that calls progress(); no lock is needed

 private:
  struct Pending {
    FileDescriptor socket;
    std::vector<FileDescriptor> rivals;  // see RailRoute::flows; empty once connected
    FileDescriptor memory;
    std::unique_ptr<Handshake> handshake;
    // same object as `handshake`; null at the accepting end
    ConnectorHandshake* connector = nullptr;
    std::string remote;
    TimeNs began = 0;
    TimeNs deadline = 0;
    // Accepted: time of a valid HELLO, which may be a recording; 0: none.
    TimeNs claimed = 0;
    bool connecting = false;  // connect() of the socket has not finished
    bool local = false;       // unix socket
    bool heard = false;       // some bytes were received
    Standing standing = Standing::own;
    IpAddress source;                             // see WaitingRoom
    ConnectFault fault = ConnectFault::rejected;  // if the attempt fails now
  };

  void admit(Arrival arrival, TimeNs now);
  // Goes on with connections before a valid HELLO; with many of these, once in stranger_tick_ns.
  void progress_strangers(TimeNs now);
  [[nodiscard]] static bool is_stranger(const Pending& pending) {
    return pending.standing == Standing::known || pending.standing == Standing::unknown;
  }
  // Removes an entry; its socket is left to the caller of progress().
  std::list<Pending>::iterator remove(std::list<Pending>::iterator pending);
  void claim(Pending& pending, TimeNs now);
  // Drops connections beyond the room.
  void limit(Standing standing, std::size_t most, TimeNs now);
  WaitingRoom& room(Standing standing) { return rooms_[static_cast<std::size_t>(standing)]; }
  // Advances the handshake.  Returns true once the entry is finished, successfully or not.
  bool advance(Pending& pending, TimeNs now);
  void note_late_auth(const Pending& pending, TimeNs now);
  bool connect_done(Pending& pending);
  bool flush(Pending& pending);
  bool receive(Pending& pending);
  void finish(Pending& pending);
  void give_up(Pending& pending, const std::string& why, TimeNs now);
  void tell_drop(const Pending& pending, const std::string& why, const std::string& reason,
                 TimeNs now);

  const AcceptorHandshake::Self self_;
  const TimeNs handshake_timeout_;
  const std::int64_t socket_buffer_bytes_;
  const Callbacks callbacks_;
  LogQueue& log_;
  std::list<Pending> pending_;
  DropLog drops_;
  DropLog quiet_drops_;               // of probes, port scans and repeated attempts
  TimeNs strangers_at_ = 0;           // time of the next progress of strangers
  std::array<WaitingRoom, 4> rooms_;  // by Standing
  std::vector<FileDescriptor> ended_;
  KnownSources known_;
  std::size_t expected_ = 0;  // rails of all peers that connect to this process
};

}  // namespace r2ccl
