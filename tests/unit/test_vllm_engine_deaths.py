"""The death of an engine process with its only worker inside shows in the exit status."""

from __future__ import annotations

import logging
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
from timely import patience

from r2serve.engines.children import EXIT_STATUS
from r2serve.engines.vllm import engine_deaths, exit_status

# As vLLM: a manager watches its engine processes and stops after the end of the first one. The
# first process then ends in good order.
SERVE = """
import logging, multiprocessing, os, signal, sys, types
from r2serve.engines import flag
from r2serve.engines.vllm import engine_deaths, exit_status

class CoreEngineProcManager:
    def __init__(self, how):
        self.failed_proc_name = None
        self.stopped = how == "is killed by its manager"
        self.processes = [
            context.Process(target=run, args=(how,), name=f"EngineCore_DP{number}")
            for number, how in enumerate((how, "stays"))
        ]
        for each in self.processes:
            each.start()

    def monitor_engine_liveness(self):
        first, other = self.processes
        first.join()
        if first.exitcode and not self.stopped:
            self.failed_proc_name = first.name
        other.kill()
        other.join()

def run(how):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if how == "stays":
        signal.pause()
    if how.startswith("is "):
        os.kill(os.getpid(), signal.SIGTERM if how == "is stopped" else signal.SIGKILL)
    os._exit(1 if how == "fails" else 0)

context = multiprocessing.get_context("fork")
fake = types.ModuleType("vllm.v1.engine.utils")
fake.CoreEngineProcManager = CoreEngineProcManager
sys.modules[fake.__name__] = fake
logging.basicConfig(level=logging.INFO)
flag.of_command_line = sys.argv[2] == "True"
exit_status.listen_once()
for _ in range(2):
    engine_deaths.hear_once()
CoreEngineProcManager(sys.argv[1]).monitor_engine_liveness()
"""


@pytest.mark.case("27", "a node whose engine process was killed ended with status 0")
@pytest.mark.parametrize(
    ("how", "command_line", "text"),
    [
        ("is killed", True, "EngineCore_DP0 (process"),
        ("is killed", False, ""),  # a program around vllm.LLM decides itself
        ("fails", True, "has ended (exit code: 1)"),
        ("ends", True, ""),
        ("is stopped", True, ""),  # a supervisor may signal every process of a unit
        ("is killed by its manager", True, ""),  # after the time for an orderly end
    ],
)
def test_the_end_of_an_engine_process_shows_in_the_exit_status(
    how: str, command_line: bool, text: str
) -> None:
    ran = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; sys.path[:] = {sys.path!r}\n{SERVE}",
            how,
            str(command_line),
        ],
        capture_output=True,
        text=True,
        timeout=60 * patience(),
    )
    assert ran.returncode == (EXIT_STATUS if text else 0), ran.stderr
    assert text in ran.stderr
    assert ran.stderr.count("exit status 70") == bool(text)


@pytest.mark.parametrize("release", [None, ModuleType("utils")], ids=["no module", "no class"])
def test_a_release_without_the_watch_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, release: ModuleType | None
) -> None:
    monkeypatch.setattr(exit_status, "_failures", SimpleNamespace(is_own=lambda: True))
    monkeypatch.setitem(sys.modules, engine_deaths.MODULE, release)
    with caplog.at_level(logging.WARNING, logger=engine_deaths.__name__):
        engine_deaths.hear_once()
    assert "the death of an engine process may leave exit status 0" in caplog.text


def test_other_processes_watch_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = type(engine_deaths.MANAGER, (), {engine_deaths.WATCH: lambda _: None})
    watch = getattr(manager, engine_deaths.WATCH)
    module = ModuleType(engine_deaths.MODULE)
    setattr(module, engine_deaths.MANAGER, manager)
    monkeypatch.setattr(exit_status, "_failures", None)
    monkeypatch.setitem(sys.modules, engine_deaths.MODULE, module)
    engine_deaths.hear_once()
    assert getattr(manager, engine_deaths.WATCH) is watch
