// Reasons why a rail has never been UP.
#pragma once

#include <cstdint>
#include <string_view>

namespace r2ccl {

// The values are part of the journal.
enum class ConnectFault : std::uint8_t {
  none,              // the rail has been UP, or nothing is known yet
  refused,           // the peer's host refuses the connection: no listener, or a filter
  no_route,          // the own host has no route to the peer's address, or cannot use its own
  own_address,       // the peer's address is an address of this host, too
  no_answer,         // no answer to the connection or the handshake in time
  rejected,          // the connection ended within the handshake
  probe_unanswered,  // connected, but a full-size probe got no answer: an MTU too large for the
                     // path
  no_connection,     // the peer connects this rail, and no connection has arrived
};

// Returns the reason for an errno of connect() or bind().
[[nodiscard]] ConnectFault connect_fault_of(int error);
[[nodiscard]] std::string_view name_of(ConnectFault fault);

}  // namespace r2ccl
