// Preloaded library: turns the TCP sockets of a program into MPTCP sockets.
//
// The library works like `mptcpize run`, with an addition for gloo. gloo sets SO_REUSEADDR on
// accepted connections. The option has no effect there, but Linux refuses the option for MPTCP
// with EINVAL, and gloo would not start.

#include <dlfcn.h>
#include <errno.h>
#include <netinet/in.h>
#include <sys/socket.h>

#ifndef IPPROTO_MPTCP
#define IPPROTO_MPTCP 262
#endif

namespace {

constexpr int kTypeMask = 0xf;  // the rest are SOCK_NONBLOCK and SOCK_CLOEXEC

template <typename Function>
Function next(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" int socket(int domain, int type, int protocol) noexcept {
  static const auto real = next<int (*)(int, int, int)>("socket");
  const bool stream =
      (domain == AF_INET || domain == AF_INET6) && (type & kTypeMask) == SOCK_STREAM;
  const bool tcp = stream && (protocol == 0 || protocol == IPPROTO_TCP);
  return real(domain, type, tcp ? IPPROTO_MPTCP : protocol);
}

extern "C" int setsockopt(int fd, int level, int name, const void* value,
                          socklen_t length) noexcept {
  static const auto real = next<int (*)(int, int, int, const void*, socklen_t)>("setsockopt");
  const int result = real(fd, level, name, value, length);
  if (result == -1 && errno == EINVAL && level == SOL_SOCKET && name == SO_REUSEADDR) {
    return 0;
  }
  return result;
}
