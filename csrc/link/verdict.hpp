// Where a fault is, as far as the two ends of a rail can tell.
#pragma once

#include <cstdint>
#include <string_view>

namespace r2ccl {

// What is known of a port of the rail that went down.
enum class PortEvidence : std::uint8_t {
  unknown,
  works,   // something else got through it after the fault
  broken,  // it has no carrier; or nothing gets through that did before the fault
};

enum class Verdict : std::uint8_t {
  none,        // not known yet, or nothing of the network
  local_nic,   // our NIC, its cable or its switch port
  remote_nic,  // the peer's
  path,        // between them: neither port is known to be broken, or both at once
  transient,   // the path is answered again: the connection alone was lost
  peer,        // the peer's process: none of its rails is heard, and no rail is to blame
};

struct Findings {
  PortEvidence own = PortEvidence::unknown;
  PortEvidence peer = PortEvidence::unknown;
  bool answered = false;  // the rail's own path
  bool complete = false;  // nothing more will be found out on this side
};

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
