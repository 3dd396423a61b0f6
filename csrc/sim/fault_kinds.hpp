// Every kind of fault of the simulated world, and how often a seed makes use of it.  Kinds that the
// table of docs/failover.md has are named as there.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace r2ccl::sim {

enum class FaultKind : std::uint8_t {
  carrier_loss,            // a port loses its carrier; its own side is told
  carrier_loss_both_ends,  // both do
  black_hole,              // nothing passes, either way, and nobody is told
  one_way_loss,            // one way only
  mtu_hole,                // small packets pass, large ones vanish
  lost_for_good,           // a rail that is needless is gone until the calls are over
  long_outage,             // a rail is gone for long after that, and then comes back
  reset,                   // the path breaks the connection
  half_open,               // one end is gone, and nothing tells the other
  delay,                   // one rail is late: reorder between rails
  slow,                    // a fraction of the bandwidth
  flap,                    // a rail goes and comes, several times
  flap_all,                // all rails of a pair do
  all_down,                // no rail at all, for a while
  corrupt,                 // of what a port sends
  late_completions,        // queues are polled late, in any order between rails
  duplicate_completion,    // a completion is found twice
  late_landing,            // what a port has acknowledged is not in memory yet
  phantom_success,         // acknowledged by a port that then dies with it
  slow_fence,              // late writes of an ended epoch land after the fence was asked for
  endless_fence,           // a fence that never completes
  lost_notice,             // a message without data is acknowledged and lost
  late_notice,             // the loss of carrier is told late
  process_pause,           // a rank does not run
  clock_jump,              // its clock jumps forward
  process_death,           // a rank is gone, its host or its process alone
  node_loss,               // two ranks never see each other again
};
inline constexpr std::size_t fault_kinds = static_cast<std::size_t>(FaultKind::node_loss) + 1;
[[nodiscard]] std::string_view name_of(FaultKind kind);

// How likely a seed makes use of each kind at all, from 0 to 1.  Seeds that use few kinds reach
// states that seeds of all kinds never see.
struct FaultOptions {
  double carrier_loss = 0.25;
  double carrier_loss_both_ends = 0.15;
  double black_hole = 0.25;
  double one_way_loss = 0.25;
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

  double on_gpu = 0.25;      // no fault: collectives of a communicator come from GPUs
  double exchanges = 0.15;   // no fault: ranks are nodes, whose GPUs exchange inside them
  double engine_ends = 0.3;  // no fault: the engine of one such GPU ends, at any time

  [[nodiscard]] double of(FaultKind kind) const;
  void set(FaultKind kind, double chance);
};

}  // namespace r2ccl::sim
