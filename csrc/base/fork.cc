#include "base/fork.hpp"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <mutex>
#include <string>
#include <utility>

namespace r2ccl {

namespace fork_detail {
constinit std::atomic<std::uint32_t> generation{0};
}  // namespace fork_detail

// A fork waits for the lock, so the child meets a whole list.  All handlers are async-signal-safe:
// a child of a process with several threads may call nothing else.
struct ForkHandlers {
  static inline constinit std::mutex lock;
  static inline constinit ClosedInChild* first = nullptr;

  static void prepare() { lock.lock(); }
  static void in_parent() { lock.unlock(); }
  static void in_child() {
    fork_detail::generation.fetch_add(1, std::memory_order_relaxed);
    for (ClosedInChild* entry = first; entry != nullptr;) {
      ::close(entry->fd_);
      entry->fd_ = -1;
      entry->before_ = nullptr;
      entry = std::exchange(entry->after_, nullptr);
    }
    first = nullptr;
    lock.unlock();
  }

  static const int registered;
};

const int ForkHandlers::registered = ::pthread_atfork(prepare, in_parent, in_child);

Status Origin::refusal(const char* what) {
  return {ErrorCode::invalid_argument,
          std::string(what) + ": made before a fork, and usable only in the parent process; make " +
              "a new one in the child"};
}

ClosedInChild::Pause::Pause() { ForkHandlers::lock.lock(); }
ClosedInChild::Pause::~Pause() { ForkHandlers::lock.unlock(); }

ClosedInChild::ClosedInChild(int fd) {
  const Pause pause;
  add(fd);
}

ClosedInChild::~ClosedInChild() {
  if (fd_ < 0) return;
  const Pause pause;
  (void)remove();
}

ClosedInChild::ClosedInChild(ClosedInChild&& other) noexcept {
  const Pause pause;
  add(other.remove());
}

ClosedInChild& ClosedInChild::operator=(ClosedInChild&& other) noexcept {
  if (this == &other) return *this;
  const Pause pause;
  (void)remove();
  add(other.remove());
  return *this;
}

void ClosedInChild::add(int fd) {
  fd_ = fd;
  if (fd < 0) return;
  before_ = nullptr;
  after_ = std::exchange(ForkHandlers::first, this);
  if (after_ != nullptr) after_->before_ = this;
}

int ClosedInChild::remove() {
  if (fd_ < 0) return -1;
  (before_ != nullptr ? before_->after_ : ForkHandlers::first) = after_;
  if (after_ != nullptr) after_->before_ = before_;
  before_ = after_ = nullptr;
  return std::exchange(fd_, -1);
}

Mapping::Mapping(void* memory, std::size_t bytes)
    : memory_(static_cast<std::byte*>(memory)), bytes_(bytes) {
  (void)::madvise(memory, bytes, MADV_DONTFORK);
}

Mapping::~Mapping() {
  // In a forked child the addresses may belong to other memory.
  if (memory_ != nullptr && !origin_.foreign()) ::munmap(memory_, bytes_);
}

Mapping::Mapping(Mapping&& other) noexcept
    : memory_(std::exchange(other.memory_, nullptr)),
      bytes_(other.bytes_),
      origin_(other.origin_) {}

}  // namespace r2ccl
