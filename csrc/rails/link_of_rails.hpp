// A link with its rails: all work of a process for one peer except opening connections.  The engine
// runs links over sockets and RDMA, the simulator over simulated transports.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "link/link.hpp"
#include "rails/rail.hpp"

namespace r2ccl {

class LinkOfRails {
 public:
  LinkOfRails(const LinkOptions& options, std::span<const RailKind> kinds,
              std::uint64_t jitter_seed)
      : link(options, kinds, jitter_seed), ends(kinds.size()) {}

  // Reads arrived frames, from all rails or from the inbound rail alone.  Returns true if anything
  // arrived.
  bool receive(TimeNs now, bool all_rails);
  // Passes the link's pending frames to the rails until the rails accept no more.
  void send(TimeNs now);
  // Carries out the link's queued actions.  The owner opens connections, at End::connect_at.
  void act(TimeNs now);
  // Checks timers and deadlines.  Call tick() only after receive() has read every arrived frame.
  // `refresh_paths`: also read the path state of idle rails.
  void tick(TimeNs now, bool refresh_paths);

  // Calls Rail::detach() on all rails; returns true once every rail has released the memory.
  [[nodiscard]] bool detach(const DetachScope& scope, TimeNs now);

  // Returns the epoch to offer to a connector that has fenced every epoch up to `fenced`; empty if
  // no epoch can begin now.  `fresh`: the connector reports the fence now, so an epoch still open
  // here has ended.
  [[nodiscard]] std::optional<Epoch> offer(RailId rail, Epoch fenced, bool fresh, TimeNs now);
  // Begins `epoch` on a connection that has passed its handshake.  On true, carry() must follow; on
  // false, the attempt counts as failed.
  [[nodiscard]] bool begin_epoch(RailId rail, Epoch epoch, TimeNs now);
  // Hands the rail of the new epoch over and sends pending frames.
  void carry(RailId rail, std::unique_ptr<Rail> by, TimeNs now);
  // Records a failed connection attempt.  `answered`: the epoch that the acceptor may regard as
  // open, or 0.  `refused`: the peer's process refused the connection and has fenced every epoch up
  // to this number.
  void connect_failed(RailId rail, Epoch answered, std::optional<Epoch> refused, TimeNs now);

  // Limits the send rate of a rail, in bytes per second, for a drill; 0 removes the limit.
  void limit(RailId rail, double bytes_per_s);

  struct End {
    std::unique_ptr<Rail> rail;     // present while an epoch is open
    std::unique_ptr<Rail> fencing;  // rail of an ended epoch that is not fenced yet
    bool closed_by_peer = false;    // the peer's end closed the last connection in order
    TimeNs connect_at = 0;          // time of the next connection attempt; 0 = none is due
    double limit = 0;               // send rate of a drill, bytes/s; 0 = unlimited
    TimeNs next_out = 0;            // earliest time of the next send under the limit
  };

  Link link;
  std::vector<End> ends;

 private:
  void fence(TimeNs now);
  bool pump_out(RailId id, TimeNs now);
};

}  // namespace r2ccl
