#include "connect/acceptor.hpp"

#include <sys/resource.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/limits.hpp"

namespace r2ccl {
namespace {

// Pause of the accepts once no descriptor is left.  Without a pause, a listener stays readable, and
// the background thread would never sleep.
constexpr TimeNs exhausted_pause_ns = 100 * ns_per_ms;

}  // namespace

std::string error_text(const char* what) {
  const int error = errno;
  std::string text = std::string(what) + ": " + std::strerror(error);
  rlimit limit{};
  if (error == EMFILE && ::getrlimit(RLIMIT_NOFILE, &limit) == 0)
    text += " (limit of this process, RLIMIT_NOFILE: " + std::to_string(limit.rlim_cur) + ")";
  return text;
}

std::vector<Arrival> Acceptor::accept(std::span<const int> listeners, TimeNs now) {
  std::vector<Arrival> arrivals;
  if (now < resumes_at_) return arrivals;
  bool out_of_room = false;
  for (const int listener : listeners) {
    for (int count = 0; count < accepts_per_tick && !out_of_room; ++count) {
      SocketAddress remote;
      remote.size = sizeof(remote.storage);
      FileDescriptor socket = FileDescriptor::made_by([listener, &remote] {
        return ::accept4(listener, remote.get(), &remote.size, SOCK_NONBLOCK | SOCK_CLOEXEC);
      });
      if (!socket.valid()) {
        out_of_room = note_error(now);
        break;
      }
      exhausted_ = false;
      arrivals.push_back({std::move(socket), remote});
    }
  }
  if (arrivals.empty()) return arrivals;
  // A single connection is accepted at once; connections in a row are taken together.
  const bool in_a_row = arrivals.size() > 1 || now - last_arrival_ < 2 * stranger_tick_ns;
  if (in_a_row && !out_of_room) resumes_at_ = now + stranger_tick_ns;
  last_arrival_ = now;
  return arrivals;
}

// Called with the error of accept4() in errno.
bool Acceptor::note_error(TimeNs now) {
  if (errno != EMFILE && errno != ENFILE && errno != ENOBUFS && errno != ENOMEM) return false;
  // A flood takes each descriptor that becomes free, and so ends and begins the shortage.
  if (!exhausted_ && now >= told_until_) {
    log_.add(LogLevel::error, error_text("accept") +
                                  "; rails of peers cannot connect until "
                                  "descriptors or memory are free");
    told_until_ = now + drop_log_ns;
  }
  exhausted_ = true;
  resumes_at_ = now + exhausted_pause_ns;
  return true;
}

}  // namespace r2ccl
