// Preloaded into a program: its TCP sockets become MPTCP sockets.
//
// As `mptcpize run` does, and one thing more, without which gloo does not start: it asks for
// SO_REUSEADDR of connections that it has accepted, which means nothing there, and which Linux
// refuses for MPTCP with EINVAL.

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
