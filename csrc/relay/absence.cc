#include "relay/absence.hpp"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>

namespace r2ccl {
namespace {

// An outage shorter than this causes no connects.  With the rounds, a dead process is certain after
// 1.5 s.
constexpr TimeNs first_after_ns = 500 * ns_per_ms;
constexpr TimeNs round_ns = 250 * ns_per_ms;
constexpr int certain_rounds = 4;

}  // namespace

bool Absence::certain(bool railless, TimeNs now) {
  if (!railless) {
    railless_since_ = 0;
    refused_rounds_ = refused_at_once_ = 0;
    attempts_.clear();
    return false;
  }
  if (railless_since_ == 0) {
    railless_since_ = now;
    next_round_ = now + first_after_ns;
  }
  if (now < next_round_) return false;
  next_round_ = now + round_ns;
  end_round();
  if (refused_rounds_ >= certain_rounds) return true;
  begin_round();
  return false;
}

void Absence::begin_round() {
  refused_at_once_ = 0;
  for (const SocketAddress& listener : listeners_) {
    FileDescriptor socket = FileDescriptor::made_by(
        [&] { return ::socket(listener.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0); });
    if (!socket.valid()) continue;
    if (::connect(socket.get(), listener.get(), listener.size) == 0 || errno == EINPROGRESS)
      attempts_.push_back(std::move(socket));
    else if (errno == ECONNREFUSED)
      ++refused_at_once_;
  }
}

// Unanswered attempts say nothing: the NIC may be lost.
void Absence::end_round() {
  int refused = refused_at_once_;
  int accepted = 0;
  for (const FileDescriptor& attempt : attempts_) {
    pollfd state{attempt.get(), POLLOUT, 0};
    if (::poll(&state, 1, 0) <= 0) continue;
    int error = 0;
    socklen_t size = sizeof(error);
    ::getsockopt(attempt.get(), SOL_SOCKET, SO_ERROR, &error, &size);
    if (error == 0) ++accepted;
    if (error == ECONNREFUSED) ++refused;
  }
  attempts_.clear();
  if (accepted > 0)
    refused_rounds_ = 0;
  else if (refused > 0)
    ++refused_rounds_;
}

}  // namespace r2ccl
