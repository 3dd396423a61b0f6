// Hook for signals: the program around the core decides whether a signal ends a waiting call.
#pragma once

#include <atomic>

#include "base/units.hpp"

namespace r2ccl {

// Runs the program's signal handlers, if this thread may.  Returns true if a handler wants the call
// to end.  Called without any lock of the core.
using InterruptHook = bool (*)();

inline std::atomic<InterruptHook> interrupt_hook{nullptr};

// Longest time between two calls of the hook by a waiting call.
inline constexpr TimeNs interrupt_interval_ns = 100 * ns_per_ms;

[[nodiscard]] inline bool interrupted() {
  const InterruptHook hook = interrupt_hook.load(std::memory_order_relaxed);
  return hook != nullptr && hook();
}

}  // namespace r2ccl
