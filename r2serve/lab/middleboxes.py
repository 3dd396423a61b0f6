"""Client of a middlebox: the process between a node and a rail's network (see middlebox.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from r2serve.lab.holder import NAMESPACES, LabCommandError

MIDDLEBOX = Path(__file__).with_name("middlebox.py")
PATIENCE_S = 10.0


class Middlebox:
    """A running middlebox in the switch's namespaces, ready to read packets.

    pid: process with the namespaces. user: a user namespace is used. options: as of middlebox.py.
    Raises LabCommandError if the box cannot start.
    """

    def __init__(self, pid: int, user: bool, *options: str) -> None:
        entry = [str(NAMESPACES), "enter", str(pid), *(["--user"] if user else []), "--"]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", *entry, sys.executable, "-I", "-S", MIDDLEBOX, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        if said != b"ready\n":
            self._end()
            raise LabCommandError(f"middlebox at {options[0]}: {said.decode().strip()}")

    def close(self) -> None:
        """Ends the box, which passes on all held packets before.

        Raises LabCommandError if the box ended before, by an error, or does not end.
        """
        code = self._end()
        if code != 0:
            raise LabCommandError(f"a middlebox ended with status {code}")

    def _end(self) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            return self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
