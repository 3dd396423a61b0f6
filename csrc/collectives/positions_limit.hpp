// Test hooks: times of the comparison between the programs of ranks.  A test that compares the
// positions waits longer than a program, and a test of waits compares at once.
#pragma once

#include <atomic>

#include "base/units.hpp"

namespace r2ccl {

inline std::atomic<TimeNs> chosen_positions_limit{500 * ns_per_ms};
inline std::atomic<TimeNs> chosen_waits_interval{1000 * ns_per_ms};

// Longest wait of a call that ends by an order mismatch for the positions of the other ranks.
[[nodiscard]] inline TimeNs positions_limit() {
  return chosen_positions_limit.load(std::memory_order_relaxed);
}
// Duration of a wait until the rank compares it with the waits of others, and the interval in which
// the rank tells of it.
[[nodiscard]] inline TimeNs waits_interval() {
  return chosen_waits_interval.load(std::memory_order_relaxed);
}
// Both affect all communicators of the process.
inline void set_positions_limit(TimeNs limit) { chosen_positions_limit.store(limit); }
inline void set_waits_interval(TimeNs interval) { chosen_waits_interval.store(interval); }

}  // namespace r2ccl
