#include "engine/absence.hpp"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <utility>

namespace r2ccl {

FileDescriptor connect_to(const SocketAddress& listener) {
  FileDescriptor socket = FileDescriptor::made_by(
      [&] { return ::socket(listener.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0); });
  if (!socket.valid()) return socket;
  if (::connect(socket.get(), listener.get(), listener.size) == 0 || errno == EINPROGRESS)
    return socket;
  return {};
}

bool Absence::certain(bool suspected, TimeNs now) {
  if (!suspected) {
    next_round_ = 0;
    refused_rounds_ = refused_at_once_ = 0;
    attempts_.clear();
    return false;
  }
  if (now < next_round_) return false;
  next_round_ = now + limits_.round;
  end_round();
  if (refused_rounds_ >= limits_.rounds) {
    refused_rounds_ = 0;
    return true;
  }
  begin_round();
  return false;
}

void Absence::begin_round() {
  refused_at_once_ = 0;
  for (std::size_t listener = 0; listener < listeners_; ++listener) {
    errno = 0;
    FileDescriptor socket = connect_(listener);
    if (socket.valid())
      attempts_.push_back(std::move(socket));
    else if (errno == ECONNREFUSED)
      ++refused_at_once_;
  }
}

// Unanswered attempts say nothing: the NIC may be lost.
void Absence::end_round() {
  int refused = std::exchange(refused_at_once_, 0);
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
