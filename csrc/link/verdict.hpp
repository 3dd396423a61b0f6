// Location of a fault, derived from the findings of both ends of a rail.
#pragma once

#include <cstdint>
#include <string_view>

namespace r2ccl {

// Knowledge about a port of a rail after the rail went DOWN.
enum class PortEvidence : std::uint8_t {
  unknown,
  works,   // other traffic passed the port after the fault
  broken,  // no carrier; or traffic passed before the fault, but not after
};

enum class Verdict : std::uint8_t {
  none,        // not known yet, or not a network fault
  local_nic,   // our NIC, cable or switch port
  remote_nic,  // the peer's NIC, cable or switch port
  path,        // between the ports: no port is known as broken, or both are
  transient,   // the path works again; only the connection was lost
  peer,        // the peer's process: all rails are silent, no port is broken
};

// Findings of this side about a fault, with the peer's report on the peer's port.
struct Findings {
  PortEvidence own = PortEvidence::unknown;
  PortEvidence peer = PortEvidence::unknown;
  bool answered = false;  // the rail's path answers
  bool complete = false;  // this side has finished its investigation
};

// Returns the verdict for the findings.  A broken port gives a verdict at once.  Otherwise the
// verdict is none until the investigation is complete.
[[nodiscard]] constexpr Verdict judge(const Findings& findings) {
  const bool own = findings.own == PortEvidence::broken;
  const bool peer = findings.peer == PortEvidence::broken;
  if (own && peer) return Verdict::path;
  if (own) return Verdict::local_nic;
  if (peer) return Verdict::remote_nic;
  if (!findings.complete) return Verdict::none;
  return findings.answered ? Verdict::transient : Verdict::path;
}

[[nodiscard]] std::string_view name_of(Verdict verdict);

}  // namespace r2ccl
