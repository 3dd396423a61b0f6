// A byte pipe between two processes of one node: a ring in shared memory for each direction, and a
// unix socket that carried the handshake, rings the doorbell of a sleeping side and, by its end of
// file, tells that the peer is gone.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/errors.hpp"
#include "base/file_descriptor.hpp"
#include "rails/byte_pipe.hpp"

namespace r2ccl {

// Sealed shared memory for one pipe; invalid if the system has none.
[[nodiscard]] FileDescriptor make_ring_memory();

class ShmPipe final : public BytePipe {
 public:
  // `connector`: the side that made the memory.
  static Result<std::unique_ptr<ShmPipe>> open(FileDescriptor socket, FileDescriptor memory,
                                               bool connector);
  ~ShmPipe() override;

  Io write(std::span<const iovec> parts, std::size_t& bytes) override;
  Io read(std::span<const iovec> parts, std::size_t& bytes) override;
  PathReport path() override { return {}; }  // what is in the ring is in the peer's memory
  [[nodiscard]] int fd() const override { return socket_.get(); }
  [[nodiscard]] short arm(bool for_write) override;

 private:
  struct Ring;

  ShmPipe(FileDescriptor socket, std::byte* memory, bool connector);
  bool peer_gone();  // reads doorbells away

  FileDescriptor socket_;
  std::byte* memory_;
  Ring* out_;
  Ring* in_;
  unsigned empty_reads_ = 0;
};

}  // namespace r2ccl
