// A byte pipe between two processes of one node: one ring in shared memory per direction, and a
// unix socket.  The socket carries the handshake and the doorbells that wake a sleeping process;
// its end of file shows that the peer is gone.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/errors.hpp"
#include "base/file_descriptor.hpp"
#include "rails/byte_pipe.hpp"

namespace r2ccl {

// Creates sealed shared memory for one pipe; invalid if the system provides none.
[[nodiscard]] FileDescriptor make_ring_memory();

class ShmPipe final : public BytePipe {
 public:
  // Maps the memory.  `connector`: true on the side that created the memory.
  static Result<std::unique_ptr<ShmPipe>> open(FileDescriptor socket, FileDescriptor memory,
                                               bool connector);

  Io write(std::span<const iovec> parts, std::size_t& bytes) override;
  Io read(std::span<const iovec> parts, std::size_t& bytes) override;
  PathReport path() override { return {}; }  // written bytes are in the peer's memory at once
  [[nodiscard]] int fd() const override { return socket_.get(); }
  [[nodiscard]] short arm(bool for_write) override;
  void abandon() override;
  [[nodiscard]] bool closed_by_peer() const override { return closed_by_peer_; }

 private:
  struct Ring;

  ShmPipe(FileDescriptor socket, Mapping memory, bool connector);
  bool peer_gone();  // also consumes pending doorbells

  bool closed_by_peer_ = false;
  FileDescriptor socket_;
  Mapping memory_;
  Ring* out_;
  Ring* in_;
  unsigned empty_reads_ = 0;
};

}  // namespace r2ccl
