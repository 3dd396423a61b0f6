// States of a rail, the causes that end an epoch, and the one function that says which moves exist.
#pragma once

#include <cstdint>
#include <string_view>

namespace r2ccl {

enum class RailKind : std::uint8_t { tcp = 0, shm = 1, control = 2, verbs = 3, sim = 4 };

enum class RailState : std::uint8_t { connecting, probation, up, suspect, down, fencing };

// What was detected first; the log line and the journal print this, never a later guess.
enum class RailCause : std::uint8_t {
  none,
  carrier_loss,      // the own port lost its carrier
  socket_error,      // the rail's transport failed (reset, closed, unreachable)
  peer_notice,       // the peer gave the rail up first
  dead_deadline,     // silent for longer than the dead deadline while another rail answered
  protocol,          // a frame that no correct peer sends
  probation,         // the probe of a new epoch was not answered
  injected,          // a fault injected on purpose
  checksum,          // a chunk's bytes are not those that were sent
  recalled,          // given up so that it stops reading a caller's memory
  completion_error,  // a queue pair's request ended with an error
  device_loss,       // the port is gone, or a device failed or refused what it was asked for
  address_loss,      // the own port lost its address, or has another one
};

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

[[nodiscard]] std::string_view name_of(RailKind kind);
[[nodiscard]] std::string_view name_of(RailState state);
[[nodiscard]] std::string_view name_of(RailCause cause);

}  // namespace r2ccl
