"""`r2serve bench serve`: requests, schedules and results."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from timely import timely

pytest.importorskip("aiohttp")

from aiohttp import web

from r2serve.bench.serve import scenarios, strike, workload
from r2serve.bench.serve.cli import command
from r2serve.bench.serve.scenarios import SCENARIOS, line_of, parse
from r2serve.bench.serve.strike import strikes
from r2serve.bench.serve.workload import Lengths, WorkloadError, arrange, poisson, synthetic
from r2serve.lab.background import BackgroundPlay
from r2serve.lab.kinds import KINDS
from r2serve.lab.schedule import Aim, Fault, ScheduleError

# ---- requests ----


def test_lengths_are_log_normal_and_the_same_from_a_seed() -> None:
    lengths = Lengths(100, 0.5)
    drawn = [lengths.draw(random.Random(seed)) for seed in range(2000)]
    assert statistics.median(drawn) == pytest.approx(100, rel=0.1)
    assert statistics.mean(drawn) > 105  # the distribution is skewed
    assert drawn == [lengths.draw(random.Random(seed)) for seed in range(2000)]
    assert {Lengths(7, 0.0).draw(random.Random(seed)) for seed in range(9)} == {7}
    assert Lengths(1000, 3.0, most=10).draw(random.Random(1)) <= 10


def test_requests_are_the_same_from_a_seed_and_differ() -> None:
    made = synthetic(50, 3, Lengths(20, 0.5), Lengths(30, 0.5, least=2))
    assert made == synthetic(50, 3, Lengths(20, 0.5), Lengths(30, 0.5, least=2))
    assert made != synthetic(50, 4, Lengths(20, 0.5), Lengths(30, 0.5, least=2))
    assert len({text for text, _ in made}) == 50
    assert min(tokens for _, tokens in made) >= 2


def test_arrivals_are_poissons() -> None:
    times = poisson(4000, 8.0, 1)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert times[0] == 0.0
    assert statistics.mean(gaps) == pytest.approx(1 / 8, rel=0.1)
    # only the exponential distribution has this standard deviation for this mean
    assert statistics.stdev(gaps) == pytest.approx(1 / 8, rel=0.1)


@pytest.mark.parametrize(("rate", "concurrency"), [(0.0, 0), (1.0, 1)])
def test_a_loop_is_open_or_closed(rate: float, concurrency: int) -> None:
    with pytest.raises(WorkloadError, match="exactly one"):
        arrange([("a", 1)], 0, rate=rate, concurrency=concurrency)


def test_sharegpt_conversations_become_requests(tmp_path: Path) -> None:
    path = tmp_path / "share.json"
    said = [{"from": "human", "value": "why?"}, {"from": "gpt", "value": "x" * 80}]
    path.write_text(json.dumps([{"conversations": said}, {"conversations": []}]))
    made = workload.from_sharegpt(path, 3, 0, Lengths(48, 0.5, least=2, most=16))
    assert made == [("why?", 16)] * 3
    for text in ("[]", "{}", "no json"):
        path.write_text(text)
        with pytest.raises(WorkloadError, match=r"sharegpt: .*share\.json"):
            workload.from_sharegpt(path, 3, 0, Lengths(48, 0.5))


# ---- schedules ----


def test_every_scenario_is_a_schedule_that_reads_back() -> None:
    for name in SCENARIOS:
        faults = scenarios.scenario(name)
        assert parse("\n".join(map(line_of, faults))) == faults


def test_the_clients_keep_their_way_to_node_0() -> None:
    faults = scenarios.scenario("twenty-faults")
    assert len(faults) == 20
    assert {(each.node, each.rail) for each in faults} == {
        *((node, rail) for node in (0, 1) for rail in (0, 1)),
        (1, Aim.MANAGEMENT),
    }


def test_a_schedule_is_read() -> None:
    text = (
        "# two\nat: 12s, cut: rail0@node1, for: 8s\n\n  for: 500ms, black_hole: used@node0, at: 1.5"
    )
    assert parse(text) == (
        Fault(1.5, "black_hole", 0, Aim.IN_USE, 0.5),
        Fault(12.0, "carrier_loss", 1, 0, 8.0),
    )
    assert parse("at: 0s, cut: mgmt@node0")[0].end_s == float("inf")
    assert parse("at: 1s, reset: mgmt@node0, for: 1s") == (
        Fault(1.0, "reset", 0, Aim.MANAGEMENT, 1.0),
    )


def test_the_page_names_every_scenario() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md").read_text()
    section = page.split("\n### Scenarios\n")[1].split("\n### ")[0]
    assert [name for name in SCENARIOS if f"`{name}`" not in section] == []
    assert set(scenarios.MANAGEMENT_RAIL) <= set(SCENARIOS)
    assert set(scenarios.WORDS) <= set(KINDS)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("at: 1s", r"line 1: the fault is '': must be one of carrier_loss, black_hole"),
        ("at: 1s, explode: rail0@node0", "the fault is 'explode'"),
        ("at: 1s, cut: rail0@node0, drop: rail0@node0", "the fault is 'cut, drop'"),
        ("cut: rail0@node0", "at is ''"),
        ("at: soon, cut: rail0@node0", "at is 'soon': must be a time"),
        ("at: 1s, at: 2s, cut: rail0@node0", "given once"),
        ("at: 1s, cut: rail2@node0", r"'rail2@node0': must be of 2 nodes with 2 rails"),
        ("at: 1s, cut: rail0@node2", "must be of 2 nodes"),
        ("at: 1s, cut: eth0", "must be a place such as"),
        ("at: 1s, cut: rail0@node0, for: 0s", "for is '0s': must be above 0"),
        ("at: 1s, cut: used@node0, for: 5s\nat: 3s, drop: rail1@node1", "before .* ends"),
        ("at: 1s, cut: rail0@node0\nat: 3s, drop: rail0@node0", "before .* ends"),
        ("at: 1s, cut: rail0@node0, for: 1s\nat: 2.5s, drop: used@node1", "less than 1 s after"),
    ],
)
def test_an_invalid_schedule_is_an_error_with_the_reason(line: str, said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        parse(line)


class PlayedLab:
    """Records the commands given to the lab."""

    rails = 2

    def __init__(self) -> None:
        self.done: list[tuple[Any, ...]] = []

    def cut(self, node: int, rail: int | None) -> None:
        self.done.append(("cut", node, rail))

    def heal(self, node: int, rail: int | None) -> None:
        self.done.append(("heal", node, rail))


def play(text: str, changes: int) -> tuple[list[tuple[Any, ...]], BackgroundPlay]:
    """Plays faults until the lab has changed that number of times, and the first fault is over."""
    lab: Any = PlayedLab()
    now_ns = time.monotonic_ns()

    def is_over() -> bool:
        return len(lab.done) >= changes and made.played[0].healed_ns is not None

    with strikes(lab, parse(text), lambda: now_ns, lambda: 1) as made:
        timely(is_over, f"{changes} changes of the lab", within_s=60)
    return lab.done, made


def test_faults_are_made_and_undone() -> None:
    began_ns = time.monotonic_ns()
    done, made = play("at: 0s, cut: used@node1, for: 50ms\nat: 100ms, cut: all@node0", 4)
    assert done == [
        ("cut", 1, 1),
        ("heal", 1, 1),
        ("cut", 0, 0),
        ("cut", 0, 1),
        ("heal", 0, 0),
        ("heal", 0, 1),
    ]
    first, second = made.played
    assert first.healed_ns is not None
    assert first.healed_ns - began_ns >= 0.05e9
    assert second.rails == (0, 1)


def test_a_fault_is_aimed_and_announced_before_it_strikes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Aiming and announcing use CPU time, which would disturb the measured processes."""
    monkeypatch.setattr(strike, "AIM_S", 0.1)
    order: list[str] = []
    aimed_ns: list[int] = []
    cut = threading.Event()
    lab: Any = PlayedLab()

    def aim() -> int:
        aimed_ns.append(time.monotonic_ns())
        order.append("aim")
        return 1

    def make(node: int, rail: int) -> None:
        order.append(f"cut {rail}@{node}")
        cut.set()

    lab.cut, lab.heal = make, lambda *_: order.append("heal")
    began_ns = time.monotonic_ns()
    faults = parse("at: 200ms, cut: used@node1, for: 100s")
    with strikes(lab, faults, lambda: began_ns, aim, order.append) as made:
        assert cut.wait(120)
    assert order == ["aim", line_of(faults[0]), "cut 1@1", "heal"]
    assert aimed_ns[0] - began_ns >= 100e6
    assert made.played[0].struck_ns - began_ns >= 200e6


def test_a_flap_ends_healed() -> None:
    done, _ = play("at: 0s, flap: rail0@node0, for: 1s", 4)
    words = [word for word, *_ in done]
    assert words == ["cut", "heal", "cut", "heal"]  # lost for 0.3 s, back for 0.5 s, lost for 0.2 s


def test_the_management_nic_is_cut_at_the_switch() -> None:
    done, made = play("at: 0s, cut: mgmt@node1, for: 20ms", 2)
    assert done == [("cut", 1, None), ("heal", 1, None)]
    assert made.played[0].rails == ()


# ---- the command ----


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--url", "http://x", "--scenario", "carrier-loss"], "faults are made in networks"),
        (["--rate", "2", "--concurrency", "2"], "exactly one must be above 0"),
        (
            ["--rate", "100", "--requests", "10", "--scenario", "carrier-loss"],
            "begins when the last",
        ),
        (["--scenario", "nonsense"], "nonsense"),
        (["--engine", "sglang", "--alternate", "nothing"], "--engine is sglang: must be vllm"),
        (["--engine", "sglang", "--contender", "mptcp"], "must be gloo or r2ccl"),
    ],
)
def test_wrong_options_are_refused_at_once(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_a_schedule_file_is_named_in_its_error(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("at: 1s, cut: nowhere")
    result = CliRunner().invoke(command, ["--faults", str(path)])
    assert result.exit_code == 2
    assert "mine.txt: line 1: cut is 'nowhere'" in " ".join(result.output.split())


def test_a_deprecated_name_in_a_schedule_is_noted_once(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(
        "at: 8s, cut: rail0@node0, for: 1s  # drop\n"
        "at: 20s, cut: rail0@node1, for: 1s\nat: 30s, slow: rail1@node0\n"
    )
    short = ["--rate", "100", "--requests", "2"]  # every fault would be too late: no engine starts
    result = CliRunner().invoke(command, ["--faults", str(path), *short])
    assert result.exit_code == 2
    assert result.output.count("is deprecated") == 1
    assert "`cut` is deprecated: use `carrier_loss`" in result.output


def test_a_deprecated_name_of_the_alternated_fault_is_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("r2serve.bench.serve.cli._alternate", lambda *_: None)
    result = CliRunner().invoke(command, ["--alternate", "cut: rail0@node1"])
    assert result.exit_code == 0
    assert result.output == "`cut` is deprecated: use `carrier_loss`\n"


# ---- against a played server ----


class PlayedServer:
    """Streams the tokens of a prompt, 5 ms apart; a repeated prompt may get other tokens."""

    def __init__(self, *, token_ids: bool = True) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.arrived: list[float] = []
        self.lies_about: set[str] = set()
        self.loses: set[str] = set()
        self._token_ids = token_ids

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "played"}]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        self.arrived.append(time.monotonic())
        body = await request.json()
        known = any(body["prompt"] == other["prompt"] for other in self.bodies)
        self.bodies.append(body)
        answer = web.StreamResponse()
        await answer.prepare(request)
        for index in range(body["max_tokens"]):
            await asyncio.sleep(0.005)
            if known and body["prompt"] in self.loses and index == 1:
                return answer
            token = index + (100 if known and body["prompt"] in self.lies_about else 0)
            choice: dict[str, Any] = {"text": f" {token}", "finish_reason": None}
            if self._token_ids:
                choice["token_ids"] = [token]
            if index + 1 == body["max_tokens"]:
                choice["finish_reason"] = "length"
            event = b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
            await answer.write(event)
        return answer

    def against(self, *arguments: str) -> tuple[int, str]:
        """Runs the command against this server; returns exit status and output."""

        async def serve() -> tuple[int, str]:
            app = web.Application()
            app.router.add_get("/v1/models", self.models)
            app.router.add_post("/v1/completions", self.complete)
            served = web.AppRunner(app)
            await served.setup()
            try:
                site = web.TCPSite(served, "127.0.0.1", 0)
                await site.start()
                url = f"http://127.0.0.1:{served.addresses[0][1]}"
                process = await asyncio.create_subprocess_exec(
                    *(str(Path(sys.executable).with_name("r2serve")), "bench", "serve"),
                    *("--url", url, *arguments),
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.STDOUT,
                )
                said, _ = await asyncio.wait_for(process.communicate(), 300)
                assert process.returncode is not None
                return process.returncode, said.decode()
            finally:
                await served.cleanup()

        return asyncio.run(serve())


@pytest.mark.slow
def test_a_server_that_runs_already_is_measured(tmp_path: Path) -> None:
    asked = synthetic(12, 5, Lengths(32, 0.5), Lengths(6, 0.5, least=2))
    server = PlayedServer()
    server.lies_about, server.loses = {asked[3][0]}, {asked[7][0]}
    path = tmp_path / "rows.jsonl"
    status, said = server.against(
        *("--requests", "12", "--seed", "5", "--output-tokens", "6", "--rate", "20"),
        *("--json", str(path)),
    )
    assert status == 0, said
    [row] = [json.loads(line) for line in path.read_text().splitlines()]
    requests = row["requests"]
    assert (requests["sent"], requests["completed"], requests["failed"]) == (12, 11, 1)
    assert requests["wrong"] == 1
    assert row["tpot_ms"]["p50"] >= 5
    assert row["ttft_ms"]["p50"] >= 5
    assert {body["model"] for body in server.bodies} == {"played"}
    assert [body["max_tokens"] for body in server.bodies[:12]] == [tokens for _, tokens in asked]
    due = poisson(12, 20.0, 5)[-1]
    # On a busy machine the first request arrives late.
    took_s = server.arrived[11] - server.arrived[0]
    timely(lambda: took_s >= due * 0.5, f"{took_s:.2f} s, due in {due:.2f} s", within_s=0)


@pytest.mark.slow
def test_a_server_with_only_openais_fields_is_measured(tmp_path: Path) -> None:
    server = PlayedServer(token_ids=False)
    path = tmp_path / "rows.jsonl"
    status, said = server.against(
        "--requests", "6", "--concurrency", "2", "--openai", "--json", str(path)
    )
    assert status == 0, said
    [row] = [json.loads(line) for line in path.read_text().splitlines()]
    assert row["requests"]["completed"] == 6
    assert row["requests"]["wrong"] == 0
    assert row["tpot_ms"]["p50"] >= 5
    assert all("return_token_ids" not in body for body in server.bodies)


def test_a_server_that_lists_no_models_is_named() -> None:
    result = CliRunner().invoke(command, ["--url", "http://127.0.0.1:9"])
    assert result.exit_code == 2
    assert "cannot read a model from /v1/models" in " ".join(result.output.split())
