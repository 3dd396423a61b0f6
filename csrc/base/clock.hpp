// The clock of the engine; the simulator has a virtual clock.  link/ never reads a clock: callers
// pass the time in.
#pragma once

#include <ctime>

#include "base/units.hpp"

namespace r2ccl {

[[nodiscard]] inline TimeNs now_ns() {
  timespec time{};
  ::clock_gettime(CLOCK_MONOTONIC, &time);
  return TimeNs{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

}  // namespace r2ccl
