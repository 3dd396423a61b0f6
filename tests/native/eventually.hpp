// Waits of the tests, each with an end.  A busy machine delays a condition, so the ends are
// generous.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>

#include "sanitized.hpp"

namespace r2ccl::testing {

// Returns the factor for waits, which the gate measures (tests/strain.py); 1 = a quiet machine.
inline double patience() {
  const char* const factor = std::getenv("R2SERVE_TEST_PATIENCE");
  return factor == nullptr ? 1.0 : std::max(1.0, std::strtod(factor, nullptr));
}

// Longest wait for a condition, less than the time after which ctest ends a program.
inline const double patience_s = (sanitized() ? 120.0 : 60.0) * patience();

// Waits until `condition()` is true, for at most `within_s` seconds.  The failure names `what`. The
// condition is checked once more after the limit, so a pause of this process alone is no failure.
template <typename Condition>
::testing::AssertionResult eventually(
    const Condition& condition, const std::string& what, double within_s = patience_s,
    std::chrono::microseconds pause = std::chrono::milliseconds(1)) {
  const auto now = [] { return std::chrono::steady_clock::now(); };
  const auto deadline = now() + std::chrono::duration<double>(within_s);
  for (;;) {
    const bool last = now() >= deadline;
    if (condition()) return ::testing::AssertionSuccess();
    if (last) return ::testing::AssertionFailure() << "not within " << within_s << " s: " << what;
    if (pause > pause.zero())
      std::this_thread::sleep_for(pause);
    else
      std::this_thread::yield();
  }
}

}  // namespace r2ccl::testing
