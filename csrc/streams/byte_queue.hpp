// A FIFO queue of bytes in contiguous memory.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace r2ccl {

class ByteQueue {
 public:
  [[nodiscard]] bool empty() const { return begin_ == bytes_.size(); }
  [[nodiscard]] std::size_t size() const { return bytes_.size() - begin_; }
  // Returns all queued bytes; valid until the next change.
  [[nodiscard]] std::span<const std::byte> view() const {
    return std::span(bytes_).subspan(begin_);
  }

  void append(std::span<const std::byte> more) {
    // Move the rest to the front once it is the smaller part, so that a byte moves once on average.
    if (begin_ > size()) {
      bytes_.erase(bytes_.begin(), bytes_.begin() + static_cast<std::ptrdiff_t>(begin_));
      begin_ = 0;
    }
    bytes_.insert(bytes_.end(), more.begin(), more.end());
  }
  void pop(std::size_t count) {
    begin_ += count;
    if (!empty()) return;
    begin_ = 0;
    if (bytes_.capacity() > kept_bytes) bytes_ = {};
    bytes_.clear();
  }
  void clear() { pop(size()); }

 private:
  static constexpr std::size_t kept_bytes = 64U << 10;  // capacity of an empty queue

  std::vector<std::byte> bytes_;
  std::size_t begin_ = 0;
};

}  // namespace r2ccl
