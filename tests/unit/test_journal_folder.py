"""Readers believe only files of root and of their own user, and a folder of either."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from pairs import Pair
from test_requests import ended, worker
from timely import timely

from r2serve import journal_folder
from r2serve.journal_folder import believed_users
from r2serve.observe import health
from r2serve.observe.cli import command as journal_command
from r2serve.observe.requests import Requests
from r2serve.observe.sidecar import app as sidecar
from r2serve.observe.watch import Watch

NOBODY = 65534
READER = 12345


def owner_of(path: Path) -> int:
    """Gives a path to another user where this is possible; returns the owner, never root."""
    if os.geteuid() == 0:
        os.chown(path, NOBODY, -1)
    return path.stat().st_uid


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> int:
    """This process takes itself for an ordinary user who owns nothing here."""
    monkeypatch.setattr(journal_folder.os, "geteuid", lambda: READER)
    return READER


def as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_folder.os, "geteuid", lambda: 0)


def test_a_folder_of_a_stranger_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = owner_of(tmp_path)
    monkeypatch.setattr(journal_folder.os, "geteuid", lambda: READER)
    with pytest.raises(PermissionError, match=f"belongs to user {owner}"):
        believed_users(tmp_path)
    watch = Watch(tmp_path)
    watch.look()
    found = health.examine(watch)
    assert not found.ready
    assert f"belongs to user {owner}" in found.reasons[0]
    shown = CliRunner().invoke(journal_command, ["show", "--journal-dir", str(tmp_path)])
    assert shown.exit_code == 1
    assert f"belongs to user {owner}" in shown.output


def test_a_missing_folder_is_no_fault(tmp_path: Path, reader: int) -> None:
    assert believed_users(tmp_path / "nowhere") == {0, reader}


def test_root_believes_the_owner_of_a_folder_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = owner_of(tmp_path)
    as_root(monkeypatch)
    assert believed_users(tmp_path) == {0, owner}
    for name, right in ((f"r2serve-{owner}", True), ("r2serve-0", False), ("r2serve-7", False)):
        folder = tmp_path / name
        folder.mkdir()
        if os.stat(folder).st_uid != owner:
            os.chown(folder, owner, -1)
        if right:
            assert believed_users(folder) == {0, owner}
        else:
            with pytest.raises(PermissionError, match="nothing in it is believed"):
                believed_users(folder)


def test_a_forged_journal_in_a_shared_folder_changes_nothing(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forged journal would make ``/readyz`` answer 200 with rails that do not exist."""
    shared = tmp_path / "shared"
    shared.mkdir()
    (real,) = pair.folder.glob("*.journal")
    forged = shared / real.name
    shutil.copy(real, forged)
    owner = owner_of(forged)
    log = worker(shared)
    log.write(ended("forged"))
    owner_of(log.path)
    monkeypatch.setattr(
        "r2serve.observe.watch.believed_users", lambda folder: frozenset({0, READER} - {owner})
    )
    monkeypatch.setattr(
        "r2serve.observe.requests.believed_users", lambda folder: frozenset({0, READER} - {owner})
    )
    watch, requests = Watch(shared), Requests(shared)
    watch.look()
    requests.look()
    assert watch.workers == {}
    assert watch.unreadable == {forged.name: f"belongs to user {owner}: not believed"}
    assert health.examine(watch).status == health.NO_ENGINE
    assert requests.get("forged") is None


def test_a_file_that_changes_hands_is_no_longer_read(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(pair.folder)
    timely(lambda: watch.look() is not None and watch.live(), "the worker is seen")
    (key,) = watch.workers
    watch._believed = frozenset({READER})
    watch._read(watch.workers[key])
    assert "not believed" in watch.unreadable[f"r2ccl-{key}.journal"]


def test_a_sidecar_of_a_strangers_folder_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = owner_of(tmp_path)
    monkeypatch.setattr(journal_folder.os, "geteuid", lambda: READER)
    state = sidecar.make_app(Watch(tmp_path)).state.sidecar
    state.look()
    assert f"belongs to user {owner}" in state.health_view().reasons[0]
