// Finds out where a rail's fault is.  After a fault the rail's own path is asked again, and so are
// our port and the peer's apart from each other: each with the other NICs of the other side, as far
// as the network connects them, and our port by the rails to other peers that share it.
//
// What answers now proves that a port works.  That nothing does proves something only of what
// answered before, so what connects to what is asked now and then while all is well.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "base/file_descriptor.hpp"
#include "engine/peer.hpp"
#include "link/verdict.hpp"

namespace r2ccl {

class Localiser {
 public:
  using Peers = std::map<std::uint32_t, std::unique_ptr<Peer>>;
  explicit Localiser(Peers& peers) : peers_(peers) {}

  // Looks for new faults, at what was asked, and tells the links what was found.
  void progress(TimeNs now);

 private:
  // A connection from the NIC of one rail to the peer's NIC of another, closed as soon as it is
  // made.
  struct Probe {
    RailId from;
    RailId to;
    TimeNs asked_at;
    FileDescriptor socket;
    bool answered = false;
  };
  struct Investigation {
    Epoch epoch;
    TimeNs began;
    std::vector<Probe> probes;
  };
  // What is known of the network between us and a peer.
  struct Reachability {
    std::vector<std::uint64_t> reached;  // by our rail: bit r, the peer's NIC of rail r
    std::vector<Probe> probes;           // of the survey, under way: a few at a time
    std::size_t next = 0;  // which it asks next: our rail times rails, plus the peer's
    TimeNs begun_at = 0;
    std::map<RailId, Investigation> investigations;
  };

  [[nodiscard]] static Probe ask(const Peer& peer, RailId from, RailId to, TimeNs now);
  static bool advance(std::vector<Probe>& probes);
  void survey(Peer& peer, Reachability& reachability, TimeNs now);
  [[nodiscard]] static Investigation open(const Peer& peer, const Reachability& reachability,
                                          RailId rail, TimeNs now);
  [[nodiscard]] Findings conclude(const Peer& peer, RailId rail, const Investigation& of) const;
  // Whether rails to other peers that share the port are heard since; unknown: there are none.
  [[nodiscard]] PortEvidence ask_other_peers(const Peer& peer, RailId rail, TimeNs since) const;

  Peers& peers_;
  std::map<std::uint32_t, Reachability> reachability_;
};

}  // namespace r2ccl
