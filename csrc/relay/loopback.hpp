// TCP sockets at virtual addresses (127.0.0.0/8), and what the kernel tells of the sockets of this
// host: listeners, and the owner of a connection.
#pragma once

#include <netinet/in.h>
#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/errors.hpp"
#include "base/file_descriptor.hpp"

namespace r2ccl {

// An IPv4 address and port, in host byte order.
struct LoopbackEnd {
  std::uint32_t address = 0;
  std::uint16_t port = 0;
  [[nodiscard]] sockaddr_in get() const;
  [[nodiscard]] std::string text() const;  // "127.77.0.1:29500"
  friend bool operator==(const LoopbackEnd&, const LoopbackEnd&) = default;
};

// Listens without blocking.  `shared`: sets SO_REUSEADDR, so that closed connections do not stand
// in the way.
Result<FileDescriptor> listen_at(const LoopbackEnd& at, bool shared);
// Starts a connection from an address, with a port chosen by the kernel.
Result<FileDescriptor> connect_from(std::uint32_t address, const LoopbackEnd& to);
// Closes a connection so that the other end gets a reset.
void close_with_reset(FileDescriptor& socket);

// The kernel's table of TCP sockets: netlink (sock_diag), else /proc/net/tcp.  Needs no privilege.
class SocketTable {
 public:
  // Returns an error if neither source names the owner of a connection of this process.
  static Result<SocketTable> open();

  // Returns the ports with a listener of `owner` at exactly this address; wildcard listeners are
  // left out.
  Result<std::vector<std::uint16_t>> listeners(std::uint32_t address, uid_t owner);
  // Returns the user of the socket with these ends.  Empty: no open socket has these ends.
  Result<std::optional<uid_t>> owner(const LoopbackEnd& local, const LoopbackEnd& remote);

 private:
  struct Entry {
    LoopbackEnd local;
    LoopbackEnd remote;
    std::uint8_t state;
    uid_t owner;
  };
  // Returns the sockets in one of the states (bits), with these ends if given.
  Result<std::vector<Entry>> entries(std::uint32_t states, const LoopbackEnd* local,
                                     const LoopbackEnd* remote);
  Result<std::vector<Entry>> from_netlink(std::uint32_t states, const LoopbackEnd* local,
                                          const LoopbackEnd* remote);
  static Result<std::vector<Entry>> from_proc(std::uint32_t states);
  static Status read_table(const char* path, std::uint32_t states, std::vector<Entry>& found);
  Status check();

  FileDescriptor netlink_;      // invalid: /proc/net/tcp is read
  std::uint32_t sequence_ = 0;  // of the last query: the answers of an earlier query are dropped
};

}  // namespace r2ccl
