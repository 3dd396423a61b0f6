// Control frames queued for a rail.  Control frames need no credit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace r2ccl {

class InStream;
class OutStream;

struct Control {
  // Answer to an ack request for a communicator without a stream here.
  struct Answer {
    std::uint64_t communicator;
    std::uint64_t requested;  // time of the request; 0: the answer is no evidence of missing bytes
  };
  bool ping = false;
  bool pong = false;
  bool close = false;
  std::uint32_t ping_bytes = 0;
  std::uint64_t pong_number = 0;
  std::uint64_t notices = 0;            // bit r: RAIL_DOWN of rail r is due here
  std::uint64_t owed = 0;               // bit r: RAIL_DOWN of an epoch that a drill ended, see owed
  std::uint64_t drills = 0;             // bit r: DRILL about rail r is due here
  std::uint64_t drill_acks = 0;         // bit r: DRILL_ACK about rail r is due here
  std::uint64_t fenced = 0;             // bit r: FENCED of rail r is due here
  std::uint64_t posted = 0;             // number of frames of posted receives due here
  std::uint64_t addresses = 0;          // bit r: ADDRESS of rail r is due here
  std::vector<InStream*> slots;         // slot memory to announce to the peer
  std::vector<std::uint64_t> released;  // closed communicators: RELEASED is due here
  std::vector<InStream*> targets;       // targets to announce to the peer
  std::vector<InStream*> acks;
  std::vector<OutStream*> ack_requests;
  std::vector<Answer> answers;
  std::uint64_t aborts_sent = 0;    // number of the next abort to send on this rail
  std::uint64_t refusals_sent = 0;  // number of the next refusal to send on this rail
  // Returns true if a frame is due.  `aborts`, `refusals`: ends of these lists of the link.
  [[nodiscard]] bool any(std::uint64_t aborts, std::uint64_t refusals) const {
    return ping || pong || close ||
           (notices | owed | drills | drill_acks | fenced | addresses | posted) != 0 ||
           !acks.empty() || !ack_requests.empty() || !answers.empty() || aborts_sent < aborts ||
           refusals_sent < refusals || !slots.empty() || !released.empty() || !targets.empty();
  }
};

}  // namespace r2ccl
