#include "sim/faults.hpp"

#include <string>

namespace r2ccl::sim {
namespace {

constexpr TimeNs drill_time = 10 * ns_per_ms;

}  // namespace

void Faults::strike(FaultKind kind) {
  const auto pick = [this](int below) {
    return static_cast<int>(random_.below(static_cast<std::uint64_t>(below)));
  };
  const int rank = pick(ranks());
  const int peer = (rank + 1 + pick(ranks() - 1)) % ranks();
  const auto rail = static_cast<RailId>(random_.below(rails()));
  const bool final = kind == FaultKind::process_death || kind == FaultKind::node_loss;
  if (final && lost_at_ != 0) return;
  ++result_.faults[static_cast<std::size_t>(kind)];
  world_.trace("FAULT " + std::string(name_of(kind)) + ": rank " + std::to_string(rank) +
               ", peer " + std::to_string(peer) + ", rail" + std::to_string(rail));
  const auto hole = [](Port& port) { port.black_hole = true; };
  const auto no_hole = [](Port& port) { port.black_hole = false; };
  switch (kind) {
    case FaultKind::carrier_loss: carrier(rank, rail, 0); break;
    case FaultKind::carrier_loss_both_ends:
      carrier(rank, rail, 0);
      carrier(peer, rail, 0);
      break;
    case FaultKind::late_notice: carrier(rank, rail, duration()); break;
    case FaultKind::black_hole:
      for_a_while(rank, peer, rail, hole, no_hole);
      for_a_while(peer, rank, rail, hole, no_hole);
      break;
    case FaultKind::one_way_loss: for_a_while(rank, peer, rail, hole, no_hole); break;
    case FaultKind::egress_refused:
      for_a_while(
          rank, peer, rail, [](Port& port) { port.refuses = true; },
          [](Port& port) { port.refuses = false; });
      break;
    case FaultKind::ack_backlog:
      if (world_.options().rails[rail] == RailKind::verbs) break;  // the NIC acknowledges by itself
      // Between the ack deadline and the dead deadline: a reason to hedge, no reason to go down.
      world_.delay_acks(rank, peer, rail, random_.between(2 * ns_per_ms, 8 * ns_per_ms));
      after(duration(), [this, rank, peer, rail] { world_.delay_acks(rank, peer, rail, 0); });
      break;
    case FaultKind::middlebox_ack:
      if (world_.options().rails[rail] == RailKind::verbs) break;  // no hop ends the transport
      world_.disturb(rank, peer, rail, [](Port& port) { port.boxed = true; });
      after(duration(), [this, rank, peer, rail, loses = random_.below(2) == 0] {
        if (isolated(rank, peer)) return;
        if (loses) world_.reset(rank, peer, rail);
        world_.disturb(rank, peer, rail, [](Port& port) { port.boxed = false; });
      });
      break;
    case FaultKind::mtu_hole:
      for_a_while(
          rank, peer, rail, [](Port& port) { port.largest = 200; },
          [](Port& port) { port.largest = Port{}.largest; });
      break;
    case FaultKind::lost_for_good: lose_for_good(rank, rail); break;
    case FaultKind::long_outage: outages_.emplace_back(rank, peer, rail); break;
    case FaultKind::reset:  // a drill of `reset`
      world_.drill(rank, peer, rail, /*begins=*/true);
      world_.reset(rank, peer, rail);
      after(drill_time,
            [this, rank, peer, rail] { world_.drill(rank, peer, rail, /*begins=*/false); });
      break;
    case FaultKind::half_open: world_.half_open(rank, peer, rail); break;
    case FaultKind::delay: {
      const TimeNs late = random_.between(50'000, 5 * ns_per_ms);
      for_a_while(
          rank, peer, rail, [late](Port& port) { port.extra_latency_ns = late; },
          [](Port& port) { port.extra_latency_ns = 0; });
      break;
    }
    case FaultKind::slow:
      for_a_while(
          rank, peer, rail,
          [this](Port& port) { port.slowdown = static_cast<TimeNs>(20 + random_.below(300)); },
          [](Port& port) { port.slowdown = 1; });
      break;
    case FaultKind::flap: flap(rank, rail, 2 + pick(4)); break;
    case FaultKind::flap_all:
      for (RailId each = 0; each < rails(); ++each) flap(rank, each, 2 + pick(3));
      break;
    case FaultKind::all_down:
      for (RailId each = 0; each < rails(); ++each) {
        for_a_while(rank, peer, each, hole, no_hole);
        for_a_while(peer, rank, each, hole, no_hole);
      }
      break;
    case FaultKind::corrupt:
      for (RailId each = 0; each < rails(); ++each)
        world_.disturb(rank, peer, each, [](Port& port) { port.flips = 1; });
      break;
    case FaultKind::late_completions: break;  // make_job() sets poll_ns for the whole job
    case FaultKind::duplicate_completion:
      world_.disturb(rank, peer, rail, [](Port& port) { port.duplicates = 2; });
      break;
    case FaultKind::late_landing:
      for_a_while(
          rank, peer, rail,
          [this](Port& port) { port.landing_ns = random_.between(50'000, 10 * ns_per_ms); },
          [](Port& port) { port.landing_ns = 0; });
      break;
    case FaultKind::phantom_success:
      world_.disturb(rank, peer, rail, [this](Port& port) {
        port.phantoms = 1 + static_cast<std::uint32_t>(random_.below(3));
      });
      after(random_.between(100'000, 3 * ns_per_ms), [this, rank, peer, rail] {
        world_.disturb(rank, peer, rail, [](Port& port) { port.phantoms = 0; });
        world_.fail_rail(peer, rank, rail, RailCause::injected);
      });
      break;
    case FaultKind::slow_fence:
      world_.delay_fences(rank, 3, random_.between(100'000, 60 * ns_per_ms));
      break;
    case FaultKind::endless_fence:
      endless_ = true;
      world_.delay_fences(rank, 1, -1);
      break;
    case FaultKind::lost_notice:
      // In half of the cases a rail is lost as well, so a notice is due while notices get lost.
      if (random_.below(2) == 0) lose_for_good(rank, static_cast<RailId>((rail + 1U) % rails()));
      world_.disturb(rank, peer, rail, [](Port& port) { port.lost_notices = 3; });
      after(duration(), [this, rank, peer, rail] {
        world_.disturb(rank, peer, rail, [](Port& port) { port.lost_notices = 0; });
      });
      break;
    case FaultKind::process_pause: world_.pause(rank, duration()); break;
    case FaultKind::clock_jump:
      world_.jump_clock(rank, random_.between(ns_per_ms, 500 * ns_per_ms));
      break;
    case FaultKind::process_death:
      dead_ = rank;
      lost_at_ = world_.now();
      world_.kill(rank, /*kernel_lives=*/random_.below(2) == 0);
      break;
    case FaultKind::node_loss:
      isolated_ = {std::min(rank, peer), std::max(rank, peer)};
      lost_at_ = world_.now();
      for (RailId each = 0; each < rails(); ++each) {
        world_.disturb(rank, peer, each, hole);
        world_.disturb(peer, rank, each, hole);
      }
      break;
  }
}

}  // namespace r2ccl::sim
