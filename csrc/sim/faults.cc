#include "sim/faults.hpp"

#include <string>

namespace r2ccl::sim {
namespace {

constexpr TimeNs drill_time = 10 * ns_per_ms;

void open_hole(Port& port) { port.black_hole = true; }
void close_hole(Port& port) { port.black_hole = false; }

}  // namespace

void Faults::strike(FaultKind kind) {
  const int rank = pick(ranks());
  const int peer = (rank + 1 + pick(ranks() - 1)) % ranks();
  const auto rail = static_cast<RailId>(random_.below(rails()));
  const bool final = kind == FaultKind::process_death || kind == FaultKind::node_loss;
  if (final && lost_at_ != 0) return;
  ++result_.faults[static_cast<std::size_t>(kind)];
  world_.trace("FAULT " + std::string(name_of(kind)) + ": rank " + std::to_string(rank) +
               ", peer " + std::to_string(peer) + ", rail" + std::to_string(rail));
  const Target at{rank, peer, rail};
  switch (kind) {
    case FaultKind::carrier_loss: carrier(rank, rail, 0); break;
    case FaultKind::carrier_loss_both_ends:
      carrier(rank, rail, 0);
      carrier(peer, rail, 0);
      break;
    case FaultKind::late_notice: carrier(rank, rail, duration()); break;
    case FaultKind::black_hole: hole_both_ways(at); break;
    case FaultKind::one_way_loss: for_a_while(rank, peer, rail, open_hole, close_hole); break;
    case FaultKind::egress_refused: refuse_egress(at); break;
    case FaultKind::ack_backlog: acknowledge_late(at); break;
    case FaultKind::middlebox_ack: acknowledge_by_middlebox(at); break;
    case FaultKind::mtu_hole: drop_large(at); break;
    case FaultKind::lost_for_good: lose_for_good(rank, rail); break;
    case FaultKind::long_outage: outages_.emplace_back(rank, peer, rail); break;
    case FaultKind::reset: drill_reset(at); break;
    case FaultKind::half_open: world_.half_open(rank, peer, rail); break;
    case FaultKind::delay: delay_packets(at); break;
    case FaultKind::slow: slow_down(at); break;
    case FaultKind::flap: flap(rank, rail, 2 + pick(4)); break;
    case FaultKind::flap_all:
      for (RailId each = 0; each < rails(); ++each) flap(rank, each, 2 + pick(3));
      break;
    case FaultKind::all_down:
      for (RailId each = 0; each < rails(); ++each) hole_both_ways({rank, peer, each});
      break;
    case FaultKind::corrupt:
      for (RailId each = 0; each < rails(); ++each)
        world_.disturb(rank, peer, each, [](Port& port) { port.flips = 1; });
      break;
    case FaultKind::late_completions: break;  // make_job() sets poll_ns for the whole job
    case FaultKind::duplicate_completion:
      world_.disturb(rank, peer, rail, [](Port& port) { port.duplicates = 2; });
      break;
    case FaultKind::late_landing: land_late(at); break;
    case FaultKind::phantom_success: succeed_falsely(at); break;
    case FaultKind::slow_fence:
      world_.delay_fences(rank, 3, random_.between(100'000, 60 * ns_per_ms));
      break;
    case FaultKind::endless_fence:
      endless_ = true;
      world_.delay_fences(rank, 1, -1);
      break;
    case FaultKind::lost_notice: lose_notices(at); break;
    case FaultKind::process_pause: world_.pause(rank, duration()); break;
    case FaultKind::clock_jump:
      world_.jump_clock(rank, random_.between(ns_per_ms, 500 * ns_per_ms));
      break;
    case FaultKind::process_death: kill(rank); break;
    case FaultKind::node_loss: isolate(rank, peer); break;
  }
}

// ---- faults of a port ----

void Faults::hole_both_ways(const Target& at) {
  for_a_while(at.rank, at.peer, at.rail, open_hole, close_hole);
  for_a_while(at.peer, at.rank, at.rail, open_hole, close_hole);
}

void Faults::refuse_egress(const Target& at) {
  for_a_while(
      at.rank, at.peer, at.rail, [](Port& port) { port.refuses = true; },
      [](Port& port) { port.refuses = false; });
}

void Faults::drop_large(const Target& at) {
  for_a_while(
      at.rank, at.peer, at.rail, [](Port& port) { port.largest = 200; },
      [](Port& port) { port.largest = Port{}.largest; });
}

void Faults::delay_packets(const Target& at) {
  const TimeNs late = random_.between(50'000, 5 * ns_per_ms);
  for_a_while(
      at.rank, at.peer, at.rail, [late](Port& port) { port.extra_latency_ns = late; },
      [](Port& port) { port.extra_latency_ns = 0; });
}

void Faults::slow_down(const Target& at) {
  for_a_while(
      at.rank, at.peer, at.rail,
      [this](Port& port) { port.slowdown = static_cast<TimeNs>(20 + random_.below(300)); },
      [](Port& port) { port.slowdown = 1; });
}

// ---- faults of acknowledgements, connections and notices ----

void Faults::acknowledge_late(const Target& at) {
  // The NIC of a verbs rail acknowledges by itself.
  if (world_.options().rails[at.rail] == RailKind::verbs) return;
  // Between the ack deadline and the dead deadline: a reason to hedge, no reason to go down.
  world_.delay_acks(at.rank, at.peer, at.rail, random_.between(2 * ns_per_ms, 8 * ns_per_ms));
  after(duration(), [this, at] { world_.delay_acks(at.rank, at.peer, at.rail, 0); });
}

void Faults::acknowledge_by_middlebox(const Target& at) {
  // No hop ends the transport of a verbs rail.
  if (world_.options().rails[at.rail] == RailKind::verbs) return;
  world_.disturb(at.rank, at.peer, at.rail, [](Port& port) { port.boxed = true; });
  after(duration(), [this, at, loses = random_.below(2) == 0] {
    if (isolated(at.rank, at.peer)) return;
    if (loses) world_.reset(at.rank, at.peer, at.rail);
    world_.disturb(at.rank, at.peer, at.rail, [](Port& port) { port.boxed = false; });
  });
}

void Faults::drill_reset(const Target& at) {
  world_.drill(at.rank, at.peer, at.rail, /*begins=*/true);
  world_.reset(at.rank, at.peer, at.rail);
  after(drill_time, [this, at] { world_.drill(at.rank, at.peer, at.rail, /*begins=*/false); });
}

void Faults::land_late(const Target& at) {
  for_a_while(
      at.rank, at.peer, at.rail,
      [this](Port& port) { port.landing_ns = random_.between(50'000, 10 * ns_per_ms); },
      [](Port& port) { port.landing_ns = 0; });
}

void Faults::succeed_falsely(const Target& at) {
  world_.disturb(at.rank, at.peer, at.rail, [this](Port& port) {
    port.phantoms = 1 + static_cast<std::uint32_t>(random_.below(3));
  });
  after(random_.between(100'000, 3 * ns_per_ms), [this, at] {
    world_.disturb(at.rank, at.peer, at.rail, [](Port& port) { port.phantoms = 0; });
    world_.fail_rail(at.peer, at.rank, at.rail, RailCause::injected);
  });
}

void Faults::lose_notices(const Target& at) {
  // In half of the cases a rail is lost as well, so a notice is due while notices get lost.
  if (random_.below(2) == 0) lose_for_good(at.rank, static_cast<RailId>((at.rail + 1U) % rails()));
  world_.disturb(at.rank, at.peer, at.rail, [](Port& port) { port.lost_notices = 3; });
  after(duration(), [this, at] {
    world_.disturb(at.rank, at.peer, at.rail, [](Port& port) { port.lost_notices = 0; });
  });
}

// ---- losses of a process or a node ----

void Faults::kill(int rank) {
  dead_ = rank;
  lost_at_ = world_.now();
  world_.kill(rank, /*kernel_lives=*/random_.below(2) == 0);
}

void Faults::isolate(int rank, int peer) {
  isolated_ = {std::min(rank, peer), std::max(rank, peer)};
  lost_at_ = world_.now();
  for (RailId each = 0; each < rails(); ++each) {
    world_.disturb(rank, peer, each, open_hole);
    world_.disturb(peer, rank, each, open_hole);
  }
}

}  // namespace r2ccl::sim
