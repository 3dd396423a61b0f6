"""Request logs: written, rotated, and followed at the same time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from r2serve.observe import files
from r2serve.observe.request_log import Follower, RequestLog, RequestLogError, previous


def make(path: Path, **options: int) -> RequestLog:
    return RequestLog(path, writer="worker", label="rank 0", **options)


def numbers(follower: Follower) -> list[int]:
    return [line["n"] for line in follower.lines()[0]]


def test_each_line_is_read_once_while_the_log_grows(tmp_path: Path) -> None:
    log = make(tmp_path / "a.requests")
    follower = Follower(log.path)
    assert numbers(follower) == []
    assert follower.head["label"] == "rank 0"
    for number in range(3):
        log.write({"n": number})
        assert numbers(follower) == [number]
    assert numbers(follower) == []


def test_a_log_is_bounded_and_a_follower_loses_no_line(tmp_path: Path) -> None:
    log = make(tmp_path / "a.requests", limit_bytes=2000)
    follower = Follower(log.path)
    seen = []
    for number in range(1000):
        log.write({"n": number})
        if number % 50 == 0:
            while found := numbers(follower):
                seen += found
    while found := numbers(follower):
        seen += found
    assert seen == list(range(1000))
    kept = sorted(tmp_path.iterdir())
    assert kept == [log.path, previous(log.path)]
    assert all(path.stat().st_size <= 2000 for path in kept)


def test_a_late_follower_reads_the_kept_lines(tmp_path: Path) -> None:
    log = make(tmp_path / "a.requests", limit_bytes=2000)
    for number in range(1000):
        log.write({"n": number})
    follower = Follower(log.path)
    seen = []
    while found := numbers(follower):
        seen += found
    assert seen == list(range(seen[0], 1000))
    assert len(seen) > 100


def test_a_partial_line_is_read_when_complete(tmp_path: Path) -> None:
    log = make(tmp_path / "a.requests")
    follower = Follower(log.path)
    with log.path.open("ab") as raw:
        raw.write(b'{"n": ')
        raw.flush()
        assert numbers(follower) == []
        raw.write(b"7}\n")
    assert numbers(follower) == [7]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b'{"n": 1}\n', "is no header"),
        (b"\x00\xff\n", "is no header"),
        (b"[1]\n", "is no header"),
        (b"[" * 9999 + b"\n", "is no header"),
        (b'{"r2serve": "requests", "version": 99}\n', "version 99"),
        (b'{"r2serve": "requests", "version": 1}\n', "no clocks"),
    ],
)
def test_an_invalid_log_is_refused(tmp_path: Path, text: bytes, why: str) -> None:
    path = tmp_path / "a.requests"
    path.write_bytes(text)
    with pytest.raises(RequestLogError, match=why):
        Follower(path).lines()


@pytest.mark.parametrize(
    "spoilt", [b"\xff\n", b"[]\n", b"{\n", b"[" * 9999 + b"\n", b"x" * (5 << 20) + b"\n"]
)
def test_only_the_malformed_line_is_skipped(tmp_path: Path, spoilt: bytes) -> None:
    log = make(tmp_path / "a.requests")
    log.write({"n": 1})
    with log.path.open("ab") as raw:
        raw.write(spoilt)
    log.write({"n": 2})
    follower, seen, portions = Follower(log.path), [], 0
    while not follower.at_end:
        seen += numbers(follower)
        portions += 1
    assert seen == [1, 2]
    assert follower.broken == 1


def test_a_line_that_is_longer_than_a_log_is_left_out(tmp_path: Path) -> None:
    log = make(tmp_path / "a.requests", limit_bytes=500)
    log.write({"n": 1})
    log.write({"n": 2, "text": "x" * 1000})
    log.write({"n": 3})
    follower, seen = Follower(log.path), []
    while not follower.at_end:
        seen += numbers(follower)
    assert seen == [1, 3]
    assert max(path.stat().st_size for path in tmp_path.iterdir()) <= 500


def test_lines_written_just_before_a_new_part_are_read(tmp_path: Path) -> None:
    log = make(tmp_path / "a.requests", limit_bytes=400)
    follower = Follower(log.path)
    assert numbers(follower) == []
    part = log.path.stat().st_ino
    number = 0
    while log.path.stat().st_ino == part:  # the follower reads up to the last lines of a part
        log.write({"n": number})
        number += 1
    seen = []
    while found := numbers(follower):
        seen += found
    assert seen == list(range(number))


def test_the_leftover_of_a_killed_writer_is_replaced(tmp_path: Path) -> None:
    log = make(tmp_path / "a.requests", limit_bytes=400)
    (tmp_path / "a.requests.new").write_text("left by a part that was never begun")
    for number in range(100):
        log.write({"n": number})
    assert {path.name for path in tmp_path.iterdir()} == {"a.requests", "a.requests.1"}


def test_a_full_file_system_leaves_no_partial_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = make(tmp_path / "a.requests")
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[: len(data) // 2]))
    with pytest.raises(OSError, match="no room"):
        log.write({"n": 1})
    monkeypatch.undo()
    log.write({"n": 2})
    assert numbers(Follower(log.path)) == [2]


def test_pipes_and_symlinks_are_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.requests")
    (tmp_path / "link.requests").symlink_to("/etc/hostname")
    for name in ("pipe.requests", "link.requests"):
        with pytest.raises(OSError, match=r"no regular file|Too many levels"):
            Follower(tmp_path / name)


def test_a_log_shows_whether_its_writer_lives(tmp_path: Path) -> None:
    log = make(tmp_path / "a.requests", limit_bytes=500)
    assert files.is_written(log.path)
    for number in range(100):
        log.write({"n": number})
    assert files.is_written(log.path)
    log.close()
    assert not files.is_written(log.path)
    assert log.path.stat().st_mode & 0o777 == 0o600


def test_logs_of_ended_writers_are_pruned_with_their_previous_parts(tmp_path: Path) -> None:
    logs = [make(tmp_path / f"{number}.requests", limit_bytes=500) for number in range(4)]
    for number, log in enumerate(logs):
        for line in range(100):
            log.write({"n": line})
        os.utime(log.path, (number, number))
    for log in logs[:3]:
        log.close()
    files.prune(tmp_path, keep=1)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {name for n in (2, 3) for name in (f"{n}.requests", f"{n}.requests.1")}
