// Test hook: the longest wait of a call that ends by an order mismatch for the positions of the
// other ranks.  A test that compares the positions waits longer than a program.
#pragma once

#include <atomic>

#include "base/units.hpp"

namespace r2ccl {

inline std::atomic<TimeNs> chosen_positions_limit{500 * ns_per_ms};

[[nodiscard]] inline TimeNs positions_limit() {
  return chosen_positions_limit.load(std::memory_order_relaxed);
}
// Affects all communicators of the process.
inline void set_positions_limit(TimeNs limit) { chosen_positions_limit.store(limit); }

}  // namespace r2ccl
