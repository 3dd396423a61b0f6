#include "rails/shm/shm_pipe.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "base/limits.hpp"

namespace r2ccl {
namespace {

constexpr std::size_t ring_footprint = shm_ring_bytes + 3 * 64;
constexpr unsigned seals = F_SEAL_SHRINK | F_SEAL_GROW;
// Reads of an empty ring for each check whether the peer is gone.
constexpr unsigned empty_reads_per_check = 64;

}  // namespace

struct ShmPipe::Ring {
  alignas(64) std::atomic<std::uint64_t> written;
  alignas(64) std::atomic<std::uint64_t> read;
  alignas(64) std::atomic<std::uint32_t> reader_sleeps;
  std::atomic<std::uint32_t> writer_sleeps;
  alignas(64) std::byte data[shm_ring_bytes];
};

FileDescriptor make_ring_memory() {
  FileDescriptor memory = FileDescriptor::made_by(
      [] { return ::memfd_create("r2ccl-rail", MFD_CLOEXEC | MFD_ALLOW_SEALING); });
  constexpr auto size = static_cast<off_t>(2 * ring_footprint);
  // The seal prevents the peer from shrinking the memory, which would make accesses here fault.
  if (memory.valid() &&
      (::ftruncate(memory.get(), size) != 0 || ::fcntl(memory.get(), F_ADD_SEALS, seals) != 0))
    memory.reset();
  return memory;
}

Result<std::unique_ptr<ShmPipe>> ShmPipe::open(FileDescriptor socket, FileDescriptor memory,
                                               bool connector) {
  struct stat status {};
  constexpr std::size_t size = 2 * sizeof(Ring);
  const bool usable = memory.valid() && ::fstat(memory.get(), &status) == 0 &&
                      static_cast<std::size_t>(status.st_size) >= size &&
                      (static_cast<unsigned>(::fcntl(memory.get(), F_GET_SEALS)) & seals) == seals;
  void* address = usable
                      ? ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, memory.get(), 0)
                      : MAP_FAILED;
  if (address == MAP_FAILED)
    return Status(ErrorCode::internal, "the peer sent no usable shared memory for the shm rail");
  return std::unique_ptr<ShmPipe>(
      new ShmPipe(std::move(socket), Mapping(address, size), connector));
}

ShmPipe::ShmPipe(FileDescriptor socket, Mapping memory, bool connector)
    : socket_(std::move(socket)),
      memory_(std::move(memory)),
      out_(reinterpret_cast<Ring*>(memory_.get())),
      in_(reinterpret_cast<Ring*>(memory_.get() + sizeof(Ring))) {
  static_assert(sizeof(Ring) == ring_footprint);
  if (!connector) std::swap(out_, in_);
}

// Another process may hold a copy of the socket's descriptor.
void ShmPipe::abandon() { ::shutdown(socket_.get(), SHUT_RDWR); }

Io ShmPipe::write(std::span<const iovec> parts, std::size_t& bytes) {
  const std::uint64_t begin = out_->written.load(std::memory_order_relaxed);
  const std::uint64_t used = begin - out_->read.load(std::memory_order_acquire);
  if (used > shm_ring_bytes) return Io::broken;  // the peer wrote an impossible position
  std::size_t room = shm_ring_bytes - used;
  if (room == 0) return peer_gone() ? Io::broken : Io::again;
  std::uint64_t position = begin;
  for (const iovec& part : parts) {
    const auto* source = static_cast<const std::byte*>(part.iov_base);
    std::size_t left = std::min(part.iov_len, room);
    room -= left;
    while (left > 0) {
      const std::size_t at = position % shm_ring_bytes;
      const std::size_t run = std::min(left, shm_ring_bytes - at);
      std::memcpy(out_->data + at, source, run);
      source += run;
      position += run;
      left -= run;
    }
    if (room == 0) break;
  }
  out_->written.store(position, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);  // pairs with the fence in arm()
  if (out_->reader_sleeps.load(std::memory_order_relaxed) != 0) {
    out_->reader_sleeps.store(0, std::memory_order_relaxed);
    const char bell = 0;
    if (::send(socket_.get(), &bell, 1, MSG_DONTWAIT | MSG_NOSIGNAL) < 0 && errno == EPIPE)
      return Io::broken;
  }
  bytes = static_cast<std::size_t>(position - begin);
  return Io::ok;
}

Io ShmPipe::read(std::span<const iovec> parts, std::size_t& bytes) {
  const std::uint64_t begin = in_->read.load(std::memory_order_relaxed);
  std::size_t left = in_->written.load(std::memory_order_acquire) - begin;
  if (left > shm_ring_bytes) return Io::broken;
  if (left == 0) {
    if (++empty_reads_ % empty_reads_per_check != 0) return Io::again;
    // The peer writes its last bytes before its socket closes.  So check the ring again before
    // trusting the end of file.
    return peer_gone() && in_->written.load(std::memory_order_acquire) == begin ? Io::broken
                                                                                : Io::again;
  }
  std::uint64_t position = begin;
  for (const iovec& part : parts) {
    auto* target = static_cast<std::byte*>(part.iov_base);
    std::size_t take = std::min(part.iov_len, left);
    left -= take;
    while (take > 0) {
      const std::size_t at = position % shm_ring_bytes;
      const std::size_t run = std::min(take, shm_ring_bytes - at);
      std::memcpy(target, in_->data + at, run);
      target += run;
      position += run;
      take -= run;
    }
    if (left == 0) break;
  }
  in_->read.store(position, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (in_->writer_sleeps.load(std::memory_order_relaxed) != 0) {
    in_->writer_sleeps.store(0, std::memory_order_relaxed);
    const char bell = 0;
    (void)::send(socket_.get(), &bell, 1,
                 MSG_DONTWAIT | MSG_NOSIGNAL);  // read() notices a closed socket
  }
  bytes = static_cast<std::size_t>(position - begin);
  return Io::ok;
}

short ShmPipe::arm(bool for_write) {
  in_->reader_sleeps.store(1, std::memory_order_relaxed);
  if (for_write) out_->writer_sleeps.store(1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  const bool arrived =
      in_->written.load(std::memory_order_acquire) != in_->read.load(std::memory_order_relaxed);
  const bool room = for_write && out_->written.load(std::memory_order_relaxed) -
                                         out_->read.load(std::memory_order_acquire) <
                                     shm_ring_bytes;
  return arrived || room || peer_gone() ? 0 : POLLIN;
}

bool ShmPipe::peer_gone() {
  std::array<char, 64> bells;
  for (;;) {
    const ssize_t got = ::recv(socket_.get(), bells.data(), bells.size(), MSG_DONTWAIT);
    if (got == 0) {
      closed_by_peer_ = true;
      return true;
    }
    if (got < 0) return errno != EAGAIN && errno != EINTR;
  }
}

}  // namespace r2ccl
