// How fast a path takes bytes: what it acknowledges in the time in which it is behind.
#pragma once

#include <cstdint>

#include "link/shape.hpp"

namespace r2ccl {

// A path is behind while more is outstanding than its far end may hold an acknowledgement back for.
// Bytes per second; 0: not known, which means that it has not been what traffic waits for.
class RateMeter {
 public:
  // Once a tick, after the path was asked: what happened in `elapsed`.  True: a new measurement.
  bool observe(TimeNs elapsed, std::uint64_t sent, std::uint64_t acked, std::uint64_t held_back);
  // What was seen since the last measurement does not count.
  void restart(std::uint64_t acked);

  [[nodiscard]] double measured() const { return measured_; }
  // The last measurement, doubled for every second that it is old: a rail that gets no traffic
  // because it was slow once is tried again, and one chunk is what that costs.
  [[nodiscard]] double believed() const { return believed_; }

 private:
  void measure(double rate);

  double measured_ = 0;
  double believed_ = 0;
  TimeNs age_ = 0;           // of the measurement
  TimeNs window_ = 0;        // watched since the last one
  TimeNs behind_ = 0;        // of that, in which the path was behind
  std::uint64_t begin_ = 0;  // acknowledged when the window began
};

}  // namespace r2ccl
