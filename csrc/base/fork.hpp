// Forks of this process.  A forked child has none of the parent's threads, so objects made before
// the fork are of no use in the child.  The child keeps nothing of the parent's connections: a
// child that held a socket would keep the connection of a dead parent open, and a mapping would
// keep the lock of the parent's journal.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/errors.hpp"

namespace r2ccl {

namespace fork_detail {
extern std::atomic<std::uint32_t> generation;
}  // namespace fork_detail

// Remembers the process that made an object.
class Origin {
 public:
  // Returns true in a child forked after the object was made.
  [[nodiscard]] bool foreign() const {
    return generation_ != fork_detail::generation.load(std::memory_order_relaxed);
  }
  // Returns invalid_argument in a child forked after the object was made.  `what` names the object.
  [[nodiscard]] Status check(const char* what) const {
    return foreign() ? refusal(what) : Status();
  }

 private:
  static Status refusal(const char* what);

  std::uint32_t generation_ = fork_detail::generation.load(std::memory_order_relaxed);
};

// A descriptor that a forked child closes.  The object does not own the descriptor in the process
// that made it.
class ClosedInChild {
 public:
  // No fork happens while a Pause exists; see FileDescriptor::made_by().
  class Pause {
   public:
    Pause();
    ~Pause();
    Pause(const Pause&) = delete;
    Pause& operator=(const Pause&) = delete;
  };

  ClosedInChild() = default;
  explicit ClosedInChild(int fd);
  ~ClosedInChild();
  ClosedInChild(ClosedInChild&& other) noexcept;
  ClosedInChild& operator=(ClosedInChild&& other) noexcept;

  // -1: none, or a forked child has closed the descriptor.
  [[nodiscard]] int fd() const { return fd_; }

  // Both need a Pause.
  void add(int fd);
  int remove();  // returns the descriptor

 private:
  friend struct ForkHandlers;

  int fd_ = -1;
  ClosedInChild* before_ = nullptr;
  ClosedInChild* after_ = nullptr;
};

// A mapping of memory, absent in a forked child.  A mapping of a file would hold the file's lock.
class Mapping {
 public:
  Mapping() = default;
  Mapping(void* memory, std::size_t bytes);  // owns memory from mmap(2)
  ~Mapping();
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&&) = delete;

  [[nodiscard]] std::byte* get() const { return memory_; }

 private:
  std::byte* memory_ = nullptr;
  std::size_t bytes_ = 0;
  Origin origin_;
};

}  // namespace r2ccl
