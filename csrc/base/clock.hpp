// The clock of the real engine.  link/ never reads it; it is handed in.
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
