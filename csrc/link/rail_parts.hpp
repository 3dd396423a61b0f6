// Parts of the state that a link keeps of a rail.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>

#include "base/units.hpp"
#include "link/frame.hpp"
#include "link/link_types.hpp"
#include "link/rail_state.hpp"
#include "link/rate_meter.hpp"
#include "link/ring.hpp"
#include "link/verdict.hpp"

namespace r2ccl {

class InStream;

// The frame that is being received.
struct Incoming {
  FrameHeader header{};
  InStream* stream = nullptr;
  std::uint32_t received = 0;
  bool placed = false;                 // an RDMA write has placed the payload already
  std::unique_ptr<std::byte[]> text;   // payload of an ABORT
  bool apart = false;                  // the payload is buffered in `chunk`
  std::unique_ptr<std::byte[]> chunk;  // payload of data, copied to the slot later
  bool wanted = false;                 // put: the attempt was permitted when the frame began
};

// A posting of a chunk on a rail.
struct Attempt {
  OutStream* stream;
  std::uint64_t position;  // end of the frame in the epoch's byte stream
  std::uint64_t number;
  std::uint16_t slot;
  std::uint16_t chunk;
};

// Progress of the current epoch's path: bytes sent, acknowledged and landed, and last activity.
struct RailPath {
  std::uint64_t sent = 0;    // bytes of frames pulled in this epoch
  std::uint64_t acked = 0;   // bytes acknowledged by the path
  TimeNs acked_at = 0;       // time of the last path ack of new bytes
  std::uint64_t landed = 0;  // bytes seen by the peer's process; verbs rails only
  std::unordered_map<std::uint64_t, RemoteSlots> remote_slots;  // by communicator
  Ring<Attempt> attempts;
  TimeNs round_trip = 0;
  TimeNs base_round_trip = 0;
  std::uint64_t held_back = 0;
  TimeNs outstanding_since = 0;
  TimeNs last_rx = 0;
  TimeNs last_tx = 0;
  // Returns the expected time for `bytes` in ns, at `rate` bytes/s.  Rate 0: no transfer time.
  [[nodiscard]] double time_for(std::uint64_t bytes, double rate) const {
    const double transfer = rate > 0 ? static_cast<double>(bytes) * 1e9 / rate : 0;
    return static_cast<double>(base_round_trip) + transfer;
  }
};

// A copy of a message, due on a rail.
struct Copy {
  OutStream* stream;
  std::uint64_t number;
};

// A chunk to send again.
struct Replay {
  OutStream* stream;
  std::uint64_t number;
  std::uint16_t chunk;
  RailId target;  // the only rail for this replay, or any_rail
  bool hedge;
  RailId from;
};

// Evidence about the rail: rate, silence and probes.
struct RailHealth {
  RateMeter meter;
  bool slow = false;
  TimeNs differs = 0;        // how long the rate has contradicted `slow`
  TimeNs silent = 0;         // observed time without path progress, bytes outstanding
  TimeNs doubted_since = 0;  // while UP: end of half the ack deadline without an ack; 0 = none
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

// Position of the rail in the order of use.
struct RailPlace {
  bool reserve = false;
  std::uint8_t unit = 0;        // rails with an equal unit above 0 share fate
  std::uint8_t distance = 0;    // see LinkOptions::distances
  TimeNs endangered_until = 0;  // after the loss of a rail of the unit; 0: no loss
  RailTier tier = RailTier::data;
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
  std::uint32_t owed = 0;  // epoch that our tests or drills ended, told in a later epoch
  // State of our port that the peer has confirmed, in the last epoch.
  PortEvidence confirmed = PortEvidence::unknown;
  PortEvidence reported = PortEvidence::unknown;  // last report of the peer on its port
  Epoch reported_in = 0;                          // epoch of this report
};

}  // namespace r2ccl
