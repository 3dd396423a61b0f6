// A link with the rails that carry it: all that a process does for one peer, apart from opening
// connections.  The engine runs it over sockets, the simulator over its own transports.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "link/link.hpp"
#include "rails/rail.hpp"

namespace r2ccl {

class CarriedLink {
 public:
  CarriedLink(const LinkOptions& options, std::span<const RailKind> kinds,
              std::uint64_t jitter_seed)
      : link(options, kinds, jitter_seed), ends(kinds.size()) {}

  // Takes in what has arrived, on the rail that data comes by or on all.  True: something has.
  bool receive(TimeNs now, bool all_rails);
  // Hands what the link has to the rails, until they take no more for now.
  void send(TimeNs now);
  // Carries out what the link asks for.  Connections are for the owner to open, at connect_at.
  void act(TimeNs now);
  // Judges time, after everything that has arrived was taken in.
  void tick(TimeNs now, bool refresh_paths);

  // As Rail::detach, of all rails.
  [[nodiscard]] bool detach(const DetachScope& scope, TimeNs now);

  // What to offer to a connector that says it has fenced every epoch up to `fenced`; empty: no
  // epoch can begin now.  `fresh`: it says so now, so an epoch still open here has ended.
  [[nodiscard]] std::optional<Epoch> offer(RailId rail, Epoch fenced, bool fresh, TimeNs now);
  // A connection passed its handshake.  True: the epoch begins; carry() must follow.
  [[nodiscard]] bool begin_epoch(RailId rail, Epoch epoch, TimeNs now);
  void carry(RailId rail, std::unique_ptr<Rail> by, TimeNs now);
  // A connection came to nothing.  `answered`: the epoch that the acceptor may take for open, or 0;
  // `refused`: the peer's process refused it, having fenced up to this epoch.
  void connect_failed(RailId rail, Epoch answered, std::optional<Epoch> refused, TimeNs now);

  // A fault of drills: what this rail sends is held to so many bytes per second; 0: no more.
  void limit(RailId rail, double bytes_per_s);

  struct End {
    std::unique_ptr<Rail> rail;     // while an epoch is open
    std::unique_ptr<Rail> fencing;  // ended, not fenced yet
    TimeNs connect_at = 0;          // 0: no attempt is due
    double limit = 0;               // bytes per second, of a drill; 0: none
    TimeNs next_out = 0;            // when the limit lets it send again
  };

  Link link;
  std::vector<End> ends;

 private:
  void fence(TimeNs now);
  bool pump_out(RailId id, TimeNs now);
};

}  // namespace r2ccl
