"""Features of the engine while a rail is lost: the same answers as undisturbed."""

from __future__ import annotations

import re
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from answers import FLAG, RAILS
from features import EXACT, FEATURES, Feature
from timely import timely

from r2serve.observe.watch import Watch

if TYPE_CHECKING:
    from conftest import Engine

KINDS = ("carrier_loss", "black_hole")


class Rails:
    """The rails of an engine's workers, faulted by a file and seen in the journals."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "faults"
        self.file.touch(mode=0o600)
        self.journals = folder / "journals"
        self.journals.mkdir()
        self._watch = Watch(self.journals)

    @property
    def environment(self) -> dict[str, str]:
        return RAILS | {
            "R2CCL_NODE": "per-rank",
            "R2CCL_FAULT_FILE": str(self.file),
            "R2CCL_JOURNAL_DIR": str(self.journals),
        }

    def say(self, line: str) -> None:
        with self.file.open("a") as file:
            file.write(line + "\n")

    def all_up(self) -> bool:
        self._watch.look()
        rails = [rail for worker in self._watch.live() for rail in worker.journal.rails]
        data = [rail for rail in rails if rail.may_carry]
        return bool(data) and all(rail.state == "UP" for rail in data)

    def sent(self, rail: str) -> int:
        """Returns the bytes of data that the workers have sent on a rail, by its name's start."""
        self._watch.look()
        return sum(
            one.data_tx_bytes
            for worker in self._watch.live()
            for one in worker.journal.rails
            if one.name.startswith(rail)
        )

    def lost_ns(self, rail: str, after_ns: int) -> int:
        """Returns when a rail left UP after this time, CLOCK_MONOTONIC in ns; 0: it did not."""
        self._watch.look()
        times = (
            told.event.time_ns
            for told in self._watch.events
            if told.event.kind == "rail_state"
            and told.event.rail.startswith(rail)
            and told.event.text.startswith("UP->")
            and told.event.time_ns > after_ns
        )
        return min(times, default=0)


def counted(engine: Engine, metric: str) -> float:
    url = f"http://127.0.0.1:{engine.port}/metrics"
    with urllib.request.urlopen(url, timeout=60) as answer:
        text = answer.read().decode()
    found = re.findall(rf"^{re.escape(metric)}(?:\{{.*\}})? ([0-9.e+]+)$", text, re.MULTILINE)
    return sum(map(float, found))


class Asking:
    """A thread that asks again and again, so that a fault always meets requests."""

    def __init__(self, engine: Engine, feature: Feature) -> None:
        self._engine, self._feature = engine, feature
        self._enough = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self._answers = self._pool.submit(self._ask)

    def _ask(self) -> list[tuple[int, Any, int]]:
        answers = []
        while not self._enough.is_set():
            began_ns = time.monotonic_ns()
            answers.append((began_ns, self._feature.ask(self._engine), time.monotonic_ns()))
        return answers

    def check(self) -> None:
        """Raises the error of an answer."""
        if self._answers.done():
            self._answers.result()

    def end(self) -> list[tuple[int, Any, int]]:
        """Returns begin, answers and end of each turn; the last turn began before this call."""
        self._enough.set()
        with self._pool:
            return self._answers.result()


def disturbed(engine: Engine, feature: Feature, rails: Rails, kind: str) -> list[Any]:
    """Asks while the busiest rail is lost; returns the answers of each turn."""
    timely(rails.all_up, "all rails are UP", within_s=60)
    before = {rail: rails.sent(rail) for rail in ("rail0", "rail1")}
    asking = Asking(engine, feature)

    def busiest() -> str:
        asking.check()
        grown = {rail: rails.sent(rail) - sent for rail, sent in before.items()}
        rail = max(grown, key=lambda one: grown[one])
        return rail if grown[rail] > 100_000 else ""

    def lost_ns() -> int:
        asking.check()
        return rails.lost_ns(rail, began_ns)

    try:
        rail = timely(busiest, "the requests are computed", within_s=120, every_s=0.01)
        began_ns = time.monotonic_ns()
        rails.say(f"{rail[-1]} {kind}")
        at_ns = timely(lost_ns, f"{rail} is lost", within_s=60)
    finally:
        turns = asking.end()
    rails.say(f"{rail[-1]} heal")
    in_the_middle = any(began_ns < at_ns < ended_ns for began_ns, _, ended_ns in turns)
    timely(lambda: in_the_middle, f"the loss of {rail} between two turns", within_s=0)
    return [answers for _, answers, _ in turns]


def compare(name: str, start_engine: Callable[..., Engine], folder: Path) -> None:
    feature, rails = FEATURES[name], Rails(folder)
    engine = start_engine(2, [*FLAG, *EXACT, *feature.flags(folder)], [rails.environment])
    expected = feature.ask(engine)
    assert feature.check(expected), expected
    assert not feature.metric or counted(engine, feature.metric) > 0
    assert feature.ask(engine) == expected, "the answers differ without any fault"
    for kind in KINDS:
        for answers in disturbed(engine, feature, rails, kind):
            assert answers == expected, kind


@pytest.mark.case("features", "not tried with a lost rail")
@pytest.mark.parametrize("name", ["ngram speculation", "aborts in mid-stream"])
def test_two_features_answer_the_same_while_a_rail_is_lost(
    start_engine: Callable[..., Engine], tmp_path: Path, name: str
) -> None:
    compare(name, start_engine, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_answers_the_same_while_a_rail_is_lost(
    start_engine: Callable[..., Engine], tmp_path: Path, name: str
) -> None:
    compare(name, start_engine, tmp_path)
