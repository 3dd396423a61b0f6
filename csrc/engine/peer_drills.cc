// Peer: injected faults and drills, by this process and by the peer.
#include <string>
#include <utility>

#include "base/clock.hpp"
#include "engine/peer.hpp"

namespace r2ccl {

std::string_view name_of(Fault fault) {
  switch (fault) {
    case Fault::none: return "heal";
    case Fault::carrier_loss: return "carrier_loss";
    case Fault::black_hole: return "black_hole";
    case Fault::reset: return "reset";
    case Fault::slow: return "slow";
    case Fault::corrupt: return "corrupt";
    case Fault::egress_refused: return "egress_refused";
  }
  return "unknown";
}

std::optional<Fault> fault_named(std::string_view name) {
  for (const Fault fault : {Fault::none, Fault::carrier_loss, Fault::black_hole, Fault::reset,
                            Fault::slow, Fault::corrupt, Fault::egress_refused})
    if (name == name_of(fault)) return fault;
  if (name == "cut") return Fault::carrier_loss;
  if (name == "drop") return Fault::black_hole;
  if (name == "error") return Fault::reset;
  return std::nullopt;
}

// A dormant rail is hidden until it works; the peer may have shown its end before.
void Peer::on_injected(RailId rail) {
  if (rails[rail].dormant) return;
  note(rail, {.time_ns = now_ns(), .kind = JournalKind::injected, .from = 1, .to = unknown_drill});
  log_.add(LogLevel::info,
           rails[rail].name + ": a test or drill at " + label + " has taken this rail down");
}

void Peer::on_drill(RailId rail, std::uint8_t kind, bool over) {
  if (rails[rail].dormant) return;
  note(rail, {.time_ns = now_ns(),
              .kind = JournalKind::injected,
              .from = 1,
              .to = over ? static_cast<std::uint8_t>(Fault::none) : kind});
  log_.add(LogLevel::info, rails[rail].name + " to " + label + ": " + label +
                               (over ? " ends" : " begins") + " a drill (" +
                               std::string(name_of(static_cast<Fault>(kind))) + ")");
}

void Peer::note_injected(RailId rail, Fault fault) {
  const TimeNs now = now_ns();
  link.set_injected(rail, takes_down(fault));
  // A `reset` beside a fault that lasts belongs to its drill, which goes on.
  const bool beside = fault == Fault::reset && rails[rail].fault != Fault::none;
  if (!rails[rail].announced && !beside) {
    if (fault != Fault::none)
      link.begin_drill(rail, static_cast<std::uint8_t>(fault), longest_drill_ns, now);
    if (fault == Fault::none || fault == Fault::reset) link.end_drill(rail, now);
  }
  note(rail,
       {.time_ns = now, .kind = JournalKind::injected, .to = static_cast<std::uint8_t>(fault)});
}

void Peer::announce_drill(RailId rail, Fault fault, TimeNs duration) {
  const TimeNs now = now_ns();
  rails[rail].announced = true;
  link.begin_drill(rail, static_cast<std::uint8_t>(fault), duration, now);
  publish(rail);
  send(now);
}

void Peer::end_drill(RailId rail) {
  const TimeNs now = now_ns();
  if (!std::exchange(rails[rail].announced, false)) return;
  link.end_drill(rail, now);
  publish(rail);
  send(now);
}

// Returns ", in a drill (carrier_loss)" for the kind of Link::drill(); empty without a drill.
std::string Peer::drill_words(std::uint8_t kind) {
  if (kind == no_drill) return "";
  if (kind == unknown_drill) return ", in a drill";
  return ", in a drill (" + std::string(name_of(static_cast<Fault>(kind))) + ")";
}

}  // namespace r2ccl
