"""The benchmark of replayed graphs, with a driver that needs no GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from captured import HAS_GPU, Captured

from r2serve.bench.kernels import replay
from r2serve.bench.kernels.replay import ReplayRow
from r2serve.device import DeviceCommunicator


def capture(
    driver: str, communicator: DeviceCommunicator, body: Callable[[], None]
) -> replay.Graph:
    return Captured(communicator, driver, body)


@pytest.mark.skipif(HAS_GPU, reason="`r2serve bench kernels` does it here")
@pytest.mark.slow
def test_replays_are_measured_beside_the_host_and_under_faults(
    cuda_driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "REJOIN_TIMEOUT_S", 300.0)
    row = replay.measure(
        cuda_driver,
        torch.device("cpu"),
        functools.partial(capture, cuda_driver),
        calls=60,
        faults=3,
    )
    assert row.host_us > 0
    assert row.replay_us > 0
    assert row.one_rail_us > 0
    assert 0 < row.stall_p50_ms <= row.stall_p99_ms
    assert row.after_ratio > 0
    said = row.as_json()
    assert said["above_host_us"] == pytest.approx(row.replay_us - row.host_us)


def test_targets_are_judged() -> None:
    good = ReplayRow(16384, 10.0, 34.0, 20.0, 5, 1.0, 2.0, 1.04)
    late = ReplayRow(16384, 10.0, 36.0, 20.0, 5, 1.0, 2.0, 1.06)
    assert good.as_json()["reached"] == {"above_host_us": True, "after_ratio": True}
    assert late.as_json()["reached"] == {"above_host_us": False, "after_ratio": False}


def test_the_hit_replay_is_the_longest_after_the_fault() -> None:
    times = [(0, 9), (10, 20), (20, 90), (90, 95), (95, 100)]
    assert replay._hit(times, 15) == ((20, 90), [(90, 95), (95, 100)])
