#include "link/rail_state.hpp"

#include "link/verdict.hpp"

namespace r2ccl {

std::string_view name_of(RailKind kind) {
  switch (kind) {
    case RailKind::tcp: return "tcp";
    case RailKind::shm: return "shm";
    case RailKind::control: return "control";
    case RailKind::verbs: return "verbs";
    case RailKind::sim: return "sim";
  }
  return "unknown";
}

std::string_view name_of(RailState state) {
  switch (state) {
    case RailState::connecting: return "CONNECTING";
    case RailState::probation: return "PROBATION";
    case RailState::up: return "UP";
    case RailState::suspect: return "SUSPECT";
    case RailState::down: return "DOWN";
    case RailState::fencing: return "FENCING";
  }
  return "unknown";
}

std::string_view name_of(RailCause cause) {
  switch (cause) {
    case RailCause::none: return "none";
    case RailCause::carrier_loss: return "carrier_loss";
    case RailCause::socket_error: return "socket_error";
    case RailCause::peer_notice: return "peer_notice";
    case RailCause::dead_deadline: return "dead_deadline";
    case RailCause::protocol: return "protocol";
    case RailCause::probation: return "probation";
    case RailCause::injected: return "injected";
    case RailCause::checksum: return "checksum";
    case RailCause::recalled: return "recalled";
    case RailCause::completion_error: return "completion_error";
    case RailCause::device_loss: return "device_loss";
    case RailCause::address_loss: return "address_loss";
  }
  return "unknown";
}

std::string_view name_of(Verdict verdict) {
  switch (verdict) {
    case Verdict::none: return "none";
    case Verdict::local_nic: return "local NIC";
    case Verdict::remote_nic: return "remote NIC";
    case Verdict::path: return "path";
    case Verdict::transient: return "transient";
    case Verdict::peer: return "peer";
  }
  return "unknown";
}

}  // namespace r2ccl
