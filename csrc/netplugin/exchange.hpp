// Listeners and dials of the plugin: makes the link to a peer, and opens the connection at both
// ends.  No call waits; every call makes progress for all listeners and dials of the process.
// Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/errors.hpp"
#include "base/file_descriptor.hpp"
#include "base/units.hpp"
#include "connect/listeners.hpp"
#include "drivers/socket_address.hpp"
#include "engine/engine.hpp"
#include "engine/posted_channel.hpp"
#include "netplugin/exchange_messages.hpp"
#include "netplugin/local_queue.hpp"
#include "netplugin/nics.hpp"

namespace r2ccl::net {

class Exchange {
 public:
  // Listens for rails and for exchanges on every NIC.  `key`: pre-shared by all ranks; empty: none.
  static Result<std::unique_ptr<Exchange>> open(std::shared_ptr<Engine> engine,
                                                const std::vector<Nic>& nics,
                                                const NodeIdentity& node,
                                                std::vector<std::byte> key);

  // Makes a listener of a NIC and writes the handle that senders dial.
  std::uint64_t listen(std::size_t nic, std::span<std::byte> handle);
  void close_listener(std::uint64_t listener);
  // An end of a connection: over a link, or inside the process.  Neither: none is ready, call
  // again.
  struct Incoming {
    std::unique_ptr<PostedReceiver> receiver;
    RailId home = 0;  // rail of the listener's NIC
    std::shared_ptr<LocalQueue> local;
  };
  struct Outgoing {
    std::unique_ptr<PostedSender> sender;
    std::shared_ptr<LocalQueue> local;
    [[nodiscard]] bool ready() const { return sender != nullptr || local != nullptr; }
  };
  // Returns the next connection of a listener, once its link has a rail.
  Result<Incoming> accepted(std::uint64_t listener);

  // Begins to connect to a handle, from a NIC.
  Result<std::uint64_t> dial(const Handle& handle, std::size_t nic);
  // Returns the sending end once the peer has the receiving end and the link has a rail.  After a
  // result or an error the number is gone.
  Result<Outgoing> dialled(std::uint64_t dial);

 private:
  struct Known {  // a peer
    EngineId engine;
    PairKey key;
    std::vector<std::pair<std::size_t, std::size_t>> rails;  // own NIC, the peer's NIC
  };
  struct Ready {
    std::uint32_t process;
    Incoming end;
  };
  struct Listening {
    std::size_t nic;
    std::deque<Ready> ready;
    std::set<ConnectionId> seen;  // an exchange may be repeated
  };
  struct Arrival {
    FileDescriptor socket;
    ExchangeAcceptor end;
    TimeNs deadline;
    SocketAddress remote;
    [[nodiscard]] bool stranger() const { return end.call().connection == 0; }  // no proof yet
  };
  struct Dial {
    Handle to;
    std::size_t nic;
    ConnectionId connection;
    TimeNs deadline;
    std::size_t place = 0;  // of the next attempt
    TimeNs next_attempt = 0;
    FileDescriptor socket;  // invalid: no attempt is under way
    TimeNs attempt_ends = 0;
    bool connecting = false;
    std::unique_ptr<ExchangeConnector> end;
    std::string why;  // the last attempt failed
    Outgoing made;
    bool done = false;
    Status failure;
  };

  Exchange(std::shared_ptr<Engine> engine, const std::vector<Nic>& nics, Description own,
           const Secret& secret, std::vector<std::byte> key, Listeners listeners,
           std::vector<Place> places);

  void progress(TimeNs now);
  void accept_all(TimeNs now);
  void tell_exhausted();
  void drop_stranger();
  [[nodiscard]] bool advance(Arrival& arrival, TimeNs now);
  void answer(Arrival& arrival);
  [[nodiscard]] Status open_receiver(const ExchangeAcceptor& end);
  [[nodiscard]] Result<std::uint64_t> dial_here(const Handle& handle);
  void advance(Dial& dial, TimeNs now);
  void begin_attempt(Dial& dial, TimeNs now);
  void end_attempt(Dial& dial, const std::string& why, TimeNs now);
  [[nodiscard]] Status answer(Dial& dial);
  // exchange_peers.cc
  [[nodiscard]] Result<std::optional<PairKey>> key_for(std::uint32_t process);
  [[nodiscard]] Status learn(const Description& peer, const std::optional<PairKey>& peer_key);
  [[nodiscard]] Result<PeerDescription> describe(const Description& peer, Known& known) const;
  [[nodiscard]] RailId home_of(std::uint32_t process, std::size_t nic, std::size_t peer_nic) const;

  const std::shared_ptr<Engine> engine_;
  const Description own_;
  const Secret secret_;  // of the handles
  const std::vector<std::byte> key_;
  const std::vector<Nic> nics_;
  std::mutex mutex_;  // protects all below
  Listeners listeners_;
  const std::vector<Place> places_;  // listeners of exchanges, a NIC each
  std::map<std::uint32_t, PairKey> keys_;
  std::map<std::uint32_t, Known> known_;
  std::map<std::uint64_t, Listening> listening_;
  std::list<Arrival> arrivals_;
  bool exhausted_ = false;  // no descriptor was left for an arrival, and the log tells
  std::map<std::uint64_t, Dial> dials_;
  std::uint64_t last_listener_ = 0;
  std::uint64_t last_dial_ = 0;
};

}  // namespace r2ccl::net
