// Owner of a file descriptor: closes the descriptor on destruction.  A forked child closes every
// descriptor of the core at once.
#pragma once

#include <unistd.h>

#include <utility>

#include "base/fork.hpp"

namespace r2ccl {

class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : entry_(fd) {}
  // Owns the descriptor returned by `make`, or nothing if `make` returns -1.  No fork happens in
  // between, so no child inherits the descriptor.  `make` must not make another FileDescriptor.
  template <typename Make>
  [[nodiscard]] static FileDescriptor made_by(Make make) {
    FileDescriptor made;
    {
      const ClosedInChild::Pause pause;
      made.entry_.add(make());
    }
    return made;
  }
  FileDescriptor(FileDescriptor&&) noexcept = default;
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    if (this != &other) {
      reset();
      entry_ = std::move(other.entry_);
    }
    return *this;
  }
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  ~FileDescriptor() { reset(); }

  [[nodiscard]] int get() const { return entry_.fd(); }
  [[nodiscard]] bool valid() const { return entry_.fd() >= 0; }
  void reset() {
    if (!valid()) return;
    // A fork between both steps would leave the descriptor open in the child, or close another
    // descriptor of this number there.
    const ClosedInChild::Pause pause;
    ::close(entry_.remove());
  }

 private:
  ClosedInChild entry_;
};

}  // namespace r2ccl
