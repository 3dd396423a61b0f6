"""Fault injection by a player: at the ports of a lab, and in the fault file of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from r2serve.demo.faults import EngineInjector
from r2serve.lab.injector import Injector, LabInjector
from r2serve.lab.kinds import KINDS, Change, FaultMaker
from r2serve.lab.player import Player
from r2serve.lab.schedule import Aim, Fault

SCHEDULE = (
    Fault(0.0, "carrier_loss", 0, 1, 0.02),
    Fault(0.05, "black_hole", 1, Aim.ALL, 0.02),
    Fault(0.1, "flap", 0, Aim.IN_USE, 0.02),
)


class FakeLab:
    """Records each of its commands."""

    rails = 2

    def __init__(self) -> None:
        self.done: list[tuple[Any, ...]] = []

    def cut(self, node: int, rail: int | None) -> None:
        self.done.append(("cut", node, rail))

    def black_hole(self, node: int, rail: int | None) -> None:
        self.done.append(("black_hole", node, rail))

    def heal(self, node: int, rail: int | None) -> None:
        self.done.append(("heal", node, rail))


def play(injector: Injector, faults: Sequence[Fault]) -> list[tuple[int, ...]]:
    player = Player(faults, injector, seconds=0, aim=lambda: 0)
    assert player.play()
    return [played.rails for played in player.played]


def test_one_schedule_is_played_in_a_lab_and_in_an_engine(tmp_path: Path) -> None:
    lab: Any = FakeLab()
    path = tmp_path / "faults"
    rails = [play(injector, SCHEDULE) for injector in (LabInjector(lab), EngineInjector(path, 2))]
    assert rails == [[(1,), (0, 1), (0,)]] * 2
    assert lab.done == [
        ("cut", 0, 1),
        ("heal", 0, 1),
        ("black_hole", 1, 0),
        ("black_hole", 1, 1),
        ("heal", 1, 0),
        ("heal", 1, 1),
        ("cut", 0, 0),
        ("heal", 0, 0),
    ]
    assert path.read_text(encoding="ascii").splitlines() == [
        "1 carrier_loss",
        "1 heal",
        "0 black_hole",
        "1 black_hole",
        "0 heal",
        "1 heal",
        "0 flap",
        "0 heal",
    ]


def test_a_lab_s_management_nic_is_a_fault_of_the_node() -> None:
    lab: Any = FakeLab()
    assert play(LabInjector(lab), [Fault(0.0, "carrier_loss", 1, Aim.MANAGEMENT, 0.01)]) == [()]
    assert lab.done == [("cut", 1, None), ("heal", 1, None)]


def test_an_engine_has_no_management_nic(tmp_path: Path) -> None:
    fault = Fault(0.0, "carrier_loss", 1, Aim.MANAGEMENT, 0.01)
    with pytest.raises(ValueError, match="rail is None: must be an index"):
        play(EngineInjector(tmp_path / "faults", 2), [fault])


@pytest.mark.parametrize("rail", [1, None])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_made_by_its_maker(
    kind: str, rail: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[Any, ...]] = []

    def change(what: str) -> Change:
        return lambda _, node, rail: done.append((what, node, rail))

    monkeypatch.setitem(KINDS, kind, FaultMaker(change("make"), change("undo")))
    lab: Any = FakeLab()
    LabInjector(lab).make(kind, 0, rail)
    LabInjector(lab).undo(kind, 0, rail)
    assert done == [("make", 0, rail), ("undo", 0, rail)]
