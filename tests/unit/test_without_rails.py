"""An engine without rails: ready, with the reason."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from pairs import Pair
from timely import timely

from r2serve.engines import without_rails
from r2serve.observe import health
from r2serve.observe.sidecar.app import make_app
from r2serve.observe.unobserved import Note, Unobserved
from r2serve.observe.watch import Watch


@pytest.fixture(autouse=True)
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is the first one of the serving engine ``a``."""
    monkeypatch.setattr(without_rails, "_told", None)
    monkeypatch.setenv("R2CCL_JOURNAL_DIR", str(tmp_path))
    monkeypatch.setenv("R2CCL_SERVING_ENGINE", "a")
    yield
    if without_rails._told is not None:
        without_rails._told.close()


def found(folder: Path, engine: str = "") -> health.Health:
    watch = Watch(folder, engine=engine)
    watch.look()
    return health.examine(watch)


@pytest.mark.case("25", "an engine without rails was never ready")
def test_an_engine_without_rails_is_ready_and_says_why(tmp_path: Path) -> None:
    assert found(tmp_path).status == "no-engine"
    without_rails.tell_once("engine 0")
    without_rails.tell_once("engine 1")  # of the same process
    note = f"engine 0 (process {os.getpid()}) has nothing to protect: {without_rails.WHY}"
    assert found(tmp_path) == found(tmp_path, "a") == health.Health("ok", (), (note,))
    assert found(tmp_path, "b").status == "no-engine"
    with TestClient(make_app(Watch(tmp_path)), base_url="http://localhost") as client:
        answer = client.get("/readyz")
        assert (answer.status_code, answer.json()["notes"]) == (200, [note])
        assert answer.json()["engines"] == {"a": "ok"}
        metrics = client.get("/metrics").text
    assert "r2serve_ready 1.0" in metrics
    assert 'r2serve_serving_engine_ready{serving_engine="a"} 1.0' in metrics
    assert "r2serve_workers_without_journal 0.0" in metrics
    assert without_rails._told is not None
    without_rails._told.close()
    assert found(tmp_path).status == "no-engine"


@pytest.mark.parametrize("journal", [True, False])
def test_an_engine_with_rails_is_judged_by_its_workers(tmp_path: Path, journal: bool) -> None:
    folder = tmp_path if journal else tmp_path / "missing"
    os.environ["R2CCL_JOURNAL_DIR"] = str(folder)  # restored by the fixture
    pair = Pair(folder, serving_engine="a")
    try:
        timely(lambda: found(folder).ready, "the worker is seen")
        without_rails.tell_once("engine 0")
        assert without_rails._told is None
    finally:
        pair.close()
        for end in pair.ends:
            if end.unobserved is not None:
                end.unobserved.close()


def test_rails_of_another_engine_are_not_those_of_this_one(tmp_path: Path) -> None:
    pair = Pair(tmp_path, serving_engine="b")
    try:
        timely(lambda: found(tmp_path, "b").ready, "the worker of engine b is seen")
        without_rails.tell_once("engine 0")
        assert found(tmp_path, "a").ready
        assert found(tmp_path, "b").notes == ()
    finally:
        pair.close()


def test_without_a_folder_of_journals_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("R2CCL_JOURNAL_DIR")
    without_rails.tell_once("engine 0")
    assert without_rails._told is None


def test_an_error_of_the_observer_ends_no_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def look(_: Watch) -> None:
        raise LookupError("a journal of another kind")

    monkeypatch.setattr(Watch, "look", look)
    without_rails.tell_once("engine 0")
    assert without_rails._told is None
    assert "engine 0 is not known to be without rails" in caplog.text
    assert "LookupError: a journal of another kind" in caplog.text
    monkeypatch.undo()
    assert found(tmp_path).status == "no-engine"


def test_processes_of_an_engine_without_rails_tell_once(tmp_path: Path) -> None:
    """A scheduler has told; the process that answers clients does not tell again."""
    note = Note(1, "engine 0", "a", without_rails.WHY, has_rails=False)
    other = Unobserved(str(tmp_path), note)
    try:
        without_rails.tell_once("engine 0")
        assert without_rails._told is None
        assert found(tmp_path).notes == (str(note),)
    finally:
        other.close()
