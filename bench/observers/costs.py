"""Cost of observation: time in a worker, and memory and throughput of a sidecar.

All figures of a report come from the same run on the same machine. Compared states alternate.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

from r2serve import Communicator
from r2serve.bench.collectives.native.build import BuildError
from r2serve.bench.collectives.statistics import median
from r2serve.config import Config
from r2serve.observe.attribution import Attribution, NewRequest, Step
from r2serve.observe.request_log import RequestLog
from r2serve.observe.requests import MAX_REQUESTS, Requests

Progress = Callable[[str], None]

ROUNDS = 51
BATCHES = (1, 8, 64, 256)
COLLECTIVE_BYTES = (1024, 16 * 1024, 256 * 1024)
CALLS = 400
TURNS = 20
WRK_S = 10
CONNECTIONS = 8
REQUESTS_PER_S = 1000

_SOURCES = Path(__file__).resolve().parents[2] / "csrc"


def journal_costs() -> dict[str, float]:
    """Returns the time of a journal record, of a counted call and of a clock reading, in ns.

    Raises:
        BuildError: no checkout or no compiler is available.
    """
    native = Path(__file__).parent / "native" / "journal_cost.cc"
    compiler = shutil.which("g++")
    if compiler is None or not _SOURCES.is_dir():
        raise BuildError("measuring the journal's cost needs a checkout and g++")
    with tempfile.TemporaryDirectory() as scratch:
        program = Path(scratch) / "journal_cost"
        includes = [f"-I{_SOURCES}", f"-I{_SOURCES / 'include'}"]
        command = [compiler, "-std=c++20", "-O2", "-DNDEBUG", *includes, str(native)]
        sources = ("journal/journal.cc", "base/fork.cc")
        command += [*(str(_SOURCES / source) for source in sources), "-o", str(program)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BuildError(f"journal_cost.cc: {done.stderr.strip()[-400:]}")
        said = subprocess.run(
            [program, scratch, str(ROUNDS)], capture_output=True, text=True, check=True
        )
    costs: dict[str, float] = json.loads(said.stdout)
    return costs


class _NoEngine:
    """An engine without stalled collectives."""

    stalled_ns = 0
    journal_path = ""
    process = 1

    def set_step(self, step: int) -> None:
        """Does nothing."""

    def journal_bytes(self) -> bytes:
        raise AssertionError("no collective stalled")


def attribution_costs() -> dict[int, float]:
    """Returns the cost of attribution in a decode step, in us, by number of requests."""
    engine = _NoEngine()
    found = {}
    for size in BATCHES:
        attribution = Attribution(lambda: [engine])
        ids = [f"cmpl-{number:032x}-0-0a1b2c3d" for number in range(size)]
        new = [NewRequest(one, one[:-9], 100) for one in ids]
        attribution.began(Step(1, ids, [], ids, new))
        attribution.ended(sampled=True)
        each = []
        for _ in range(ROUNDS):
            began = time.perf_counter_ns()
            for _ in range(20):
                attribution.began(Step(2, [], ids, ids))
                attribution.ended(sampled=False)  # end of the model's run
                attribution.ended(sampled=True)  # end of the sampler's run
            each.append((time.perf_counter_ns() - began) / 20e3)
        found[size] = median(each)
    return found


def requests_memory(count: int = MAX_REQUESTS) -> float:
    """Returns the memory of a sidecar that keeps ``count`` stalled requests, in MB.

    A new process measures it: elsewhere, memory that was freed before could hide the growth.
    """
    with tempfile.TemporaryDirectory() as scratch:
        code = (
            f"from r2serve.bench.observers.costs import grown; print(grown({scratch!r}, {count}))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
    return float(done.stdout)


def grown(folder: str, count: int) -> float:
    """Returns the growth of this process while it reads ``count`` stalled requests, in MB."""
    kept = Requests(folder)
    log = RequestLog(
        Path(folder) / "r2ccl-1-1.requests", writer="worker", label="rank 0", limit_bytes=1 << 30
    )
    before = psutil.Process().memory_info().rss
    stall = {"collective": "all_reduce", "group": "tp:0", "call": 1, "ended_ns": 10**9, "ns": 10**6}
    for number in range(count):
        name = f"cmpl-{number:032x}"
        step = {"step": number, "began_ns": 1, "ended_ns": 10**9, "stalls": [stall]}
        log.write(step | {"prefill": [], "decode": [name]})
        gaps = {"worst_gap_ns": 1, "worst_gap_ended_ns": 2, "tokens": 100}
        log.write(
            {"request": name, "scheduled_ns": 1, "first_token_ns": 2, "last_token_ns": 3} | gaps
        )
        log.write(
            {"finished": name, "reason": "length", "prompt_tokens": 9, "tokens": 100}
            | {"queued_s": 0.0, "prefill_s": 0.1, "decode_s": 1.0, "e2e_s": 1.2}
            | {"ended_clock_ns": 1}
        )
        if number % 1000 == 0:
            kept.look()
    while len(kept) < count or kept.look():
        kept.look()
    assert len(kept) == count
    return (psutil.Process().memory_info().rss - before) / 1e6


class RankPair:
    """Two ranks in this process, with two loopback rails."""

    def __init__(self, folder: str, port: int) -> None:
        self._pool = ThreadPoolExecutor(2)

        def make(rank: int) -> Communicator:
            config = Config(rails="127.0.0.1,127.0.0.2", node=f"n{rank}", journal_dir=folder)
            return Communicator.standalone(
                "127.0.0.1", port, rank, 2, name="tp:0", config=config, share_engine=False
            )

        self.ranks = list(self._pool.map(make, range(2)))

    def p50_us(self, size: int) -> float:
        """Returns the p50 of all_reduces of ``size`` bytes, measured by rank 0, in us."""

        def calls(rank: int) -> list[float]:
            tensor, each = torch.ones(size // 4), []
            for _ in range(CALLS):
                began = time.perf_counter_ns()
                self.ranks[rank].all_reduce(tensor, out=tensor)
                each.append((time.perf_counter_ns() - began) / 1e3)
            return each

        first, _ = self._pool.map(calls, range(2))
        return median(first)

    def close(self) -> None:
        list(self._pool.map(lambda rank: rank.close(), self.ranks))
        self._pool.shutdown()


@contextmanager
def sidecar(folder: str, port: int) -> Iterator[str]:
    """Starts a sidecar in a new process and yields the URL."""
    code = "from r2serve.cli import main; main()"
    words = ["sidecar", "--port", str(port), "--journal-dir", folder]
    process = subprocess.Popen([sys.executable, "-c", code, *words], stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 30
        while not _answers(f"{url}/livez"):
            if time.monotonic() > deadline or process.poll() is not None:
                raise RuntimeError("the sidecar did not start")
            time.sleep(0.05)
        yield url
    finally:
        process.terminate()
        process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            answer.read()
    except OSError:
        return False
    return True


def scraped_ratios(pair: RankPair, url: str) -> dict[int, float]:
    """Returns p50 of all_reduces with a /metrics scrape every second / p50 without, by size."""
    scraping, over = threading.Event(), threading.Event()

    def scrape() -> None:
        while not over.wait(1.0):
            if scraping.is_set():
                _answers(f"{url}/metrics")

    thread = threading.Thread(target=scrape, daemon=True)
    thread.start()
    found = {}
    for size in COLLECTIVE_BYTES:
        each: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(2 * TURNS):
            on = turn % 2 == 1
            (scraping.set if on else scraping.clear)()
            until = time.monotonic() + 1.2  # longer than the scrape interval of 1 s
            while time.monotonic() < until:
                each[on].append(pair.p50_us(size))
        found[size] = median(each[True]) / median(each[False])
    over.set()
    thread.join()
    return found


def load(url: str, wrk: str) -> dict[str, float]:
    """Returns throughput and latency of a sidecar under full load by CONNECTIONS connections.

    The connections request /metrics and /v1/rails in turns.
    """
    script = (
        "local turn = 0\n"
        "function request()\n"
        "  turn = turn + 1\n"
        '  return wrk.format("GET", turn % 2 == 0 and "/metrics" or "/v1/rails")\n'
        "end\n"
    )
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as file:
        file.write(script)
        file.flush()
        command = [wrk, "-t1", f"-c{CONNECTIONS}", f"-d{WRK_S}s", "--latency", "-s", file.name, url]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"99%\s+([\d.]+)(us|ms|s)\b", said)
    rate = re.search(r"Requests/sec:\s+([\d.]+)", said)
    if found is None or rate is None:
        raise RuntimeError(f"unexpected output of wrk: {said}")
    failed = re.search(r"Non-2xx or 3xx responses: (\d+)|Socket errors", said)
    return {
        "requests_per_s": float(rate[1]),
        "p99_ms": float(found[1]) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[found[2]],
        "failed": float(failed is not None),
    }


def run(progress: Progress) -> dict[str, Any]:
    """Measures all costs.

    Raises:
        BuildError: the native part cannot be built on this machine.
    """
    result: dict[str, Any] = {}
    progress("journal: records and counted calls")
    result["journal"] = journal_costs()
    progress("attribution: cost in a decode step")
    result["attribution_us"] = attribution_costs()
    progress(f"sidecar: memory with {MAX_REQUESTS} stalled requests")
    result["requests_mb"] = requests_memory()
    folder = tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    try:
        ports = _free_ports(2)
        pair = RankPair(folder, ports[0])
        with sidecar(folder, ports[1]) as url:
            wrk = shutil.which("wrk")
            if wrk is None:
                progress("wrk is not installed: skipping the sidecar's load test")
            else:
                progress(f"sidecar: load of {CONNECTIONS} connections")
                result["load"] = load(url, wrk)
            progress("collectives with and without scrapes")
            result["scraped"] = scraped_ratios(pair, url)
        pair.close()
    finally:
        shutil.rmtree(folder)
    return result


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def checks(result: dict[str, Any]) -> list[tuple[str, float, str, bool]]:
    """Returns the targets as (name, measured value, wanted value, met)."""
    record = result["journal"]["record_ns"]
    found = [("journal: ns a record", record, "at most 50", record <= 50)]
    memory = result["requests_mb"]
    found.append((f"{MAX_REQUESTS} requests: MB", memory, "below 100", memory < 100))
    if "load" in result:
        rate, p99 = result["load"]["requests_per_s"], result["load"]["p99_ms"]
        enough = rate >= REQUESTS_PER_S and not result["load"]["failed"]
        found.append(("sidecar: requests a second", rate, f"at least {REQUESTS_PER_S}", enough))
        found.append(("sidecar: p99 ms meanwhile", p99, "below 20", p99 < 20))
    for size, ratio in result["scraped"].items():
        what = f"all_reduce of {size} bytes: p50 scraped / not"
        found.append((what, ratio, "at most 1.02", ratio <= 1.02))
    return found


def show(result: dict[str, Any], console: Console) -> None:
    """Prints tables of costs and targets."""
    costs = Table("in a worker", "cost")
    journal = result["journal"]
    costs.add_row("journal record", f"{journal['record_ns']:.1f} ns")
    costs.add_row("counted call", f"{journal['call_ns']:.1f} ns")
    costs.add_row("clock reading (2 per call)", f"{journal['clock_ns']:.1f} ns")
    for size, cost in result["attribution_us"].items():
        costs.add_row(f"step of {size} requests", f"{cost:.1f} us")
    console.print(costs)
    targets = Table("target", "measured", "wanted", "")
    for what, measured, wanted, met in checks(result):
        targets.add_row(what, f"{measured:.3g}", wanted, "met" if met else "not reached")
    console.print(targets)
