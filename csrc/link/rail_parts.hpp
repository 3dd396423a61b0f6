// Parts of the state that a link keeps of a rail.
#pragma once

#include <cstdint>

#include "base/units.hpp"
#include "link/frame.hpp"
#include "link/rate_meter.hpp"

namespace r2ccl {

// Evidence about the rail: rate, silence and probes.
struct RailHealth {
  RateMeter meter;
  bool slow = false;
  TimeNs differs = 0;        // how long the rate has contradicted `slow`
  TimeNs silent = 0;         // observed time without path progress, bytes outstanding
  TimeNs doubted_since = 0;  // while UP: since half the ack deadline has passed; 0: not passed
  TimeNs suspect_since = 0;
  // While UP: perhaps a hop of this rail acknowledged bytes that it withholds.  The answer to a
  // probe sent since `accused_of` acquits the rail.
  TimeNs accused_at = 0;       // 0: not accused
  TimeNs accused_of = 0;       // time of the request whose answer lacked the bytes
  TimeNs accused_watched = 0;  // observed time since an answer elsewhere
  // While SUSPECT: as above, without an answer to the probe.  Path acks prove nothing then.
  bool withheld = false;
  TimeNs asked_others = 0;      // while SUSPECT or overdue: last probes on other rails
  TimeNs path_answered = 0;     // while SUSPECT: the peer answered another connection
  TimeNs contradicted = 0;      // observed time since an answer on another rail
  TimeNs inquire_at = 0;        // while SUSPECT: time of the next inquiry (second connection)
  TimeNs inquire_interval = 0;  // doubles after each inquiry
  TimeNs last_ping = 0;         // send time of the last probe
  TimeNs answered = 0;          // send time of the last answered probe
  TimeNs pinged = 0;            // send time of the open probe; 0: none
  // Observed wait for an answer.  Once overdue: observed time since an answer on another rail.
  TimeNs unanswered = 0;
  TimeNs overdue_since = 0;         // since the probe exceeded dead_deadline; 0: not overdue
  bool answered_elsewhere = false;  // once overdue: an answer came on another rail
  // Ends the silence of the path.
  void path_alive() { silent = doubted_since = contradicted = 0; }
};

// Scheduling of the next epoch.
struct RailReconnect {
  TimeNs at = 0;
  bool connecting = false;  // a connect action is pending
  std::uint32_t failures = 0;
  // Handshakes and probations in a row that the peer did not finish in time.
  std::uint32_t late = 0;
  bool been_up = false;  // the rail was UP before
  TimeNs probation_since = 0;
  TimeNs probation = 0;  // observed time on probation
  double penalty = 0.0;  // flap penalty; halves every flap_half_life_s
  TimeNs penalty_at = 0;
};

// Messages about this rail, sent to the peer on other rails.
struct RailNotices {
  TimeNs at = 0;  // time of the next RAIL_DOWN
  TimeNs interval = 0;
  Endpoint address;                    // listen address announced to the peer
  std::uint32_t address_sequence = 0;  // last announcement, ours or the peer's; 0: none
  std::uint32_t injected = 0;          // last epoch that the peer's tests or drills ended; 0: none
};

}  // namespace r2ccl
