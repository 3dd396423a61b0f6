// States of a rail, the causes of an epoch's end, and the valid state transitions.
#pragma once

#include <cstdint>
#include <string_view>

namespace r2ccl {

// The values of these enums are part of the journal; RailKind is also part of the handshake.
enum class RailKind : std::uint8_t { tcp = 0, shm = 1, control = 2, verbs = 3, sim = 4 };

enum class RailState : std::uint8_t { connecting, probation, up, suspect, down, fencing };

// The first detected cause of an epoch's end.  Later causes do not replace this cause in log and
// journal.
enum class RailCause : std::uint8_t {
  none,
  carrier_loss,      // our port lost its carrier
  socket_error,      // the transport failed (reset, closed, unreachable)
  peer_notice,       // the peer took the rail down first
  dead_deadline,     // silent past the dead deadline, while the peer answered elsewhere
  protocol,          // the peer violated the protocol
  probation,         // no answer to the probe of a new epoch
  injected,          // an injected fault (test or drill)
  checksum,          // a chunk arrived with a wrong checksum
  recalled,          // taken down to end its access to a caller's memory
  completion_error,  // a work request completed with an error
  device_loss,       // the port was removed, or a device failed or refused a request
  address_loss,      // our port lost or changed its address
};

// Returns true for the transitions of this diagram:
//
//            CONNECTING -> PROBATION -> UP <-> SUSPECT
//                 ^            |         |        |
//                 |            v         v        v
//              FENCING <--------------- DOWN <----+
[[nodiscard]] constexpr bool may_move(RailState from, RailState to) {
  switch (from) {
    case RailState::connecting: return to == RailState::probation;
    case RailState::probation: return to == RailState::up || to == RailState::down;
    case RailState::up: return to == RailState::suspect || to == RailState::down;
    case RailState::suspect: return to == RailState::up || to == RailState::down;
    case RailState::down: return to == RailState::fencing;
    case RailState::fencing: return to == RailState::connecting;
  }
  return false;
}

// Order of use.  A rail carries data only while no rail of a lower tier is UP.  A rail is
// endangered while a rail of its unit is suspected, and for some time after the loss of such a
// rail.
enum class RailTier : std::uint8_t {
  data,
  data_endangered,
  reserve,
  reserve_endangered,
  control,
  none,  // no rail is UP
};

[[nodiscard]] std::string_view name_of(RailKind kind);
[[nodiscard]] std::string_view name_of(RailState state);
[[nodiscard]] std::string_view name_of(RailCause cause);

}  // namespace r2ccl
