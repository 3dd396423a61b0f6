"""Files that other users could read or write: tokens, and the file whose lines take rails down."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from r2serve import private_files
from r2serve.config import Config
from r2serve.errors import ConfigError
from r2serve.private_files import LONGEST_SECRET, read_private


@pytest.fixture
def fault_file(tmp_path: Path) -> Path:
    folder = tmp_path / "faults"
    folder.mkdir(mode=0o700)
    return folder / "lines"


def config_with(file: Path) -> Config:
    return Config.from_env({"R2CCL_FAULT_FILE": str(file)})


def test_a_fault_file_of_this_user_is_taken(fault_file: Path) -> None:
    assert config_with(fault_file).fault_file == str(fault_file)  # made later
    fault_file.touch(mode=0o644)
    assert config_with(fault_file).fault_file == str(fault_file)


@pytest.mark.parametrize("mode", [0o666, 0o660, 0o602])
def test_a_fault_file_that_others_can_write_is_refused(fault_file: Path, mode: int) -> None:
    """A line of any user in such a file would take a rail down for good."""
    fault_file.touch()
    fault_file.chmod(mode)
    with pytest.raises(ConfigError, match=r"fault_file .*the file is writable by other users"):
        config_with(fault_file)


def test_a_folder_in_which_others_can_replace_the_file_is_refused(fault_file: Path) -> None:
    fault_file.touch(mode=0o600)
    for mode in (0o777, 0o770):
        fault_file.parent.chmod(mode)
        with pytest.raises(ConfigError, match=r"its folder is writable by other users: .*go-w"):
            config_with(fault_file)
    fault_file.parent.chmod(0o777 | stat.S_ISVTX)  # like /tmp: the owner alone replaces the file
    config_with(fault_file)
    fault_file.unlink()
    with pytest.raises(ConfigError, match=r"its folder is writable by other users"):
        config_with(fault_file)


def test_files_of_a_stranger_are_refused(fault_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault_file.touch(mode=0o600)
    if os.geteuid() == 0:
        os.chown(fault_file, 65534, -1)
    owner = fault_file.stat().st_uid
    monkeypatch.setattr(private_files.os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match=f"the file belongs to user {owner}"):
        config_with(fault_file)
    with pytest.raises(PermissionError, match=f"belongs to user {owner}"):
        read_private(fault_file)


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640])
def test_a_private_file_is_read(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "token"
    file.write_bytes(b"x" * (LONGEST_SECRET + 1))
    file.chmod(mode)
    assert read_private(file) == b"x" * LONGEST_SECRET
    with pytest.raises(PermissionError, match="accessible to other users"):
        read_private(file, closed_to=mode)


@pytest.mark.timeout(60)
def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    for path in (pipe, tmp_path):
        with pytest.raises(OSError, match="no regular file"):
            read_private(path)
