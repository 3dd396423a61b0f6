"""A worker's log line about a fault: which losses have a single cause."""

from __future__ import annotations

from dataclasses import replace

from r2serve.observe.fault_report import TOGETHER_NS, StallReport
from r2serve.observe.journal import Event, Journal, RailCounters

MS = 1_000_000
BEGAN = 10_000 * MS


class NoSource:
    """No test here reads an engine."""

    def journal_bytes(self) -> bytes:
        raise AssertionError


def rail(name: str, unit: int = 0, peer: int = 1) -> RailCounters:
    return RailCounters(
        name=name,
        kind="tcp",
        peer=f"rank {peer}",
        device="",
        state="DOWN",
        cause="carrier_loss",
        verdict="none",
        slow=False,
        epoch=1,
        may_carry=True,
        graceful_close=False,
        peer_engine=peer,
        since_ns=0,
        tx_bytes=0,
        rx_bytes=0,
        data_tx_bytes=0,
        replayed_chunks=0,
        hedged_chunks=0,
        last_tx_ns=0,
        round_trip_ns=0,
        rate=0,
        unit=unit,
    )


def loss(
    rails: list[RailCounters],
    entry: int,
    at_ns: int,
    cause: str = "carrier_loss",
    *,
    drill: bool = False,
) -> Event:
    lost = rails[entry]
    return Event(
        time_ns=BEGAN + at_ns,
        kind="rail_state",
        rail=lost.name,
        peer=lost.peer,
        epoch=1,
        comm=0,
        call=0,
        value=1,
        detail=int(drill),
        text=f"UP->DOWN {cause}",
        entry=entry,
    )


def line(rails: list[RailCounters], *events: Event) -> str:
    read = Journal(process=1, rails=rails, events=list(events))
    return StallReport(NoSource(), since_ns=BEGAN).line(read).partition(": 0.0 ms stall")[0]


def test_losses_of_a_shared_port_are_one_cause() -> None:
    rails = [rail("rail0@node0", 1), rail("rail1@node0", 1), rail("rail2@node0")]
    rails.append(replace(rails[2], state="UP"))
    assert line(rails, loss(rails, 0, 0), loss(rails, 1, 1 * MS)) == (
        "rail0@node0 and rail1@node0 to rank 1 were lost together (carrier_loss): one cause, "
        "because they share a port"
    )


def test_independent_ports_are_never_told_as_shared() -> None:
    apart = [rail("rail0@node0"), rail("rail1@node0")]
    two = (
        "rail0@node0 to rank 1 was lost (carrier_loss); "
        "rail1@node0 to rank 1 was lost (carrier_loss)"
    )
    assert line(apart, loss(apart, 0, 0), loss(apart, 1, 0)) == two
    units = [rail("rail0@node0", 1), rail("rail1@node0", 2)]
    assert line(units, loss(units, 0, 0), loss(units, 1, 0)) == two


def test_losses_far_apart_or_of_another_kind_are_two_causes() -> None:
    rails = [rail("rail0@node0", 1), rail("rail1@node0", 1)]
    assert "together" not in line(rails, loss(rails, 0, 0), loss(rails, 1, TOGETHER_NS + 1))
    silent = loss(rails, 1, 0, "dead_deadline")
    assert "together" not in line(rails, loss(rails, 0, 0), silent)


def test_a_shared_port_is_lost_to_all_peers() -> None:
    rails = [rail(f"rail{i}@node0", 1, peer) for peer in (1, 2) for i in (0, 1)]
    assert line(rails, *(loss(rails, entry, 0) for entry in range(4))) == (
        "rail0@node0 and rail1@node0 to rank 1, rank 2 were lost together (carrier_loss): one "
        "cause, because they share a port"
    )


def said(rails: list[RailCounters], *events: Event) -> str:
    """Returns the whole line."""
    read = Journal(process=1, rails=rails, events=list(events))
    return StallReport(NoSource(), since_ns=BEGAN).line(read)


def test_a_loss_in_a_drill_is_told_as_a_drill_at_any_time() -> None:
    rails = [rail("rail0@node0")]
    late = loss(rails, 0, 14_000 * MS, drill=True)  # a flap: long after the begin of the drill
    assert line(rails, late) == "drill: rail0@node0 to rank 1 was lost (carrier_loss)"


def test_a_real_loss_during_a_drill_is_told_as_real() -> None:
    rails = [rail("rail0@node0", 1), rail("rail1@node0", 1)]
    begin = replace(loss(rails, 0, 0, drill=True), kind="injected", text="carrier_loss", value=0)
    drilled, real = loss(rails, 0, 0, drill=True), loss(rails, 1, 1 * MS)
    assert line(rails, begin, drilled, real) == (
        "drill: rail0@node0 to rank 1 was lost (carrier_loss); "
        "rail1@node0 to rank 1 was lost (carrier_loss)"
    )
    healed = replace(begin, text="heal", detail=0)
    assert line(rails, healed, real) == "rail1@node0 to rank 1 was lost (carrier_loss)"


def test_rails_that_are_up_are_never_told_as_lost() -> None:
    up = [replace(rail(f"rail{i}@node0", 0, peer), state="UP") for peer in (1, 2) for i in (0, 1)]
    assert said(up) == (
        "no loss or suspicion of a rail is recorded: 0.0 ms stall in 0 steps; carried by "
        "rail0@node0, rail1@node0; no request waited"
    )
    repeated = replace(loss(up, 0, 0), kind="replay", text="", value=3)
    assert said(up, repeated).startswith("chunks of rail0@node0 to rank 1 were sent again: ")


def test_a_peer_without_a_rail_is_named() -> None:
    rails = [rail("rail0@node0", 0, 1), replace(rail("rail0@node0", 0, 2), state="UP")]
    assert "; no rail to rank 1 is left; " in said(rails, loss(rails, 0, 0))
    both = said(rails, loss(rails, 0, 0), loss(rails, 1, 0))
    assert "; carried by rail0@node0, no rail to rank 1 is left; " in both


def test_a_port_lost_to_many_peers_is_told_once_by_port_and_host() -> None:
    rails = [
        replace(rail(f"rail{number}@node0", 0, peer), device=f"mlx5_{number}")
        for peer in range(1, 9)
        for number in (0, 1)
    ]
    left = [replace(one, state="UP") if one.name == "rail1@node0" else one for one in rails]
    losses = [loss(left, entry, entry * MS) for entry in range(0, 16, 2)]
    read = Journal(process=1, rails=left, events=losses)
    told = StallReport(NoSource(), since_ns=BEGAN, host="gpu-host-17").line(read)
    assert told == (
        "rail0@node0 (mlx5_0) on gpu-host-17 to 8 peers was lost (carrier_loss): 0.0 ms stall in "
        "0 steps; carried by rail1@node0; no request waited"
    )
    again = [replace(one, kind="replay", text="", value=3) for one in losses]
    told = StallReport(NoSource(), since_ns=BEGAN).line(replace(read, events=again))
    assert told.startswith("chunks of rail0@node0 to 8 peers were sent again: ")
