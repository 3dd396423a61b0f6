"""A fake lab and fake workers for stall measurements, without namespaces and processes."""

from __future__ import annotations

import threading
import time

from r2serve.lab.holder import LabCommandError

PATIENCE_S = 30.0
CALL_S = 0.001
CALLS_AFTER = 5


class FakeLab:
    """Records the commands of a lab and the queries to its workers, each with its time.

    works: whether a fault takes its rail down. refuses: the command that fails. commands: number of
    commands so far.
    """

    rails = 2
    nodes = (0, 1)

    def __init__(self, *, works: bool = True, refuses: str = "") -> None:
        self.log: list[str] = []
        self.times_s: list[float] = []
        self.lost: set[tuple[int, int]] = set()
        self.commands = 0
        self._works = works
        self._refuses = refuses
        self._lock = threading.Lock()

    def note(self, text: str) -> None:
        with self._lock:
            self.log.append(text)
            self.times_s.append(time.monotonic())

    def cut(self, node: int, rail: int) -> None:
        self._command("cut", node, rail)

    def black_hole(self, node: int, rail: int) -> None:
        self._command("black_hole", node, rail)

    def egress_refused(self, node: int, rail: int) -> None:
        self._command("egress_refused", node, rail)

    def middlebox_ack(self, node: int, rail: int) -> None:
        self._command("middlebox_ack", node, rail)

    def heal(self, node: int, rail: int) -> None:
        self._command("heal", node, rail)

    def _command(self, word: str, node: int, rail: int) -> None:
        self.note(f"{word} {node} {rail}")
        if word == "heal":
            self.lost.discard((node, rail))
        elif self._works:
            self.lost.add((node, rail))
        self.commands += 1
        if word == self._refuses:
            raise LabCommandError(f"{word}: refused")


class FakeWorkers:
    """Two ranks whose traffic uses only rail 0.

    window_ms, commands: a soak of `window_ms` ms lasts until the lab has run `commands` more
    commands. hangs: calls wait while a rail is lost. dies: the exception raised by a soak when a
    rail is lost.
    """

    def __init__(
        self,
        lab: FakeLab,
        window_ms: int,
        *,
        commands: int = 0,
        hangs: bool = False,
        dies: Exception | None = None,
    ) -> None:
        self._lab = lab
        self._window_ms = window_ms
        self._commands = commands
        self._hangs = hangs
        self._dies = dies
        self._sent = 0

    def ask(self, line: str, expected: str) -> list[list[str]]:
        if line == "rails":
            self._lab.note("rails")
            return [self._rails(rank) for rank in range(2)]
        if int(line.split()[1]) != self._window_ms:
            return self._soak(self._lab.commands)
        self._lab.note("soak")
        return self._soak(self._lab.commands + self._commands)

    def _rails(self, rank: int) -> list[str]:
        lost = self._lab.lost
        states = ["DOWN" if (rank, rail) in lost else "UP" for rail in range(2)]
        sent = (self._sent, 0)
        return [f"rail{rail}@node{rank},{states[rail]},{sent[rail]}" for rail in range(2)]

    def _soak(self, commands: int) -> list[list[str]]:
        self._sent += 4096
        start = before = time.monotonic_ns()
        times: list[int] = []
        done = False
        while not done:
            if time.monotonic_ns() - start > PATIENCE_S * 1e9:
                raise TimeoutError("the lab ran no command")
            done = self._lab.commands >= commands
            time.sleep(CALL_S)
            while self._hangs and self._lab.lost:
                time.sleep(CALL_S)
            if self._dies is not None and self._lab.lost:
                raise self._dies
            now = time.monotonic_ns()
            times.append(now - before)
            before = now
        # A fixed number of calls follows the fault, so that nothing is left to chance.
        times += [1000] * CALLS_AFTER
        return [[str(start), *map(str, times)]] * 2
