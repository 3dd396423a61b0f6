// Drills on a rail: faults that a person ordered, as both ends of the rail know them.
#pragma once

#include <cstdint>

#include "base/units.hpp"

namespace r2ccl {

inline constexpr TimeNs longest_drill_ns = 3'600'000 * ns_per_ms;
// After the end of a drill, a lost rail gets this long to come back.
inline constexpr TimeNs rejoin_grace_ns = 5000 * ns_per_ms;
// Silence of the drill may still be judged this long after its end, on a rail that is UP.
inline constexpr TimeNs silence_grace_ns = 1000 * ns_per_ms;

inline constexpr std::uint8_t no_drill = 0;
inline constexpr std::uint8_t unknown_drill = 255;  // the peer named no kind

// The last drill by one end of a rail.
struct Drill {
  std::uint8_t kind = no_drill;  // the owner's number of the fault
  bool ended = true;
  TimeNs over_at = 0;  // until then, events of the rail belong to the drill

  [[nodiscard]] bool active(TimeNs now) const { return now < over_at; }
  void begin(std::uint8_t of_kind, TimeNs duration, TimeNs now) {
    kind = of_kind;
    ended = false;
    over_at = now + duration + rejoin_grace_ns;
  }
  void end(bool rail_is_up, TimeNs now) {
    ended = true;
    over_at = now + (rail_is_up ? silence_grace_ns : rejoin_grace_ns);
  }
  // The rail is UP again: later events are no longer the drill's.
  void rejoined(TimeNs now) {
    if (ended && over_at > now) over_at = now;
  }
};

// Drills by both ends of a rail, and the state of the announcement of our last drill.
struct RailDrills {
  Drill own;
  Drill peers;
  TimeNs until = 0;            // planned end of our drill
  std::uint32_t told = 0;      // sequence number of our last announcement; 0: none
  std::uint32_t known = 0;     // last announcement that the peer has confirmed
  std::uint32_t received = 0;  // last announcement of the peer
  TimeNs repeat_at = 0;
  TimeNs interval = 0;
};

}  // namespace r2ccl
