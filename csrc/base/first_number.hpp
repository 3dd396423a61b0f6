// Test hook: the first number of messages, credits, calls, epochs and records; 0 in production.  A
// test with a high first number reaches the end of 31 or 32 bits.  All processes of a job must
// choose the same number.
#pragma once

#include <atomic>
#include <cstdint>

namespace r2ccl {

inline std::atomic<std::uint64_t> chosen_first_number{0};

[[nodiscard]] inline std::uint64_t first_number() {
  return chosen_first_number.load(std::memory_order_relaxed);
}
// Affects objects made later.
inline void set_first_number(std::uint64_t number) { chosen_first_number.store(number); }

}  // namespace r2ccl
