"""Files of a journal folder share a limit, and a worker without room serves without a journal."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from pairs import Pair

from r2serve import process
from r2serve.config import Config
from r2serve.errors import ConfigError
from r2serve.observe import files, health, journal, request_log
from r2serve.observe.request_log import CLAIM_BYTES, Follower, RequestLog, previous
from r2serve.observe.watch import Watch

MIB = 1 << 20
OLD_S = time.time() - 3600


def leave(folder: Path, name: str, size: int = MIB, age_s: float = 0.0) -> Path:
    """Makes a file of an ended writer; older by ``age_s`` than others."""
    path = folder / name
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)
    os.utime(path, (OLD_S - age_s, OLD_S - age_s))
    return path


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def log_in(folder: Path, limit_bytes: int, name: str = "a.requests") -> RequestLog:
    return RequestLog(
        folder / name,
        writer="worker",
        label="rank 0",
        room_for=lambda need: files.room_for(folder, need, limit_bytes),
    )


def test_the_oldest_files_of_ended_writers_make_room(tmp_path: Path) -> None:
    for age in range(5):
        leave(tmp_path, f"r2ccl-{age}-1.journal", age_s=age)
    leave(tmp_path, "frontend-9-1.requests", age_s=9)
    leave(tmp_path, "frontend-9-1.requests.1", age_s=9)
    leave(tmp_path, "other.txt", age_s=99)
    assert files.used_bytes(tmp_path) == 7 * MIB
    assert files.room_for(tmp_path, MIB, 5 * MIB) == ""
    assert names(tmp_path) == {*(f"r2ccl-{age}-1.journal" for age in range(4)), "other.txt"}


def test_files_of_live_and_of_young_writers_stay(tmp_path: Path) -> None:
    log = log_in(tmp_path, 100 * MIB)
    young = leave(tmp_path, "r2ccl-1-1.journal")
    os.utime(young)  # about to be locked
    why = files.room_for(tmp_path, MIB, MIB)
    assert "R2CCL_JOURNAL_LIMIT_BYTES = 1048576" in why
    assert names(tmp_path) == {log.path.name, young.name}


def test_parts_left_by_a_killed_writer_are_deleted(tmp_path: Path) -> None:
    leave(tmp_path, "a.requests.new")
    leave(tmp_path, "b.requests")
    leave(tmp_path, "b.requests.old")
    assert files.room_for(tmp_path, MIB, MIB) == ""
    assert names(tmp_path) == set()


def test_a_small_file_system_is_shared_with_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A /dev/shm of 64 MiB, as in containers by default."""

    class System:
        f_blocks, f_frsize = 16 * 1024, 4096

    monkeypatch.setattr(os, "statvfs", lambda _: System)
    assert files.room_for(tmp_path, 16 * MIB, 32 * MIB) == ""
    assert "a quarter of the file system (67108864 bytes)" in files.room_for(
        tmp_path, 16 * MIB + 1, 32 * MIB
    )


def test_a_file_system_without_a_limit_has_that_of_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tmpfs with size=0 tells 0 blocks."""

    class System:
        f_blocks, f_frsize = 0, 4096

    monkeypatch.setattr(os, "statvfs", lambda _: System)
    assert files.room_for(tmp_path, MIB, MIB) == ""
    assert files.room_for(tmp_path, MIB + 1, MIB).endswith(
        "exceed 1048576, journal_limit_bytes (R2CCL_JOURNAL_LIMIT_BYTES = 1048576)"
    )


def test_a_crash_loop_leaves_no_more_than_the_limit(tmp_path: Path) -> None:
    """Each start leaves a journal and two parts of a request log, as a killed worker does."""
    limit = 8 * MIB
    for number in range(40):
        assert files.room_for(tmp_path, process.JOURNAL_BYTES, limit) == ""
        leave(tmp_path, f"r2ccl-{number}-1.journal", process.JOURNAL_BYTES, age_s=-number)
        log = log_in(tmp_path, limit, f"r2ccl-{number}-1.requests")
        for _ in range(40):
            log.write({"text": "x" * 16_000})
        log.close()
        for part in (log.path, previous(log.path)):
            if part.exists():
                os.utime(part, (OLD_S + number, OLD_S + number))
        assert files.used_bytes(tmp_path) <= limit
    assert "r2ccl-39-1.journal" in names(tmp_path)
    assert "r2ccl-39-1.requests" in names(tmp_path)


def test_a_log_without_room_gives_up_its_oldest_lines(tmp_path: Path) -> None:
    limit = 4 * CLAIM_BYTES
    log = log_in(tmp_path, limit)
    for number in range(2000):
        log.write({"n": number, "text": "x" * 1000})
        assert files.used_bytes(tmp_path) <= limit
    seen = []
    follower = Follower(log.path)
    while not follower.at_end:
        seen += [line["n"] for line in follower.lines()[0]]
    assert seen == list(range(seen[0], 2000))


def test_lines_are_dropped_while_others_take_all_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full = False
    asked = 0

    def room_for(_: int) -> str:
        nonlocal asked
        asked += 1
        return "no room" if full else ""

    monkeypatch.setattr(request_log, "ASK_AGAIN_S", 1e9)
    log = RequestLog(tmp_path / "a.requests", writer="worker", label="rank 0", room_for=room_for)
    full = True
    for _ in range(200):
        log.write({"text": "x" * 1000})
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= CLAIM_BYTES
    assert caplog.text.count("lines are dropped: no room") == 1
    assert asked == 4, "at the start, and once more with each part given up"
    full = False
    log._ask_again_s = 0.0  # as after ASK_AGAIN_S
    log.write({"n": 1})
    assert Follower(log.path).lines()[0][-1] == {"n": 1}


def test_a_start_that_fails_leaves_no_worker_without_a_journal(tmp_path: Path) -> None:
    folder = tmp_path / "missing"
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        process.acquire(Config(rails="192.0.2.1", journal_dir=str(folder)), 0, None, share=False)
    watch = Watch(folder)
    watch.look()
    assert watch.unobserved == []


@pytest.mark.parametrize("what", ["missing", "a file", "too small", "over the limit"])
def test_a_worker_serves_without_a_journal_and_the_sidecar_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: object, what: str
) -> None:
    folder = tmp_path / "folder"
    if what == "a file":
        folder.write_text("")
    elif what != "missing":
        folder.mkdir()
    if what == "too small":
        monkeypatch.setattr(files, "SHARE", 1 << 40)
    options = {}
    if what == "over the limit":
        options["journal_limit_bytes"] = MIB
        live = log_in(folder, 100 * MIB)  # its first claim leaves no room for a journal
        os.posix_fallocate(live._file, 0, CLAIM_BYTES)
    pair = Pair(folder, **options)
    try:
        for rail in (0, 1):
            pair.wait_for_state(rail, "UP")
        assert pair.engine.journal_path == ""
        assert journal.parse(pair.engine.journal_bytes()).label == "rank 0"
        watch = Watch(folder)
        watch.look()
        (note,) = watch.unobserved
        assert (note.label, note.process) == ("rank 0", os.getpid())
        found = health.examine(watch)
        assert (found.status, found.ready) == ("degraded", True)
        assert found.reasons[0].startswith(f"rank 0 (process {os.getpid()}) runs without a journal")
        assert str(folder) in found.reasons[0]
        assert health.examine(Watch(tmp_path)).status == "no-engine"  # another folder
    finally:
        pair.close()
        for end in pair.ends:
            if end.unobserved is not None:
                end.unobserved.close()
    watch = Watch(folder)
    watch.look()
    assert watch.unobserved == []
