// Rail connections until they are established: listeners, connects and handshakes, all
// non-blocking. Whoever reaches a port gets a bounded number of bytes, a bounded time and a bounded
// place in line.
#pragma once

#include <poll.h>

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
#include "connect/handshake.hpp"
#include "connect/listeners.hpp"
#include "drivers/socket_address.hpp"
#include "link/shape.hpp"

namespace r2ccl {

// Where a rail's connection starts and ends.  `device`: bind to this interface where permitted.
struct RailRoute {
  std::string device;
  SocketAddress local;   // port 0
  SocketAddress remote;  // only where we connect
};

// A TCP connection along the route, under way; invalid: it cannot begin, errno says why.
[[nodiscard]] FileDescriptor begin_connect(const RailRoute& route);

struct EstablishedRail {
  std::uint32_t peer = 0;
  RailId rail = 0;
  Epoch epoch = 0;
  Epoch peer_last_fenced = 0;
  FileDescriptor socket;
  FileDescriptor memory;  // shm rails: the shared rings
  std::vector<std::byte> leftover;
  HandshakeKey channel_key{};  // for what is said on the connection before frames
};

// An attempt of ours that came to nothing, or one of a peer with other settings.
struct FailedConnection {
  std::uint32_t peer = 0;
  RailId rail = 0;
  Epoch answered = 0;            // that we answered for without seeing it confirmed; 0: none
  std::optional<Epoch> refused;  // the peer refused it, having fenced up to this epoch
  std::string final;             // why no further attempt can succeed; empty: one may
};

class Connections {
 public:
  struct Callbacks {
    AcceptorHandshake::FindKey find_key;
    AcceptorHandshake::Decide decide;
    std::function<void(EstablishedRail)> established;
    std::function<void(const FailedConnection&)> failed;
  };

  Connections(const AcceptorHandshake::Self& self, TimeNs handshake_timeout,
              std::int64_t socket_buffer_bytes, Callbacks callbacks, LogQueue& log);

  // Starts a connection; one under way for the same rail is given up.
  void connect(const RailRoute& route, const Hello& hello, const HandshakeKey& key, TimeNs now);
  void cancel(std::uint32_t peer);  // gives up everything with this peer, silently

  void add_poll_fds(std::vector<pollfd>& fds) const;
  void progress(TimeNs now);
  [[nodiscard]] std::size_t pending() const { return pending_.size(); }

  Listeners listeners;

 private:
  struct Pending {
    FileDescriptor socket;
    FileDescriptor memory;
    std::unique_ptr<Handshake> handshake;
    ConnectorHandshake* connector = nullptr;  // the same object, where we connect
    std::string remote;
    TimeNs deadline = 0;
    bool connecting = false;  // the transport's own connect is not through yet
    bool local = false;       // a unix socket
    bool heard = false;       // something was received
  };

  void accept_all(TimeNs now);
  // True: the entry is finished, one way or the other.
  bool advance(Pending& pending, TimeNs now);
  bool connect_done(Pending& pending);
  bool flush(Pending& pending);
  bool receive(Pending& pending);
  void finish(Pending& pending);
  void give_up(Pending& pending, const std::string& why);

  const AcceptorHandshake::Self self_;
  const TimeNs handshake_timeout_;
  const std::int64_t socket_buffer_bytes_;
  const Callbacks callbacks_;
  LogQueue& log_;
  std::list<Pending> pending_;
  std::size_t strangers_ = 0;  // accepted entries in pending_
};

}  // namespace r2ccl
