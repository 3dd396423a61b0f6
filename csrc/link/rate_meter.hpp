// How fast a path takes bytes: what it acknowledges in the time in which it is behind.
#pragma once

#include <cstdint>

#include "base/units.hpp"

namespace r2ccl {

// From one tick to the next a path is behind if what was outstanding at the first is still not all
// acknowledged at the second, but for what its far end may hold an acknowledgement back for.
// Rates are bytes per second; 0: not known.
class RateMeter {
 public:
  // Once a tick, after the path was asked: what happened in `elapsed`.  True: a new measurement.
  bool observe(TimeNs elapsed, std::uint64_t sent, std::uint64_t acked, std::uint64_t held_back);
  // What was seen since the last measurement does not count.
  void restart(std::uint64_t sent, std::uint64_t acked);

  [[nodiscard]] double measured() const { return measured_; }
  // The last measurement, doubled for every second that it is old: a rail that gets no traffic
  // because it was slow once is tried again, and one chunk is what that costs.
  [[nodiscard]] double believed() const { return believed_; }
  // It takes, or took, at least that much, also if it was never behind.
  [[nodiscard]] double at_least() const { return measured_ > 0 ? measured_ : carried_; }

 private:
  void measure(double rate);
  // Bytes per second of the time that has just come together; 0: it has not, or they are too few.
  [[nodiscard]] double carry(TimeNs elapsed, std::uint64_t bytes);

  double measured_ = 0;
  double believed_ = 0;
  double carried_ = 0;       // the most that carry() told
  TimeNs age_ = 0;           // of the measurement
  TimeNs window_ = 0;        // since the next one was begun
  TimeNs behind_ = 0;        // of that, in which the path was behind
  std::uint64_t taken_ = 0;  // acknowledged in that time
  TimeNs carry_time_ = 0;
  std::uint64_t carry_bytes_ = 0;
  std::uint64_t last_sent_ = 0;  // at the last tick
  std::uint64_t last_acked_ = 0;
};

}  // namespace r2ccl
