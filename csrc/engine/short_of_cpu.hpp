// Joins the pauses of the background thread into few records.  A lasting shortage of CPU would
// otherwise fill the journal's ring and push out the rail events.  Pure: no clock, no lock.
#pragma once

#include <algorithm>
#include <optional>

#include "base/clock.hpp"
#include "base/types.hpp"

namespace r2ccl {

class ShortOfCpu {
 public:
  // Total from which pauses are recorded.
  static constexpr TimeNs recorded_from_ns = 250 * ns_per_ms;
  // Shortest and longest time between two records.  The time doubles with every record, and
  // returns to the shortest after a time as long as the longest without a record.
  static constexpr TimeNs interval_min_ns = 1000 * ns_per_ms;
  static constexpr TimeNs interval_max_ns = 600'000 * ns_per_ms;

  struct Joined {
    TimeNs paused;  // sum of the pauses
    TimeNs within;  // from the first of these pauses to the end of the last
  };

  // Adds a pause of `late` ns that ended at `now`.  Returns the joined pauses if a record is due.
  std::optional<Joined> note(TimeNs late, TimeNs now) {
    const TimeNs began = now - late;
    if (now - recorded_ > interval_max_ns) interval_ = interval_min_ns;
    // After a quiet time the total begins at 0.
    if (began - last_ > interval_) paused_ = 0;
    if (paused_ == 0) since_ = began;
    last_ = now;
    paused_ += late;
    if (paused_ < recorded_from_ns || now - recorded_ < interval_) return std::nullopt;
    const Joined joined{.paused = paused_, .within = now - since_};
    paused_ = 0;
    recorded_ = now;
    interval_ = std::min(2 * interval_, interval_max_ns);
    return joined;
  }

 private:
  TimeNs paused_ = 0;    // sum of the pauses since the last record
  TimeNs since_ = 0;     // start of the first of these pauses
  TimeNs last_ = 0;      // end of the last pause
  TimeNs recorded_ = 0;  // time of the last record
  TimeNs interval_ = interval_min_ns;
};

}  // namespace r2ccl
