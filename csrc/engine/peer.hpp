// A peer process: its link and the rails that carry the link.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "connect/connections.hpp"
#include "connect/handshake.hpp"
#include "connect/verbs_connections.hpp"
#include "engine/absence.hpp"
#include "journal/journal.hpp"
#include "link/link.hpp"
#include "link/posted.hpp"
#include "rails/link_of_rails.hpp"

namespace r2ccl {

// Kinds of injected faults; the values are part of the journal.  `reset` breaks the transport once;
// the other faults last until healed.  `slow` limits the send rate of this end; `corrupt` gives
// chunks of this end wrong checksums.  Only the operating system can make `egress_refused`.
enum class Fault : std::uint8_t {
  none,
  carrier_loss,
  black_hole,
  reset,
  slow,
  corrupt,
  egress_refused,
};

[[nodiscard]] std::string_view name_of(Fault fault);  // "heal" for none
// Returns true if the fault takes the rail down.
[[nodiscard]] constexpr bool takes_down(Fault fault) {
  return fault != Fault::none && fault != Fault::slow;
}
// Parses the name of a fault; empty for an unknown name.  The deprecated names cut, drop and error
// are accepted for one more release.
[[nodiscard]] std::optional<Fault> fault_named(std::string_view name);

struct RailDescription {
  RailKind kind = RailKind::tcp;
  std::string name;            // "rail0@node1"
  std::string device;          // interface to bind to; empty: bind by address alone
  std::string local_address;   // numeric for tcp and control; unused for shm
  std::string remote_address;  // numeric for tcp and control; unix socket name of the peer for shm
  std::uint16_t remote_port = 0;
  VerbsPortName verbs;  // own port, for verbs only
  // The local address belongs to another interface (lo); the device only carries the packets.
  bool unnumbered = false;
  bool reserve = false;  // carries data only while no other data rail is UP
  // Name of the physical port or cable.  Rails with an equal name share fate; empty: independent.
  std::string unit = {};
  // Place in the order of the link's rails for small messages; see LinkOptions::distances.
  std::uint8_t distance = 0;
  bool told = false;  // the start has told why our port does not work yet
  bool late = false;  // a port of either end does not work yet
  // An end of the rail was found without an address: the rail is shown once it works.
  bool dormant = false;
  std::string remote_device = {};  // interface at the peer; empty: unknown
};

struct PeerDescription {
  std::uint32_t process = 0;
  std::string label;              // display name, for example "rank 1"
  std::vector<std::byte> secret;  // secret of the pair, equal on both ends
  std::vector<RailDescription> rails;
  bool posted = false;  // the link carries posted messages; equal on both ends
};

// A rail's end in this process.
struct RailEnd {
  RailKind kind = RailKind::tcp;
  std::string name;
  VerbsPortName verbs;
  RailRoute route;                  // addresses of the open connection, or of the last connection
  IpAddress given;                  // local address at start; none for shm
  std::string remote_device;        // the peer's port at the start; see RailDescription
  std::uint16_t remote_port = 0;    // listener of the peer's port at the start
  IpAddress remote_given;           // address of the peer's port at the start; none for shm
  bool unnumbered = false;          // see RailDescription
  TimeNs redirected_at = 0;         // time of the last or planned connect to an announced address
  int ifindex = 0;                  // interface whose events concern a rail without device name
  Fault fault = Fault::none;        // injected fault
  bool announced = false;           // a drill is announced: a healed fault is no end of the drill
  TimeNs since = 0;                 // time of the last state change
  TimeNs lost_at = 0;               // time of the last loss; 0: none
  bool was_up = false;              // the last loss ended an epoch that had been UP
  TimeNs met_at = 0;                // time of the last authenticated connection; 0: none
  std::uint8_t lost_by = no_drill;  // kind of the drill that explains the last loss
  Verdict located = Verdict::none;  // location of the fault that ended `located_epoch`
  Epoch located_epoch = 0;
  TimeNs tell_at = 0;    // the location is told then; 0: none is pending
  Epoch told_epoch = 0;  // the location of this epoch's fault is told
  std::uint32_t journal_entry = no_rail_entry;
  EndNames peer_names;        // host and port at the peer's end of the last connection
  std::string connect_error;  // why the last attempt to connect failed; empty once connected
  ConnectFault connect_fault = ConnectFault::none;  // the same as a kind; kept once connected
  std::string unit;                                 // see RailDescription
  bool own_address = false;                         // the peer's address is one of this host, too
  bool reserve = false;                             // see RailDescription; the same for the others
  bool late = false;
  bool dormant = false;
  bool told = false;         // the log has why the rail has never been up, or need not have it
  TimeNs ready_at = 0;       // first time that our late port became ready; 0: never
  std::size_t narrow = 0;    // index of the next connection's segment size; see note_narrow()
  unsigned misses = 0;       // attempts in a row, over this port, that reached no running peer
  bool unanswered = false;   // the last attempt to connect got no answer
  bool narrowed = false;     // UP with smaller segments, now or at the last time
  unsigned lost_probes = 0;  // probations in a row that the peer has ended
  int mtu = 0;               // of the path by the kernel's knowledge, in bytes; 0: unknown
  // See RailCounters; at the last replay.
  std::uint64_t withheld_chunks = 0;

  // Returns true if a fault forbids new connections.
  [[nodiscard]] bool blocked() const {
    return fault == Fault::carrier_loss || fault == Fault::black_hole;
  }
  // Interface, and RDMA device of a verbs rail: "eth0", "eth0/mlx5_0:1"; empty if unnamed.
  [[nodiscard]] std::string port() const;
};

// All functions need the engine's lock.
class Peer final : public LinkObserver, public LinkOfRails {
 public:
  Peer(const PeerDescription& description, const LinkOptions& options, Journal& journal,
       LogQueue& log, std::uint64_t jitter_seed);

  void on_rail_moved(RailId rail, RailState from, RailState to, RailCause cause) override;
  void on_replay(RailId rail, std::uint32_t chunks, bool hedge) override;
  void on_located(RailId rail, Verdict verdict) override;
  void on_injected(RailId rail) override;
  void on_drill(RailId rail, std::uint8_t kind, bool over) override;
  void on_slow(RailId rail, bool slow, double bytes_per_s) override;

  // Records a fault injected into our end of the rail, or its end.  The peer is told of a drill.
  void note_injected(RailId rail, Fault fault);
  // Announces a drill that a fault will follow; end_drill() ends the drill at both ends.
  void announce_drill(RailId rail, Fault fault, TimeNs duration);
  void end_drill(RailId rail);
  // Copies counters and states into the journal's rail table.
  void publish();
  [[nodiscard]] std::string describe_rails() const;  // "rail0@node1 DOWN (carrier_loss), …"
  // Returns true if calls may begin: a data rail is UP that is no reserve, or a reserve has been UP
  // for some time.
  [[nodiscard]] bool may_begin(TimeNs now) const;
  // Returns why a rail has never been UP: as a kind, and in words.
  [[nodiscard]] ConnectFault never_up(RailId rail) const;
  [[nodiscard]] std::string describe_never_up(RailId rail) const;
  // Logs a single warning about all rails that have never been UP, once that is news: some time
  // after the first rail of the peer came up, or at half of the connect timeout.  A rail whose port
  // became ready later is news some time after.
  void tell_never_up(TimeNs connect_timeout, TimeNs now);
  // Tells the locations of faults that have settled, once for each fault.
  void tell_located(TimeNs now);
  // Returns true if all connections have ended, and at least one of them by an orderly close of the
  // peer's kernel: a living peer ends its connections by resets, as filters do.
  [[nodiscard]] bool closed_by_peer() const;
  // The relay of the peer's node says that the peer's process has ended.
  void on_word_of_end(TimeNs now) { word_at_ = now; }
  // Returns true if a relay has said so a short time ago, and no connection contradicts.
  [[nodiscard]] bool ended_by_word(TimeNs now) const;
  // The peer's process is gone: the location of its lost rails is the peer.
  void on_process_gone(TimeNs now);
  // Returns the told location of the fault that ended the rail's epoch.
  [[nodiscard]] Verdict verdict(RailId rail) const;
  // Returns why no rail has come up, for the error of a start.
  [[nodiscard]] std::string describe_start() const;
  // Returns how long a start waits for a data rail before it goes on over the management NIC.
  [[nodiscard]] TimeNs patience(TimeNs connect_timeout) const;
  // Notes that the rail's own port works, perhaps for the first time.
  void port_is_ready(RailId rail, TimeNs now);
  // Returns true if the peer's process accepts connections, by another rail than `except`: an
  // attempt before may only be early.  Without a control rail, all rails may await a trial.
  [[nodiscard]] bool is_running(RailId except) const;
  // Enters a dormant rail into the journal and the listings.
  void show(RailId rail);
  // Exchanges the own ports of two rails that have never been UP.
  void swap_ports(RailId one, RailId other);
  // Number of connections of the rail's next attempt; see RailRoute::flows.
  [[nodiscard]] int flows(RailId rail) const;
  // Number of the peer's listener at the far end of the rail, whose connection comes from `remote`.
  // The connecting end may exchange its ports, and the handshake names the port that the rail has
  // now.  A port with several addresses has a listener at each.
  [[nodiscard]] std::uint16_t remote_port(RailId rail, const IpAddress& remote) const;
  // Segment of the rail's next connection, in bytes; 0: by the MTU of the port.
  [[nodiscard]] int segment(RailId rail) const;

  const std::uint32_t process;
  const std::string label;
  std::string host;  // name of this host, for the log; empty: unknown
  HandshakeKey key{};
  std::vector<RailEnd> rails;
  TimeNs path_refreshed = 0;
  std::optional<Absence> absence;  // evidence against the peer's process; empty before a start
  std::string refusal;  // why no rail can ever come up (another configuration); empty: none
  const bool posted;    // see PeerDescription
  std::set<ConnectionId> orphans_told;  // see Posted::orphans()
  bool started = false;
  bool begun = false;     // calls have been allowed to begin once, see Engine::connected()
  bool connects = true;   // this process connects the rails
  TimeNs started_at = 0;  // of the first connection attempts
  TimeNs first_up = 0;    // first time that a rail was UP; 0: never
  bool loss_told = true;  // the log has a line about the lost peer; true before the first rail
  bool closing = false;
  [[nodiscard]] bool in_graceful_close() const { return closing || link.peer_closed(); }
  // Returns true if a rail has brought all frames to the peer's host, the peer has closed, no rail
  // is left, or the peer has been silent for a second on all rails.
  [[nodiscard]] bool has_all_frames() const;

 private:
  // Adds the entry of the rail, and the epoch unless set.
  void note(RailId rail, JournalRecord record);
  void tell_where(RailId rail);
  void publish(RailId rail);
  void enter(RailId rail);
  void note_narrow(RailId rail, RailState from, RailState to, RailCause cause);
  [[nodiscard]] std::string describe_narrow(const RailEnd& end) const;
  [[nodiscard]] std::string shared_loss(RailId rail) const;
  [[nodiscard]] std::string ports_of(RailId rail) const;
  [[nodiscard]] static std::string drill_words(std::uint8_t kind);

  Journal& journal_;
  LogQueue& log_;
  TimeNs word_at_ = 0;  // time of the last word of the end of the peer's process; 0: none
};

}  // namespace r2ccl
