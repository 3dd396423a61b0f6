"""Drills on real ports, by the system and by the engine, undone even if the command dies."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab_probes import datagrams_arrive
from real_rails import MOST_TRIES, REJOIN_S, Stream, moves_of
from timely import ended

from r2serve.lab.holder import LabCommandError
from r2serve.lab.lab import Lab

CODE = "from r2serve.cli import main; main()"
LONG = "600s"
SNMP = "/proc/net/snmp"  # counters of the network namespace


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Returns a folder with a short path: the socket of a drill lies in the journals' folder."""
    with tempfile.TemporaryDirectory(prefix="r2-") as folder:
        yield Path(folder)


@pytest.fixture
def stream(jobs: Any, make_lab: Any, tmp_path: Path) -> Stream:
    def options(rank: int) -> dict[str, Any]:
        folder = tmp_path / f"node{rank}"
        folder.mkdir(exist_ok=True)
        return {"journal_dir": str(folder), "drills": True}

    return Stream(jobs, make_lab(2), per_rank=options, checksum=True)


def drill(lab: Lab, folder: Path, kind: str, rail: int, *options: str) -> subprocess.Popen[bytes]:
    words = ["drill", kind, "--rail", f"rail{rail}@node0", "--journal-dir", str(folder), "--json"]
    return lab.nodes[0].popen(
        [sys.executable, "-c", CODE, *words, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def said(command: subprocess.Popen[bytes]) -> dict[str, Any]:
    assert command.stdout is not None
    line = command.stdout.readline()
    assert line, command.stderr.read().decode() if command.stderr else ""
    told: dict[str, Any] = json.loads(line)
    return told


def injected(stream: Stream, rail: int) -> list[str]:
    events = stream.ranks[0].ask({"do": "events"})
    return [e["text"] for e in events if e["kind"] == "injected" and e["rail"] == name_of(rail)]


def name_of(rail: int) -> str:
    return f"rail{rail}@node0"


def first_losses(stream: Stream, rail: int) -> list[bool]:
    """Whether the first loss of the rail is told as a drill, for each end that has lost it."""
    events = [rank.ask({"do": "events"}) for rank in stream.ranks]
    moves = [moves_of([of_rank], "DOWN", rail) for of_rank in events]
    losses = [[move for move in of_rank if move["value"] == 1] for of_rank in moves]
    return [of_rank[0]["detail"] == 1 for of_rank in losses if of_rank]


def has_left_up(stream: Stream, rail: int) -> bool:
    """Whether the rail was SUSPECT or DOWN at an end since the last look at the journals."""
    events = stream.look()
    return bool(moves_of(events, "SUSPECT", rail) or moves_of(events, "DOWN", rail))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "by"),
    [
        ("carrier_loss", "system"),
        ("carrier_loss", "engine"),
        ("black_hole", "system"),
        ("black_hole", "engine"),
        ("egress_refused", "system"),
    ],
)
def test_a_drill_takes_a_rail_down_and_heals_the_rail(
    stream: Stream, tmp_path: Path, eventually: Any, kind: str, by: str
) -> None:
    rail = stream.busiest()
    stream.look()
    command = drill(stream.lab, tmp_path / "node0", kind, rail, "--for", "2s", "--by", by)
    assert said(command)["by"] == by
    eventually(f"rail {rail} lost", lambda: has_left_up(stream, rail), REJOIN_S)
    assert ended(command, "the drill") == 0
    eventually(f"rail {rail} UP", lambda: stream.is_up(rail), REJOIN_S)
    eventually("recorded", lambda: injected(stream, rail) == [kind, "heal"], REJOIN_S)
    assert all(first_losses(stream, rail)), "an end told the drill as a fault"
    stream.finish()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["carrier_loss", "black_hole", "egress_refused", "slow"])
def test_the_system_undoes_a_killed_drill(
    stream: Stream, tmp_path: Path, eventually: Any, kind: str
) -> None:
    rail = stream.busiest()
    folder = tmp_path / "node0"
    command = drill(stream.lab, folder, kind, rail, "--for", "1500ms", "--by", "system")
    assert said(command)["by"] == "system"
    command.kill()
    command.wait()

    def faulted() -> bool:
        node = stream.lab.nodes[0]
        link = json.loads(node.run("ip", "-json", "link", "show", "dev", f"rail{rail}"))[0]
        tables = node.run("nft", "list", "tables")
        queues = node.run("tc", "qdisc", "show", "dev", f"rail{rail}")
        return link["operstate"] != "UP" or "r2serve_drill" in tables or "tbf" in queues

    eventually("undone", lambda: not faulted(), REJOIN_S)
    eventually(f"rail {rail} UP", lambda: stream.is_up(rail), REJOIN_S)
    eventually("recorded", lambda: injected(stream, rail) == [kind, "heal"], REJOIN_S)
    stream.finish()


@pytest.mark.timeout(300)
def test_an_interrupted_drill_is_undone_at_once(
    stream: Stream, tmp_path: Path, eventually: Any
) -> None:
    rail = stream.busiest()
    command = drill(
        stream.lab, tmp_path / "node0", "carrier_loss", rail, "--for", LONG, "--by", "system"
    )
    said(command)
    eventually(f"rail {rail} lost", lambda: not stream.is_up(rail), REJOIN_S)
    command.terminate()  # long before the drill's own end
    assert ended(command, "the drill") == 0, command.stderr.read() if command.stderr else ""
    eventually(f"rail {rail} UP", lambda: stream.is_up(rail), REJOIN_S)
    stream.finish()


@pytest.mark.timeout(300)
def test_refused_egress_drops_outgoing_packets_alone(
    stream: Stream, tmp_path: Path, eventually: Any
) -> None:
    """Packets from the peer still reach the sockets of this node."""
    rail = stream.busiest()
    near, far = stream.lab.nodes
    command = drill(
        stream.lab, tmp_path / "node0", "egress_refused", rail, "--for", LONG, "--by", "auto"
    )
    assert said(command)["by"] == "system"

    def refused() -> bool:
        try:
            datagrams_arrive(near, far, rail, 200)
        except LabCommandError as error:
            return "Operation not permitted" in str(error)
        return False

    def packets_without_a_port() -> int:
        names, values = (line.split() for line in near.run("grep", "Udp:", SNMP).splitlines())
        return int(values[names.index("NoPorts")])

    eventually("outgoing packets refused", refused, REJOIN_S)
    before = packets_without_a_port()
    assert datagrams_arrive(far, near, rail, 200)
    eventually("packets in", lambda: packets_without_a_port() == before + 3)
    command.terminate()
    assert ended(command, "the drill") == 0
    assert datagrams_arrive(near, far, rail, 200)
    stream.finish()


@pytest.mark.timeout(300)
def test_the_engine_refuses_a_fault_of_the_system(stream: Stream, tmp_path: Path) -> None:
    command = drill(stream.lab, tmp_path / "node0", "egress_refused", 0, "--by", "engine")
    _, error = command.communicate(timeout=120)
    assert command.returncode == 1
    assert b"by: 'engine' cannot make egress_refused; must be system" in error
    assert injected(stream, 0) == []
    stream.finish()


@pytest.mark.timeout(300)
def test_a_corrupt_rail_is_left_without_a_wrong_bit(
    stream: Stream, tmp_path: Path, eventually: Any
) -> None:
    causes: list[str] = []
    for _ in range(MOST_TRIES):  # a starved stream may send nothing during a drill
        rail = stream.busiest()
        command = drill(stream.lab, tmp_path / "node0", "corrupt", rail, "--for", "2s")
        assert said(command)["by"] == "engine"  # the system does not support this kind of fault
        assert ended(command, "the drill") == 0
        causes = [e["text"] for e in stream.ranks[1].ask({"do": "events"}) if e["value"] == 1]
        eventually(f"rail {rail} UP", lambda r=rail: stream.is_up(r), REJOIN_S)
        if any("checksum" in text for text in causes):
            break
    assert any("checksum" in text for text in causes), causes
    stream.finish()  # fails after a wrong bit
