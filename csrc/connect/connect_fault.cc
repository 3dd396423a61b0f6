#include "connect/connect_fault.hpp"

#include <cerrno>

namespace r2ccl {

ConnectFault connect_fault_of(int error) {
  switch (error) {
    case 0: return ConnectFault::none;
    case ECONNREFUSED: return ConnectFault::refused;
    case ENETUNREACH:
    case EHOSTUNREACH:
    case ENETDOWN:
    case EHOSTDOWN:
    case EADDRNOTAVAIL:
    case ENODEV: return ConnectFault::no_route;
    case ETIMEDOUT: return ConnectFault::no_answer;
    default: return ConnectFault::rejected;
  }
}

std::string_view name_of(ConnectFault fault) {
  switch (fault) {
    case ConnectFault::none: return "none";
    case ConnectFault::refused: return "refused";
    case ConnectFault::no_route: return "no_route";
    case ConnectFault::own_address: return "own_address";
    case ConnectFault::no_answer: return "no_answer";
    case ConnectFault::rejected: return "rejected";
    case ConnectFault::probe_unanswered: return "probe_unanswered";
    case ConnectFault::no_connection: return "no_connection";
  }
  return "unknown";
}

}  // namespace r2ccl
