// Fault kinds of the simulated world, and the probability of each kind per seed.
// docs/architecture.md lists every name.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace r2ccl::sim {

enum class FaultKind : std::uint8_t {
  carrier_loss,            // a port loses its carrier; only its own side is notified
  carrier_loss_both_ends,  // ports of both ends lose their carrier
  black_hole,              // nothing passes in either direction, without any error
  one_way_loss,            // nothing passes in a single direction
  egress_refused,          // the own host does not send, and the kernel counts nothing as sent
  ack_backlog,             // the kernel of a port's host acknowledges late
  middlebox_ack,           // a hop acknowledges bytes, and delivers them late or never
  mtu_hole,                // small packets pass, large packets vanish
  lost_for_good,           // a spare rail is gone until all calls are over
  long_outage,             // after all calls, a rail is gone for a long time, then returns
  reset,                   // the path resets the connection
  half_open,               // an end fails without notice to the other end
  delay,                   // extra latency on a rail: reorders frames between rails
  slow,                    // a fraction of the bandwidth
  flap,                    // a rail goes down and up several times
  flap_all,                // all rails of a rank flap
  all_down,                // no rail of a pair passes traffic for a while
  corrupt,                 // bits flip in data sent by a port
  late_completions,        // completion queues are polled late, in any order between rails
  duplicate_completion,    // a completion is found twice
  late_landing,            // acknowledged messages reach memory late
  phantom_success,         // a port acknowledges messages and dies with them
  slow_fence,              // late writes of an ended epoch land during a slow fence
  endless_fence,           // a fence never completes
  lost_notice,             // a message without data is acknowledged and lost
  late_notice,             // carrier loss is reported late
  process_pause,           // a rank does not run for a while
  clock_jump,              // a rank's clock jumps forward
  process_death,           // a process dies, alone or with its host
  node_loss,               // two ranks lose each other permanently
};
inline constexpr std::size_t fault_kinds = static_cast<std::size_t>(FaultKind::node_loss) + 1;
[[nodiscard]] std::string_view name_of(FaultKind kind);

// Probability, from 0 to 1, that a seed uses each kind at all.  Seeds with few kinds reach states
// that are unreachable with all kinds enabled.
struct FaultOptions {
  double carrier_loss = 0.25;
  double carrier_loss_both_ends = 0.15;
  double black_hole = 0.25;
  double one_way_loss = 0.25;
  double egress_refused = 0.15;
  double ack_backlog = 0.15;
  double middlebox_ack = 0.15;
  double mtu_hole = 0.1;
  double lost_for_good = 0.15;
  double long_outage = 0.05;
  double reset = 0.25;
  double half_open = 0.2;
  double delay = 0.25;
  double slow = 0.15;
  double flap = 0.15;
  double flap_all = 0.1;
  double all_down = 0.1;
  double corrupt = 0.15;
  double late_completions = 0.3;
  double duplicate_completion = 0.2;
  double late_landing = 0.15;
  double phantom_success = 0.2;
  double slow_fence = 0.2;
  double endless_fence = 0.02;
  double lost_notice = 0.2;
  double late_notice = 0.2;
  double process_pause = 0.2;
  double clock_jump = 0.15;
  double process_death = 0.04;
  double node_loss = 0.03;

  double on_gpu = 0.25;      // not a fault: GPUs post the collectives of a communicator
  double exchanges = 0.15;   // not a fault: ranks are nodes with GPUs that exchange locally
  double reserves = 0.3;     // not a fault: some rails are reserves
  double units = 0.3;        // not a fault: some rails share a port, so a loss endangers the others
  double streams = 0.3;      // not a fault: ranks have byte streams to each other
  double posted = 0.2;       // not a fault: ranks have posted messages to each other
  double engine_ends = 0.3;  // not a fault: the engine of an exchanging GPU ends at a random time
  double compared = 0.3;     // not a fault: a communicator has steps and compares positions
  double parted = 0.3;       // a rank of such a communicator leaves out a call

  [[nodiscard]] double of(FaultKind kind) const;
  void set(FaultKind kind, double chance);
};

}  // namespace r2ccl::sim
