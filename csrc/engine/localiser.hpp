// Localises the fault of a rail by TCP connection attempts (probes).  After a fault the localiser
// probes the rail's own path.  To test each port without the other port, the localiser also probes
// from the rail's own port to the peer's other ports, and from the other own ports to the peer's
// port of the rail.  Rails to other peers on the same local port are further evidence about the
// local port.
//
// An answered probe proves that a port works.  A missing answer is evidence only if the same pair
// of ports connected before the fault.  A survey therefore records, once a minute while all rails
// are UP, which pairs of ports connect.
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

  // Starts investigations of new faults, checks probes, and reports findings to the links.
  void progress(TimeNs now);

 private:
  // A connection attempt from the NIC of one rail to the peer's NIC of another rail, closed once
  // established.
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
  // Knowledge of the network to a peer.
  struct Reachability {
    std::vector<std::uint64_t> reached;  // by own rail; bit r: reached the peer's NIC of rail r
    std::vector<Probe> probes;           // probes of the survey in progress
    // Next pair of NICs to survey: index of the own rail times rail count, plus the peer's rail.
    std::size_t next = 0;
    TimeNs begun_at = 0;
    std::map<RailId, Investigation> investigations;
  };

  [[nodiscard]] static Probe ask(const Peer& peer, RailId from, RailId to, TimeNs now);
  static bool advance(std::vector<Probe>& probes);
  void survey(Peer& peer, Reachability& reachability, TimeNs now);
  [[nodiscard]] static Investigation open(const Peer& peer, const Reachability& reachability,
                                          RailId rail, TimeNs now);
  [[nodiscard]] Findings conclude(const Peer& peer, RailId rail, const Investigation& of) const;
  // Judges the local port by rails to other peers over the same port.  Returns works if such a rail
  // was heard after `since`; broken if none was heard since, but some shortly before; else unknown.
  [[nodiscard]] PortEvidence ask_other_peers(const Peer& peer, RailId rail, TimeNs since) const;

  Peers& peers_;
  std::map<std::uint32_t, Reachability> reachability_;
};

}  // namespace r2ccl
