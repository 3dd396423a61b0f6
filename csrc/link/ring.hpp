// A FIFO queue on a growing ring buffer.  A push allocates only beyond the largest size so far,
// while std::deque frees and allocates blocks in steady state.
#pragma once

#include <cassert>
#include <cstddef>
#include <utility>
#include <vector>

namespace r2ccl {

template <typename T>
class Ring {
 public:
  [[nodiscard]] bool empty() const { return size_ == 0; }
  [[nodiscard]] std::size_t size() const { return size_; }
  [[nodiscard]] T& front() { return (*this)[0]; }
  [[nodiscard]] T& operator[](std::size_t index) {
    assert(index < size_);
    return items_[(begin_ + index) & (items_.size() - 1)];
  }

  // Makes room for a push_back(), which then does not throw.
  void make_room() {
    if (size_ == items_.size()) grow();
  }
  void push_back(const T& item) {
    make_room();
    ++size_;
    (*this)[size_ - 1] = item;
  }
  void pop_front() {
    assert(size_ > 0);
    begin_ = (begin_ + 1) & (items_.size() - 1);
    --size_;
  }
  void clear() { begin_ = size_ = 0; }

  // Erases matching items; the order of the other items is kept.
  template <typename Gone>
  void erase_if(Gone gone) {
    std::size_t kept = 0;
    for (std::size_t i = 0; i < size_; ++i)
      if (!gone((*this)[i])) (*this)[kept++] = (*this)[i];
    size_ = kept;
  }

 private:
  void grow() {
    std::vector<T> larger(items_.empty() ? 16 : 2 * items_.size());  // a power of two
    for (std::size_t i = 0; i < size_; ++i) larger[i] = (*this)[i];
    items_ = std::move(larger);
    begin_ = 0;
  }

  std::vector<T> items_;
  std::size_t begin_ = 0;
  std::size_t size_ = 0;
};

}  // namespace r2ccl
