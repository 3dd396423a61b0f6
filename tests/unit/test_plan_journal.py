"""``r2serve plan --from-journal``: rails and lost rails of a node from its worker's journal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from r2serve.cli import main
from r2serve.cli.plan import lost_in_journals
from r2serve.errors import ConfigError
from r2serve.observe import journal
from r2serve.observe.journal import Journal, RailCounters


def rail(
    name: str, state: str = "UP", *, been_up: bool = True, reserve: bool = False
) -> RailCounters:
    return RailCounters(
        name=name,
        kind="tcp",
        peer="rank 1",
        device="",
        state=state,
        cause="none",
        verdict="none",
        slow=False,
        epoch=1,
        may_carry=True,
        graceful_close=False,
        peer_engine=1,
        since_ns=0,
        tx_bytes=0,
        rx_bytes=0,
        data_tx_bytes=0,
        replayed_chunks=0,
        hedged_chunks=0,
        last_tx_ns=0,
        round_trip_ns=0,
        rate=0,
        been_up=been_up,
        reserve=reserve,
    )


def read(*rails: RailCounters) -> tuple[str, Journal]:
    return "a.journal", Journal(process=1, rails=list(rails))


def test_a_port_without_a_rail_is_lost() -> None:
    one = read(
        rail("rail0@node2"),
        rail("rail1@node2", "DOWN"),
        rail("rail0@node2"),
        rail("rail1@node2", "FENCING"),
    )
    assert lost_in_journals([one]) == (2, ["rail1@node2"])


def test_a_port_with_a_rail_left_is_not_lost() -> None:
    one = read(
        rail("rail0@node2"),
        rail("rail1@node2", "DOWN"),
        rail("rail1@node2", "SUSPECT"),
    )
    assert lost_in_journals([one]) == (2, [])


def test_reserves_and_rails_inside_the_node_count_for_nothing() -> None:
    one = read(
        rail("shm@node0"),
        rail("control@node0", "DOWN"),
        rail("rail0@node0"),
        rail("rail1@node0", "DOWN", reserve=True),
        rail("rail2@node0", "CONNECTING", been_up=False),
    )
    assert lost_in_journals([one]) == (1, [])


def test_journals_of_several_nodes_and_ranks_add_up() -> None:
    found = lost_in_journals(
        [
            read(rail("rail0@node0"), rail("rail1@node0", "DOWN")),
            read(rail("rail0@node0"), rail("rail1@node0")),
            read(rail("rail0@node1", "DOWN"), rail("rail1@node1")),
        ]
    )
    assert found == (2, ["rail1@node0", "rail0@node1"])


@pytest.mark.parametrize(
    ("journals", "text"),
    [
        ([read(rail("shm@node0"))], "a.journal has no rail to another node that was up"),
        ([read(rail("rail0@node0"), rail("rail2@node0"))], "has the rails 0, 2; must be all"),
        (
            [
                read(rail("rail0@node0"), rail("rail1@node0")),
                read(rail("rail0@node1")),
            ],
            "has 1 rails; must be 2 as in the others",
        ),
    ],
)
def test_journals_that_make_no_plan_are_refused(
    journals: list[tuple[str, Journal]], text: str
) -> None:
    with pytest.raises(ConfigError, match="--from-journal: ") as refused:
        lost_in_journals(journals)
    assert text in str(refused.value)


def test_the_command_takes_rails_from_a_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r2ccl-1.journal"
    path.write_bytes(b"")
    rails = [rail(f"rail{number}@node3", "DOWN" if number == 1 else "UP") for number in range(4)]
    monkeypatch.setattr(journal, "read", lambda *_, **__: Journal(process=1, rails=rails))
    arguments = ["plan", "--from-journal", str(path), "--json"]
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    made = json.loads(done.output)
    assert made["cluster"]["rails"] == 4
    assert made["lost"] == ["rail1@node3"]
    assert [node["announced"] for node in made["nodes"]] == [0, 0, 0, 4]


def test_the_command_refuses_what_is_no_journal_and_rails_beside_one(tmp_path: Path) -> None:
    path = tmp_path / "r2ccl-1.journal"
    path.write_bytes(b"no journal")
    done = CliRunner().invoke(main, ["plan", "--from-journal", str(path)])
    assert done.exit_code != 0
    assert "too few for a journal" in done.output
    done = CliRunner().invoke(main, ["plan", "--from-journal", str(path), "--rails", "2"])
    assert done.exit_code != 0
    assert "--rails: 2; must be left out" in done.output
