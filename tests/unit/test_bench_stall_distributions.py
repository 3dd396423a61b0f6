"""Distributions of stalls: percentiles, measuring ranks, tables, targets, and a few real stalls."""

from __future__ import annotations

import io
import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console
from soaked import FakeLab, FakeWorkers

from r2serve.bench.cli import command
from r2serve.bench.collectives import stall_distributions
from r2serve.bench.collectives.control import WorkerError, WrongResult
from r2serve.bench.collectives.mptcp import Mptcp, exchange
from r2serve.bench.collectives.runner import Skipped
from r2serve.bench.collectives.stall_distributions import (
    BLACK_HOLE,
    CARRIER,
    KINDS,
    ON_DEMAND,
    PEER_CARRIER,
    Loss,
    Measured,
    NotSurvivedError,
    Sample,
    Spread,
    as_json,
    checks,
    resume,
    run,
    show,
    split,
    witnesses,
)
from r2serve.bench.collectives.strikes import ATTEMPTS, SIZES, Soak, StrikeError
from r2serve.lab.holder import LabUnavailableError
from r2serve.lab.lab import Lab

SMALL, LARGE = SIZES


def sample(system: str, kind: str, stall_ms: float, size: int = SMALL) -> Sample:
    return Sample(system, kind, size, 0, 0, stall_ms, 1.0)


def test_percentiles_are_those_of_the_sorted_times() -> None:
    assert Spread.of([float(n) for n in range(200, 0, -1)]) == Spread(100, 180, 198, 200)
    assert Spread.of([3.0]).cells() == ["3.00"] * 4


@pytest.mark.parametrize(
    ("count", "parts"),
    [
        (0, []),
        (1, [(SMALL, 1)]),
        (5, [(SMALL, 3), (LARGE, 2)]),
        (200, [(SMALL, 100), (LARGE, 100)]),
    ],
)
def test_faults_are_split_over_the_sizes(count: int, parts: list[tuple[int, int]]) -> None:
    assert split(count) == parts


def test_the_ranks_that_measure_a_fault() -> None:
    """Own port: the rank without carrier. Peer's port: the other rank. Black hole: both ranks."""
    soaks = [Soak(0, [1]), Soak(0, [2])]
    assert witnesses(CARRIER, 1, soaks) == [soaks[1]]
    assert witnesses(PEER_CARRIER, 1, soaks) == [soaks[0]]
    assert witnesses(BLACK_HOLE, 1, soaks) == soaks


def test_samples_are_grouped_by_kind_size_and_system() -> None:
    samples = [
        sample("r2ccl", CARRIER, 2.0, LARGE),
        sample("r2ccl", CARRIER, 1.0),
        sample("r2ccl", CARRIER, 3.0),
        sample("r2ccl", BLACK_HOLE, 20.0),
        sample("mptcp", CARRIER, 500.0),
    ]
    found = stall_distributions.distributions(samples)
    assert [(one.kind, one.bytes, one.system, one.faults) for one in found] == [
        (CARRIER, SMALL, "r2ccl", 2),
        (CARRIER, SMALL, "mptcp", 1),
        (CARRIER, LARGE, "r2ccl", 1),
        (BLACK_HOLE, SMALL, "r2ccl", 1),
    ]
    assert found[0].stall_ms == Spread(1.0, 3.0, 3.0, 3.0)
    assert found[0].no_fault_ms == Spread(1.0, 1.0, 1.0, 1.0)


def test_targets_are_of_the_p99_and_of_the_ratio_to_mptcp() -> None:
    samples = [sample("r2ccl", kind, 6.0) for kind in (*KINDS, *ON_DEMAND)]
    samples += [sample("mptcp", CARRIER, 100.0), sample("mptcp", PEER_CARRIER, 300.0)]
    verdicts = {check.target: check for check in checks(stall_distributions.distributions(samples))}
    assert {name: check.met for name, check in verdicts.items()} == {
        "carrier_loss, 16 KiB: p99 of 1, ms": False,
        "carrier_loss, 16 KiB: MPTCP / r2ccl, median": False,
        "carrier_loss, 16 KiB: MPTCP / r2ccl, p99": False,
        "peer_carrier_loss, 16 KiB: p99 of 1, ms": True,
        "peer_carrier_loss, 16 KiB: MPTCP / r2ccl, median": True,
        "peer_carrier_loss, 16 KiB: MPTCP / r2ccl, p99": True,
        "black_hole, 16 KiB: p99 of 1, ms": True,
        "egress_refused, 16 KiB: p99 of 1, ms": True,
        "middlebox_ack, 16 KiB: p99 of 1, ms": True,
    }
    assert verdicts["peer_carrier_loss, 16 KiB: MPTCP / r2ccl, p99"].measured == 50


def test_tables_and_json_have_every_number() -> None:
    measured = Measured(
        [sample("r2ccl", CARRIER, 1.25)], skipped=[Skipped("mptcp", "no MPTCP: why")]
    )
    written = io.StringIO()
    show(measured, Console(width=120, file=written))
    text = written.getvalue()
    for word in ("carrier_loss: longest call, ms", "at most 5", "r2ccl", "16 KiB", "1.25", "1.00"):
        assert word in text
    assert "not run: mptcp: no MPTCP: why" in text
    assert "1 of 1 targets met" in text
    data = json.loads(json.dumps(as_json(measured, {"commit": "abc"})))
    assert data["commit"] == "abc"
    assert data["distributions"][0]["stall_ms"] == {
        "p50": 1.25,
        "p90": 1.25,
        "p99": 1.25,
        "max": 1.25,
    }
    assert data["samples"][0]["stall_ms"] == 1.25
    assert data["skipped"] == [{"what": "mptcp", "reason": "no MPTCP: why"}]
    assert [check["met"] for check in data["verdict"]] == [True]


def test_losses_are_shown_beside_survived_faults() -> None:
    lost = [Loss("ucx", CARRIER, SMALL, 0, rail, "nothing in 40 s") for rail in (0, 1)]
    lost.append(Loss("ucx", BLACK_HOLE, LARGE, 1, 0, "nothing in 40 s"))
    written = io.StringIO()
    show(Measured([sample("r2ccl", CARRIER, 1.25)], lost), Console(width=120, file=written))
    text = written.getvalue()
    assert "2 lost" in text
    assert "1 lost" in text
    assert text.count("lost: ucx: nothing in 40 s") == 1
    data = as_json(Measured(losses=lost), {})
    assert [loss["rail"] for loss in data["losses"]] == [0, 1, 0]
    assert data["distributions"] == data["verdict"] == []


class WrongOnce:
    """Workers whose first result is wrong."""

    def __init__(self) -> None:
        self.prepared = 0

    def prepare(self, request: str, *, anew: bool = False) -> None:
        del request, anew
        self.prepared += 1
        if self.prepared == 1:
            raise WrongResult("mptcp worker of rank 0: wrong result")


def series(system: str, monkeypatch: pytest.MonkeyPatch) -> Measured:
    """Runs three faults on workers whose first result is wrong."""
    workers: Any = WrongOnce()

    def survived(system: str, lab: Lab, workers: Any, kind: str, size: int, index: int) -> Sample:
        del lab, workers, index
        return sample(system, kind, 1.0, size)

    monkeypatch.setattr(stall_distributions, "_sample", survived)
    measured = Measured()
    nothing = 2 * [lambda _: None]
    stall_distributions._series(system, Lab(), workers, (CARRIER,), 3, measured, *nothing)
    return measured


def test_a_wrong_result_of_mptcp_is_a_loss_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured = series("mptcp", monkeypatch)
    loss = Loss("mptcp", CARRIER, SMALL, None, None, "mptcp worker of rank 0: wrong result")
    assert measured.losses == [loss]
    assert len(measured.samples) == 2
    assert measured.left("mptcp", (CARRIER,), 3) == []
    path = tmp_path / "stalls.json"
    path.write_text(json.dumps(as_json(measured, {"commit": "abc"})))
    assert resume(path, "abc").losses == [loss]


def test_a_wrong_result_of_r2ccl_ends_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WrongResult):
        series("r2ccl", monkeypatch)


def test_nothing_to_measure_is_refused() -> None:
    nothing = ["--faults", "0", "--mptcp", "0", "--ucx", "0"]
    result = CliRunner().invoke(command, ["stalls", *nothing])
    assert result.exit_code == 2
    assert "there is nothing to measure" in result.output
    assert CliRunner().invoke(command, ["stalls", "--kind", "flood"]).exit_code == 2
    result = CliRunner().invoke(command, ["stalls", "--compute-us", "1"])
    assert result.exit_code == 2
    assert "--compute-us is for r2ccl alone" in result.output


@pytest.mark.parametrize(
    ("old", "kind"),
    [("blackhole", BLACK_HOLE), ("peer-port", PEER_CARRIER), ("peer_port_loss", PEER_CARRIER)],
)
def test_a_deprecated_kind_is_accepted_with_a_note(old: str, kind: str) -> None:
    nothing = ["--faults", "0", "--mptcp", "0", "--ucx", "0"]
    result = CliRunner().invoke(command, ["stalls", "--kind", old, *nothing])
    assert f"`{old}` is deprecated: use `{kind}`" in result.output
    assert "there is nothing to measure" in result.output


def test_a_stopped_benchmark_continues_with_the_missing_series(tmp_path: Path) -> None:
    path = tmp_path / "stalls.json"
    assert resume(path, "abc") == Measured()
    done = [sample("r2ccl", CARRIER, 1.0), sample("r2ccl", PEER_CARRIER, 1.0)]
    losses = [Loss("ucx", CARRIER, SMALL, 0, 0, "nothing in 40 s")]
    path.write_text(json.dumps(as_json(Measured(done, losses), {"commit": "abc"})))
    assert resume(path, "def") == Measured()
    measured = resume(path, "abc")
    assert measured == Measured(done, losses)
    kinds = (CARRIER, PEER_CARRIER, BLACK_HOLE)
    assert measured.left("r2ccl", kinds, 1) == [(BLACK_HOLE, SMALL, 1)]
    # a lost measurement counts as done
    assert measured.left("ucx", (CARRIER,), 2) == [(CARRIER, LARGE, 1)]
    assert measured.left("mptcp", (CARRIER,), 0) == []
    # A series started with another number of faults is measured again.
    assert measured.left("r2ccl", (CARRIER,), 3) == [(CARRIER, SMALL, 2), (CARRIER, LARGE, 1)]
    measured.forget(("r2ccl", CARRIER, SMALL))
    measured.forget(("ucx", CARRIER, SMALL))
    assert measured == Measured(done[1:])
    path.write_text('{"commit": "of another form"}')
    assert resume(path, "abc") == Measured()
    path.write_text("{}")
    with pytest.raises(ValueError, match="has no stalls to continue"):
        resume(path, "abc")
    again = CliRunner().invoke(command, ["stalls", "--resume", "--json", str(path)])
    assert again.exit_code == 2
    assert "has no stalls" in again.output
    assert "--resume needs --json" in CliRunner().invoke(command, ["stalls", "--resume"]).output


def test_only_missing_series_are_measured_and_every_series_is_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[str, int]] = []
    kept: list[int] = []

    def strike(
        _system: str, _lab: object, _workers: object, kind: str, size: int, _: int
    ) -> Sample:
        made.append((kind, size))
        return sample("r2ccl", kind, 1.0, size)

    class Workers:
        def prepare(self, *_: object, **__: object) -> None:
            pass

    monkeypatch.setattr(stall_distributions, "_sample", strike)
    measured = Measured([sample("r2ccl", CARRIER, 1.0)])
    workers: Any = Workers()
    stall_distributions._series(
        "r2ccl",
        Lab(),
        workers,
        (CARRIER, BLACK_HOLE),
        2,
        measured,
        lambda so_far: kept.append(len(so_far.samples)),
        lambda _: None,
    )
    assert made == [(CARRIER, LARGE), (BLACK_HOLE, SMALL), (BLACK_HOLE, LARGE)]
    assert kept == [2, 3, 4]
    assert measured.left("r2ccl", (CARRIER, BLACK_HOLE), 2) == []


def sampled(lab: Any, kind: str, **how: Any) -> Sample:
    """Runs a fault at node 1; each window lasts until the lab has run a command."""
    workers: Any = FakeWorkers(lab, stall_distributions.WINDOW_MS, commands=1, **how)
    return stall_distributions._sample("r2ccl", lab, workers, kind, SMALL, 1)


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        (CARRIER, "cut"),
        (PEER_CARRIER, "cut"),
        (BLACK_HOLE, "black_hole"),
        *((kind, kind) for kind in ON_DEMAND),
    ],
)
def test_a_window_without_a_fault_comes_first(kind: str, word: str) -> None:
    """The switch port goes down in any case; node 1 or the other node measures the loss."""
    lab = FakeLab()
    found = sampled(lab, kind)
    assert (found.kind, found.node, found.rail) == (kind, 1, 0)
    assert found.stall_ms > 0
    assert found.no_fault_ms > 0
    quiet = ["rails", "rails", "soak", "heal 1 0", "rails", "rails"]
    assert lab.log == [*quiet, "soak", f"{word} 1 0", "rails", "heal 1 0"]
    assert lab.times_s[7] - lab.times_s[5] >= stall_distributions.BEFORE_FAULT_MS / 1e3


def test_calls_that_hang_under_a_fault_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall_distributions, "PATIENCE_S", 0.2)
    # the rail may be UP before the query
    monkeypatch.setattr(stall_distributions, "SILENT", ("r2ccl",))
    lab = FakeLab()
    found = sampled(lab, BLACK_HOLE, hangs=True)
    assert lab.log[-3:] == ["black_hole 1 0", "heal 1 0", "rails"]
    struck_s, healed_s = lab.times_s[-3:-1]
    # Two calls share the time of the fault at most, and the longer of them is measured.
    assert found.stall_ms >= (healed_s - struck_s) * 500


def test_a_fault_that_ends_the_calls_is_healed_and_names_its_rail() -> None:
    lab = FakeLab()
    with pytest.raises(NotSurvivedError, match="nothing in 40 s") as caught:
        sampled(lab, CARRIER, dies=WorkerError("nothing in 40 s"))
    assert (caught.value.node, caught.value.rail) == (1, 0)
    assert lab.log[-2:] == ["cut 1 0", "heal 1 0"]


def test_a_fault_that_never_strikes_ends_the_benchmark() -> None:
    lab = FakeLab(works=False)
    with pytest.raises(StrikeError, match="5 times a carrier_loss at node 1 did not strike"):
        sampled(lab, CARRIER)
    assert lab.log.count("cut 1 0") == ATTEMPTS


def _pair() -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair()
    for end in pair:
        end.setblocking(False)
    return pair


@pytest.mark.parametrize("count", [1, 100, 1_000_000])
def test_both_ends_of_an_exchange_have_the_other_s_data(count: int) -> None:
    first, second = _pair()
    mine, theirs = torch.arange(count, dtype=torch.float32), torch.empty(count)
    others, of_mine = torch.full((count,), 7.0), torch.empty(count)
    other = threading.Thread(target=exchange, args=(second, others, of_mine))
    with first, second:
        other.start()
        exchange(first, mine, theirs)
        other.join(120)
    assert torch.equal(theirs, others)
    assert torch.equal(of_mine, mine)


def test_an_exchange_with_a_closed_end_is_an_error() -> None:
    first, second = _pair()
    with first:
        second.close()
        with pytest.raises(RuntimeError, match="MPTCP connection"):
            exchange(first, torch.ones(10), torch.empty(10))


def test_mptcp_supports_only_all_reduce_between_two_ranks() -> None:
    with pytest.raises(ValueError, match="between two ranks"):
        Mptcp(0, 3, "127.0.0.1:1")
    peer = Mptcp(1, 2, "127.0.0.1:1")
    with pytest.raises(ValueError, match="all_reduce only"):
        peer.bind("broadcast", "auto", torch.ones(1), torch.ones(1))
    peer.close()


@pytest.mark.slow
def test_real_faults_under_both_systems() -> None:
    try:
        measured = run(2, 1, lambda line: None, kinds=(PEER_CARRIER,))
    except LabUnavailableError as error:
        pytest.skip(f"no lab: {error}")
    if measured.skipped:
        pytest.skip(measured.skipped[0].reason)
    assert [(one.system, one.kind, one.bytes) for one in measured.samples] == [
        ("r2ccl", PEER_CARRIER, SMALL),
        ("r2ccl", PEER_CARRIER, LARGE),
        ("mptcp", PEER_CARRIER, SMALL),
    ]
    for one in measured.samples:
        assert one.stall_ms > 0
        assert one.no_fault_ms > 0
