"""The default folder of journals of vLLM's workers."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import pytest

from r2serve.engines import flag
from r2serve.observe import files, journal
from r2serve.process import KEPT_JOURNALS

VARIABLE = "R2CCL_JOURNAL_DIR"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "r2serve-0"
    monkeypatch.setattr(flag, "default_folder", lambda: made)
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delenv(VARIABLE)
    return made


def test_the_default_folder_belongs_to_the_user(folder: Path) -> None:
    flag.keep_journals()
    assert os.environ[VARIABLE] == str(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()
    flag.keep_journals()  # another node inherits the choice
    assert folder.is_dir()


@pytest.mark.parametrize("choice", ["", "/tmp"])
def test_the_environment_takes_precedence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, choice: str
) -> None:
    monkeypatch.setenv(VARIABLE, choice)
    flag.keep_journals()
    assert os.environ[VARIABLE] == choice
    assert not folder.exists()


def test_a_folder_of_another_user_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    flag.keep_journals()
    assert VARIABLE not in os.environ
    assert "must be a folder of this user" in caplog.text


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    flag.add_to(parser)
    return parser.parse_args(["--distributed-backend", "r2ccl", *words])


def test_the_flag_accepts_drills_with_the_default_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(flag.VARIABLE, "default")
    monkeypatch.setenv("R2CCL_DRILLS", "on")
    with tempfile.TemporaryDirectory(prefix="r2serve-") as short:  # the paths of sockets are short
        folder = Path(short) / "journals"
        monkeypatch.setattr(flag, "default_folder", lambda: folder)
        assert parsed().distributed_backend == "r2ccl"
        assert os.environ[VARIABLE] == str(folder)


def test_the_flag_refuses_drills_without_a_folder_in_the_users_words(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(flag.VARIABLE, "default")
    monkeypatch.setenv("R2CCL_DRILLS", "on")
    monkeypatch.setenv(VARIABLE, "")
    with pytest.raises(argparse.ArgumentError, match=r"\(R2CCL_DRILLS\) is on: must be off"):
        parsed()


def test_only_the_newest_journals_of_ended_workers_stay(tmp_path: Path) -> None:
    for number in range(KEPT_JOURNALS + 5):
        path = tmp_path / f"r2ccl-{number}-1.journal"
        path.touch()
        os.utime(path, (number, number))
    (tmp_path / "other.txt").touch()
    files.prune(tmp_path, KEPT_JOURNALS)
    kept = sorted(int(path.name.split("-")[1]) for path in tmp_path.glob(journal.PATTERN))
    assert kept == list(range(5, KEPT_JOURNALS + 5))
    assert (tmp_path / "other.txt").exists()
