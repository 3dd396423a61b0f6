// Time unit of the core: nanoseconds.  Names of constants end in their unit.
#pragma once

#include <cstdint>

namespace r2ccl {

using TimeNs = std::int64_t;  // CLOCK_MONOTONIC, or the simulator's clock

inline constexpr TimeNs ns_per_ms = 1'000'000;

}  // namespace r2ccl
