// One peer process: its link, and the connections that carry it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "connect/connections.hpp"
#include "connect/handshake.hpp"
#include "connect/verbs_connections.hpp"
#include "journal/journal.hpp"
#include "link/link.hpp"
#include "rails/carried_link.hpp"

namespace r2ccl {

// Kinds of faults that can be injected.  `reset`: the transport fails, once; the others last until
// they are healed.  `slow`: what this end sends is limited to a rate; `corrupt`: its chunks have
// wrong checksums.
enum class Fault : std::uint8_t { none, carrier_loss, black_hole, reset, slow, corrupt };

[[nodiscard]] std::string_view name_of(Fault fault);  // none: "heal"
// Old words are understood for one release: cut, drop, error.
[[nodiscard]] std::optional<Fault> fault_named(std::string_view name);

struct RailDescription {
  RailKind kind = RailKind::tcp;
  std::string name;            // "rail0@node1"
  std::string device;          // bind to this interface; empty: by address alone
  std::string local_address;   // tcp, control: numeric; shm: unused
  std::string remote_address;  // tcp, control: numeric; shm: name of the peer's unix socket
  std::uint16_t remote_port = 0;
  VerbsPortName verbs;  // of ours; verbs alone
};

struct PeerDescription {
  std::uint32_t process = 0;
  std::string label;              // for people: "rank 1"
  std::vector<std::byte> secret;  // of the pair; the same on both ends
  std::vector<RailDescription> rails;
};

// A rail's end in this process.
struct RailEnd {
  RailKind kind = RailKind::tcp;
  std::string name;
  VerbsPortName verbs;
  RailRoute route;            // with the addresses of the connection that is open, or was last
  IpAddress given;            // the local address at start; none: shm
  TimeNs redirected_at = 0;   // when an announced address last made us connect, or will
  int ifindex = 0;            // where the route names no device: whose events concern the rail
  Fault fault = Fault::none;  // injected
  TimeNs since = 0;           // when the rail came to be in its state
  std::uint32_t journal_entry = no_rail_entry;

  // No connection is to be opened.
  [[nodiscard]] bool blocked() const {
    return fault == Fault::carrier_loss || fault == Fault::black_hole;
  }
  [[nodiscard]] std::string port() const;  // "eth0", "mlx5_0:1"; empty: none is named
};

class Peer final : public LinkObserver, public CarriedLink {
 public:
  Peer(const PeerDescription& description, const LinkOptions& options, Journal& journal,
       LogQueue& log, std::uint64_t jitter_seed);

  void on_rail_moved(RailId rail, RailState from, RailState to, RailCause cause) override;
  void on_replay(RailId rail, std::uint32_t chunks, bool hedge) override;
  void on_located(RailId rail, Verdict verdict) override;
  void on_slow(RailId rail, bool slow, double bytes_per_s) override;

  void note_injected(RailId rail, Fault fault);
  // Copies counters and states into the journal's rail table.
  void publish();
  [[nodiscard]] std::string describe_rails() const;  // "rail0@node1 DOWN (carrier_loss), …"

  const std::uint32_t process;
  const std::string label;
  HandshakeKey key{};
  std::vector<RailEnd> rails;
  TimeNs path_refreshed = 0;
  std::string refusal;  // why no rail can ever come up; empty: none such
  bool started = false;
  bool closing = false;
  [[nodiscard]] bool in_graceful_close() const { return closing || link.peer_closed(); }

 private:
  void note(RailId rail, JournalRecord record);  // with its entry and epoch
  void publish(RailId rail);

  Journal& journal_;
  LogQueue& log_;
};

}  // namespace r2ccl
