// Bandwidth estimate of a path: bytes acknowledged per time with the path as the bottleneck.
#pragma once

#include <cstdint>

#include "base/units.hpp"

namespace r2ccl {

// A path is "behind" between two ticks if bytes outstanding at the first tick are still not all
// acknowledged at the second tick.  Bytes with a delayed acknowledgement (held_back) do not count.
// Rates are in bytes/s; 0: unknown.
class RateMeter {
 public:
  // Records the progress of a tick; call after path_acked().  `elapsed`: time since the last tick.
  // `sent` and `acked`: totals of the epoch in bytes.  Returns true for a new measurement.
  bool observe(TimeNs elapsed, std::uint64_t sent, std::uint64_t acked, std::uint64_t held_back);
  // Discards all observations since the last measurement.
  void restart(std::uint64_t sent, std::uint64_t acked);

  [[nodiscard]] double measured() const { return measured_; }
  // Returns the last measurement, doubled for every second of its age.  An idle rail, once slow,
  // thus gets traffic again; a wrong estimate costs a single chunk.
  [[nodiscard]] double believed() const { return believed_; }
  // Returns a lower bound of the bandwidth, also for a path never behind.
  [[nodiscard]] double at_least() const { return measured_ > 0 ? measured_ : carried_; }

 private:
  void measure(double rate);
  // Returns the carried rate of a full window in bytes/s.  0: window incomplete, or too few bytes.
  [[nodiscard]] double carry(TimeNs elapsed, std::uint64_t bytes);

  double measured_ = 0;
  double believed_ = 0;
  double carried_ = 0;       // maximum of carry()
  TimeNs age_ = 0;           // age of the measurement
  TimeNs window_ = 0;        // time since the start of the current measurement
  TimeNs behind_ = 0;        // part of window_ with the path behind
  std::uint64_t taken_ = 0;  // bytes acknowledged during behind_
  TimeNs carry_time_ = 0;
  std::uint64_t carry_bytes_ = 0;
  std::uint64_t last_sent_ = 0;  // `sent` at the last tick
  std::uint64_t last_acked_ = 0;
};

}  // namespace r2ccl
