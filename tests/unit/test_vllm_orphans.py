"""An engine process that dies suddenly shows in the exit status of `vllm serve`."""

from __future__ import annotations

import subprocess
import sys

import pytest
from timely import patience

from r2serve.engines.children import EXIT_STATUS

# As vLLM: the first process has an engine process, which has a worker. After the death of the
# engine process the worker ends, and the first process ends in good order after the worker.
SERVE = """
import logging, multiprocessing, os, signal, sys, threading
from r2serve.engines import flag
from r2serve.engines.vllm import exit_status, orphans

def work(ready):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    orphans.watch_once()
    orphans.watch_once()
    ready.set()
    for thread in threading.enumerate():
        if thread.name == "r2serve-parent":  # vLLM's worker ends its device meanwhile
            thread.join()
    os._exit(0)

def run(how, ready):
    worker = context.Process(target=work, args=(ready,), name="Worker-0", daemon=True)
    worker.start()
    ready.wait()
    if how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    worker.terminate()
    worker.join()
    sys.exit(1 if how == "fails" else 0)

context = multiprocessing.get_context("fork")
reading, writing = os.pipe()  # the engine process and the worker hold its end
logging.basicConfig(level=logging.INFO)
flag.of_command_line = True
exit_status.listen_once()
engine = context.Process(target=run, args=(sys.argv[1], context.Event()), name="EngineCore")
engine.start()
os.close(writing)
os.read(reading, 1)
engine.join()
"""


@pytest.mark.case("27", "a node whose engine process was killed ended with status 0")
@pytest.mark.parametrize(
    ("how", "status", "line"),
    [
        ("is killed", EXIT_STATUS, "a worker failed: EngineCore (process "),
        ("ends", 0, ""),
        ("fails", 0, ""),  # vLLM tells of this end by itself
    ],
)
def test_a_killed_engine_process_shows_in_the_exit_status(how: str, status: int, line: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{SERVE}", how],
        capture_output=True,
        text=True,
        timeout=60 * patience(),
    )
    assert ran.returncode == status, ran.stderr
    assert line in ran.stderr
    assert ("exit status" in ran.stderr) == bool(line)
