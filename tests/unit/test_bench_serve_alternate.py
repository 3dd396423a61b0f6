"""`r2serve bench serve --alternate`: the states, the play of faults, and the load."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("aiohttp")

from aiohttp import web
from rich.console import Console

from r2serve.bench.serve import alternate
from r2serve.bench.serve.alternate import Alternation
from r2serve.bench.serve.alternation import AlternationError
from r2serve.bench.serve.cli import command
from r2serve.bench.serve.workload import Lengths, Workload, arrange, synthetic
from r2serve.lab.serving.client import Load, Turns
from r2serve.lab.serving.places import LocalPlace
from r2serve.lab.serving.progress import Progress

SWITCH_S = 0.4


class PlayedServer:
    """Answers over HTTP in a separate thread, a token every `step_s` seconds."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.arrived_ns: list[int] = []
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        assert self._ready.wait(120)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self.arrived_ns.append(time.monotonic_ns())
        body = await request.json()
        answer = web.StreamResponse()
        await answer.prepare(request)
        for index in range(body["max_tokens"]):
            await asyncio.sleep(self.step_s)
            last = index + 1 == body["max_tokens"]
            choice = {"text": "x", "token_ids": [1], "finish_reason": "length" if last else None}
            await answer.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        return answer

    def _serve(self) -> None:
        async def begin() -> web.AppRunner:
            app = web.Application()
            app.router.add_post("/v1/completions", self._complete)
            runner = web.AppRunner(app)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            self._ready.set()
            return runner

        runner = self._loop.run_until_complete(begin())
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


class PlayedPlace:
    """A place whose server is slower while rail 0 of node 1 is cut."""

    rails = 2
    command = "played"

    def __init__(self, step_s: float = 0.004, slower: float = 1.0) -> None:
        self.lab = self
        self._step_s = step_s
        self._slower = slower
        self.client = LocalPlace()
        self.http = PlayedServer(step_s)
        self.done: list[tuple[str, int, int]] = []

    @property
    def url(self) -> str:
        return self.http.url

    def server(self, _: object) -> PlayedPlace:
        return self

    def check_alive(self) -> None: ...

    def rail_in_use(self) -> int:
        return 0

    def cut(self, node: int, rail: int) -> None:
        self.done.append(("cut", node, rail))
        self.http.step_s = self._step_s * self._slower

    def heal(self, node: int, rail: int) -> None:
        self.done.append(("heal", node, rail))
        self.http.step_s = self._step_s

    def close(self) -> None:
        self.client.kill_all()
        self.http.close()


@pytest.fixture
def places() -> Iterator[list[PlayedPlace]]:
    made: list[PlayedPlace] = []
    yield made
    for place in made:
        place.close()


def workload(tokens: int = 6) -> Workload:
    same = synthetic(8, 0, Lengths(4, 0.0), Lengths(tokens, 0.0, least=2))
    return arrange(same, 0, concurrency=2)


def play(what: str, places: list[PlayedPlace], tmp_path: Path, switches: int = 12) -> Any:
    state = Alternation.of(what, switch_s=SWITCH_S, alternations=switches)
    played: Any = places
    progress = Progress(Console(quiet=True))
    return alternate._Alternating(state, played, workload(), tmp_path, progress).run()


# ---- states ----


def test_a_state_is_nothing_a_fault_or_a_setting() -> None:
    nothing = Alternation.of("nothing", switch_s=5, alternations=200)
    assert (nothing.faults(), nothing.setting, nothing.seconds) == ((), None, 1005)
    cut = Alternation.of("carrier_loss: rail0@node1", switch_s=5, alternations=4)
    assert [(each.at_s, each.end_s) for each in cut.faults()] == [(5, 10), (15, 20)]
    assert {(each.kind, each.rail, each.node) for each in cut.faults()} == {("carrier_loss", 0, 1)}
    setting = Alternation.of("R2CCL_FALLBACK=off", switch_s=5, alternations=4)
    assert setting.setting == ("R2CCL_FALLBACK", "off")
    assert setting.usual is None
    both = Alternation.of(
        "R2CCL_CONTROL=rails", switch_s=5, alternations=4, usual="R2CCL_CONTROL=direct"
    )
    assert both.usual == ("R2CCL_CONTROL", "direct")
    assert both.setting == ("R2CCL_CONTROL", "rails")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--alternate", "cable"], "must be `nothing`, a fault such as"),
        (["--alternate", "carrier_loss: used@node1"], "the rail must have a number"),
        (["--alternate", "R2CCL_FALLBACK=maybe"], "must be"),
        (["--alternate", "R2CCL_FALBACK=off"], "no option of r2serve"),
        (["--alternate", "nothing", "--rate", "2"], "without --url, --scenario"),
        (["--alternate", "nothing", "--usual", "R2CCL_FALLBACK=off"], "must be a setting, too"),
        (["--alternate", "R2CCL_FALLBACK=on", "--usual", "R2CCL_FALBACK=off"], "no option"),
        (["--usual", "R2CCL_CONTROL=direct"], "--usual: needs --alternate"),
        (["--alternate", "nothing", "--contender", "gloo", "--contender", "r2ccl"], "must be 1"),
        (["--alternate", "nothing", "--switch-s", "0.5"], "switch-s"),
    ],
)
def test_a_wrong_state_is_refused_at_once(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_requests_that_last_too_long_are_refused(
    places: list[PlayedPlace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alternate, "LONGEST_REQUEST_S", 0.02)
    places.append(PlayedPlace())
    played: Any = places[0]
    with pytest.raises(AlternationError, match=r"6 tokens last .* fewer --output-tokens"):
        alternate._check_length(played, workload(), tmp_path)


# ---- load and results ----


@pytest.mark.long
@pytest.mark.alone
def test_a_load_keeps_to_its_turns(places: list[PlayedPlace], tmp_path: Path) -> None:
    places.append(PlayedPlace())
    begin_ns = time.monotonic_ns() + 5_000_000_000
    period_ns = 400_000_000
    turns = Turns(begin_ns, begin_ns + 4 * period_ns, period_ns, period_ns // 2, period_ns)
    load = Load(
        places[0].client, places[0].url, ["a", "b"], 3, tmp_path / "run.json", 2, turns=turns
    )
    run = load.finish(20, lambda: None)
    assert run.completed == len(run.requests) >= 8
    at_ns = [(each.sent_ns - begin_ns) % period_ns for each in run.requests]
    assert min(at_ns) >= period_ns // 2
    assert {(each.sent_ns - begin_ns) // period_ns for each in run.requests} == {0, 1, 2, 3}


@pytest.mark.long
@pytest.mark.alone
def test_a_fault_that_slows_is_measured_and_undone(
    places: list[PlayedPlace], tmp_path: Path
) -> None:
    places.append(PlayedPlace(slower=4.0))
    outcome = play("carrier_loss: rail0@node1", places, tmp_path)
    assert places[0].done == [("cut", 1, 0), ("heal", 1, 0)] * 6
    assert outcome.failed == 0
    assert outcome.compared.windows >= 10
    # The fault adds 12 ms to a step of 4 ms; a busy machine adds time to every step.
    assert outcome.compared.tpot.low > 1.2
    assert outcome.compared.e2e.low > 1.2


@pytest.mark.long
@pytest.mark.alone
def test_a_setting_is_two_engines_in_turns(places: list[PlayedPlace], tmp_path: Path) -> None:
    places += [PlayedPlace(), PlayedPlace(step_s=0.016)]
    outcome = play("R2CCL_FALLBACK=off", places, tmp_path)
    assert outcome.failed == 0
    assert outcome.compared.tpot.low > 1.2
    first, second = (place.http.arrived_ns for place in places)
    assert len(first) > 10
    assert len(second) > 10
    assert outcome.serves == "played; played"


@pytest.mark.long
@pytest.mark.alone
def test_nothing_makes_no_difference(places: list[PlayedPlace], tmp_path: Path) -> None:
    places.append(PlayedPlace())
    outcome = play("nothing", places, tmp_path)
    assert places[0].done == []
    assert 0.5 < outcome.compared.tpot.ratio < 2.0
