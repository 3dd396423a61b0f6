// A byte pipe over one connected TCP socket.
#pragma once

#include <poll.h>

#include "base/file_descriptor.hpp"
#include "rails/byte_pipe.hpp"

namespace r2ccl {

// Sets the options of a rail socket: non-blocking, TCP_NODELAY, a short acknowledgement delay where
// the kernel offers the option, and the sizes of both buffers.  `socket_buffer_bytes` = 0: the
// kernel tunes the sizes.
void prepare_rail_socket(int fd, std::int64_t socket_buffer_bytes);

class TcpPipe final : public BytePipe {
 public:
  explicit TcpPipe(FileDescriptor socket) : socket_(std::move(socket)) {}

  Io write(std::span<const iovec> parts, std::size_t& bytes) override;
  Io read(std::span<const iovec> parts, std::size_t& bytes) override;
  PathReport path() override;
  void acknowledge() override;
  [[nodiscard]] int fd() const override { return socket_.get(); }
  void abandon() override;
  [[nodiscard]] bool closed_by_peer() const override { return closed_by_peer_; }
  [[nodiscard]] short arm(bool for_write) override {
    return static_cast<short>(for_write ? POLLIN | POLLOUT : POLLIN);
  }

 private:
  Io on_error();

  FileDescriptor socket_;
  bool closed_by_peer_ = false;
  bool reset_ = false;           // the connection ended by an error, perhaps a reset
  std::uint32_t delivered_ = 0;  // segments delivered at the last report
};

}  // namespace r2ccl
