"""A host short of CPU is named as such in the journal, the metrics and the log."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from timely import TimingMiss, timely

from r2serve.observe.run_delay import run_delay_ns
from r2serve.observe.sidecar.metrics import Metrics
from r2serve.observe.watch import Watch

PAUSE_S = 0.6
LONG_NS = 0.8 * PAUSE_S * 1e9

CODE = """
import json, sys, time
from pathlib import Path
from pairs import Pair
from r2serve.observe import journal
pair = Pair(Path(sys.argv[1]))
print("ready", flush=True)
for _ in sys.stdin:
    read = journal.parse(pair.engine.journal_bytes())
    events = [[one.text, one.value] for one in read.events if one.kind == "short_of_cpu"]
    print(json.dumps({"ns": read.short_of_cpu_ns, "events": events}), flush=True)
"""


def test_a_stopped_process_says_that_it_did_not_run(tmp_path: Path) -> None:
    paths = [str(Path(__file__).parent), *sys.path]
    with subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path[:] = {paths!r}\n{CODE}", str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"

        def is_told() -> bool:
            child.stdin.write("\n")
            child.stdin.flush()
            said.update(json.loads(child.stdout.readline()))
            return max((value for _, value in said["events"]), default=0) > LONG_NS

        # A record joins the pauses of a second, or of longer on a starved machine, which may also
        # have paused the process just before. So the process is stopped again.
        said: dict[str, Any] = {"events": []}
        for _ in range(5):
            child.send_signal(signal.SIGSTOP)
            time.sleep(PAUSE_S)
            child.send_signal(signal.SIGCONT)
            with contextlib.suppress(TimingMiss):
                timely(is_told, "the engine tells its pause", within_s=10, every_s=0.1)
                break
        watch = Watch(tmp_path)
        watch.look()
        shown = Metrics(watch).render().decode()
        child.stdin.close()
    assert said["ns"] > LONG_NS
    text, value = max(said["events"], key=lambda event: event[1])
    assert value > LONG_NS
    assert text.startswith("the engine did not run for ")
    lines = [one for one in shown.splitlines() if "short_of_cpu_seconds_total{" in one]
    assert max(float(one.rpartition(" ")[2]) for one in lines) > 0.8 * PAUSE_S


@pytest.mark.skipif(
    not Path("/proc/thread-self/schedstat").exists(), reason="no scheduler statistics here"
)
def test_the_run_delay_of_a_thread_grows_while_others_use_its_cpu() -> None:
    mine = os.sched_getaffinity(0)
    one = {min(mine)}
    before = run_delay_ns()

    def burnt() -> bool:
        """Uses the CPU for 0.1 s; returns whether the run delay has grown by 0.1 s so far."""
        ends = time.monotonic() + 0.1
        while time.monotonic() < ends:
            pass
        return run_delay_ns() - before > 0.1e9

    os.sched_setaffinity(0, one)  # the child inherits the CPU
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as hog:
        try:
            timely(burnt, "0.1 s of run delay beside another process", within_s=60, every_s=0)
        finally:
            os.sched_setaffinity(0, mine)
            hog.kill()
