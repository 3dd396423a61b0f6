// Numbers and bytes taken from the front of a fuzz input.  An exhausted input yields zeros, so
// every prefix of an input is a valid input.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>

namespace r2ccl::fuzz {

class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : left_(data, size) {}

  [[nodiscard]] bool empty() const { return left_.empty(); }

  template <typename T>
  T take() {
    T value{};
    const std::size_t bytes = std::min(sizeof(T), left_.size());
    if (bytes > 0) std::memcpy(&value, left_.data(), bytes);
    left_ = left_.subspan(bytes);
    return value;
  }
  std::uint8_t byte() { return take<std::uint8_t>(); }

  std::span<const std::byte> bytes(std::size_t count) {
    const auto taken = left_.first(std::min(count, left_.size()));
    left_ = left_.subspan(taken.size());
    return std::as_bytes(taken);
  }

 private:
  std::span<const std::uint8_t> left_;
};

// Aborts the process if `holds` is false; the fuzzer then keeps the input.
inline void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "does not hold: %s\n", what);
  std::abort();
}

}  // namespace r2ccl::fuzz
