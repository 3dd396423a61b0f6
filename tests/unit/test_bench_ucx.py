"""UCX's failover mode as a contender: where the benchmark finds UCX, and how faults are counted."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from r2serve.bench.collectives import stall_distributions, strikes, ucx
from r2serve.bench.collectives.control import NotSupported, WorkerError, WorkerGroup
from r2serve.bench.collectives.matrix import CollectiveCall
from r2serve.bench.collectives.stall_distributions import (
    CARRIER,
    Measured,
    NotSurvivedError,
    Sample,
)
from r2serve.bench.collectives.strikes import SIZES
from r2serve.lab.holder import LabUnavailableError
from r2serve.lab.lab import Lab
from r2serve.lab.rails import rails_in_use

SMALL, LARGE = SIZES


def headers(where: Path, text: str) -> None:
    header = where / "include" / "ucp" / "api" / "ucp_version.h"
    header.parent.mkdir(parents=True)
    header.write_text(text)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder named as UCX's installation."""
    monkeypatch.setenv(ucx.UCX_VARIABLE, str(tmp_path))
    return tmp_path


def test_the_version_comes_from_the_headers(place: Path) -> None:
    headers(place, "#define UCP_API_MAJOR    1\n#define UCP_API_MINOR    22\n")
    assert ucx.prefix() == place
    assert ucx.version(place) == (1, 22)


def test_an_old_ucx_is_refused_with_its_version(place: Path) -> None:
    headers(place, "#define UCP_API_MAJOR 1\n#define UCP_API_MINOR 13\n")
    with pytest.raises(ucx.UcxUnavailable, match=r"UCX 1\.13 of .* began with 1\.22"):
        ucx.program()


@pytest.mark.parametrize(
    ("text", "reason"), [(None, "has no UCX"), ("#define UCP_API_MAJOR 1\n", "version")]
)
def test_a_place_without_ucx_is_refused(place: Path, text: str | None, reason: str) -> None:
    if text is not None:
        headers(place, text)
    with pytest.raises(ucx.UcxUnavailable, match=reason):
        ucx.program()


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_headers_without_the_failover_mode_do_not_compile(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    headers(place, "#define UCP_API_MAJOR 1\n#define UCP_API_MINOR 22\n")
    with pytest.raises(ucx.UcxUnavailable, match=r"cannot compile ucx\.cc"):
        ucx.program()


def test_without_a_wheel_the_error_names_the_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(ucx.UCX_VARIABLE, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ucx.UcxUnavailable, match="pip install"):
        ucx.prefix()


def played(
    monkeypatch: pytest.MonkeyPatch, outcomes: list[Sample | Exception], at_start: bool = False
) -> Measured:
    """Runs faults of one kind on a UCX with the given outcomes."""

    class Workers:
        def prepare(self, request: str) -> None:
            if at_start:
                raise_or_return(outcomes.pop(0))

    def raise_or_return(outcome: Sample | Exception) -> Sample:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    @contextmanager
    def group(*_: object) -> Iterator[Workers]:
        yield Workers()

    monkeypatch.setattr(ucx, "program", lambda: Path("worker"))
    monkeypatch.setattr(ucx, "group", group)
    monkeypatch.setattr(stall_distributions, "_sample", lambda *_: raise_or_return(outcomes.pop(0)))
    measured = Measured()
    stall_distributions._ucx_series(
        Lab(), Path("scratch"), (CARRIER,), len(outcomes), measured, *2 * [lambda _: None]
    )
    return measured


def test_survived_faults_are_samples_and_others_are_losses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    survived = Sample("ucx", CARRIER, SMALL, 0, 1, 230.0, 1.0)
    ended = NotSurvivedError(1, 0, WorkerError("UCX worker answered 'error nothing'\nits log"))
    measured = played(monkeypatch, [survived, ended])
    assert measured.samples == [survived]
    (loss,) = measured.losses
    assert (loss.bytes, loss.node, loss.rail) == (LARGE, 1, 0)
    assert loss.reason == "UCX worker answered 'error nothing'"
    assert measured.skipped == []


@pytest.mark.parametrize("error", [WorkerError("did not start"), NotSupported("wrong sum")])
def test_a_ucx_that_does_not_start_is_skipped_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    measured = played(monkeypatch, [error, error], at_start=True)
    assert (measured.samples, measured.losses) == ([], [])
    (skipped,) = measured.skipped
    assert (skipped.what, skipped.reason) == ("ucx", str(error))


def test_a_machine_without_ucx_measures_the_rest(
    monkeypatch: pytest.MonkeyPatch, place: Path
) -> None:
    measured = Measured()
    stall_distributions._ucx_series(Lab(), place, (CARRIER,), 2, measured, *2 * [lambda _: None])
    (skipped,) = measured.skipped
    assert "has no UCX" in skipped.reason


def carried(workers: WorkerGroup) -> list[int]:
    """Returns the rails of rank 0 that carry its traffic."""
    before = strikes.sent(workers, 0)
    (first, second) = strikes.soak(workers, 100)
    assert len(first.times_ns) == len(second.times_ns) >= 2
    return rails_in_use(before, strikes.sent(workers, 0))


@pytest.mark.slow
def test_a_real_exchange_over_both_rails(tmp_path: Path) -> None:
    try:
        worker = ucx.program()
    except ucx.UcxUnavailable as error:
        pytest.skip(str(error))
    try:
        with Lab(nodes=2, rails=2) as lab, ucx.group(lab, worker, tmp_path, "a", 29490) as workers:
            workers.prepare(CollectiveCall("all_reduce", LARGE, "float32").request("auto"))
            assert carried(workers) == [0, 1]
            assert len(workers.run(1, 5).times_ns[1]) == 5
            for wrong, reason in (("broadcast", "all_reduce only"), ("all_reduce", "one size")):
                with pytest.raises(NotSupported, match=reason):
                    workers.prepare(
                        CollectiveCall(wrong, SMALL, "float32").request("auto"), anew=True
                    )
    except LabUnavailableError as error:
        pytest.skip(f"no lab: {error}")
