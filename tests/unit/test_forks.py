"""A forked child keeps no descriptor that makes its dead parent look alive."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from timely import timely

from r2serve.observe import files, request_log
from r2serve.observe.unobserved import Notes

PARENT = """
import os, sys, time
from pathlib import Path
from r2serve.drills.service import DrillService
from r2serve.observe.request_log import RequestLog
from r2serve.observe.unobserved import Note, Unobserved

folder = Path(sys.argv[1])

class Engine:
    def rails(self):
        return []

log = RequestLog(folder / "a.requests", writer="worker", label="rank 0", limit_bytes=400)
for number in range(20):  # rotates the log
    log.write({"n": number})
drills = DrillService(Engine(), folder / "a.drills")
unobserved = Unobserved(str(folder), Note(os.getpid(), "rank 0", "", "why"))
child = os.fork()
if child == 0:
    log.write({"n": -1})  # without effect
    while True:
        time.sleep(60)
log.write({"n": 20})
print(child, flush=True)
sys.stdin.read()
"""


def test_a_child_holds_neither_lock_nor_listening_socket(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{PARENT}", str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            log = tmp_path / "a.requests"
            assert files.is_written(log)
            assert [note.label for note in Notes(tmp_path).look()] == ["rank 0"]
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(tmp_path / "a.drills"))
            parent.kill()
            parent.wait()
            os.kill(child, 0)  # the child lives
            timely(lambda: not files.is_written(log), "the log's lock is free")
            with socket.socket(socket.AF_UNIX) as client:
                assert client.connect_ex(str(tmp_path / "a.drills")) != 0
            assert Notes(tmp_path).look() == []
            follower = request_log.Follower(log)
            lines = []
            while not follower.at_end:
                lines += [line["n"] for line in follower.lines()[0]]
            assert lines[-1] == 20
        finally:
            os.kill(child, signal.SIGKILL)
