"""A sidecar in a separate process, with requests for tests."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from timely import timely

SETTLED_S = 120.0


class Sidecar:
    """A sidecar in a separate process, over a folder of journals."""

    def __init__(self, folder: Path, port: int, *options: str) -> None:
        self.folder, self.port, self.options = folder, port, options
        self.start()

    def start(self) -> None:
        words = ["sidecar", "--port", str(self.port), "--journal-dir", str(self.folder)]
        words += self.options
        command = [sys.executable, "-c", "from r2serve.cli import main; main()", *words]
        self.process = subprocess.Popen(command)
        timely(self.answers, "the sidecar answers", SETTLED_S)

    def answers(self) -> bool:
        assert self.process.poll() is None, f"the sidecar ended: {self.process.returncode}"
        with contextlib.suppress(urllib.error.URLError):
            self.get("/livez")
            return True
        return False

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.port}{path}", timeout=60
            ) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def ask(self, path: str) -> Any:
        return json.loads(self.get(path)[1])

    def events(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        while page := self.ask(f"/v1/events?limit=1000&after={found[-1]['id'] if found else 0}")[
            "events"
        ]:
            found += page
        return found

    def metric(self, name: str, **labels: str) -> float:
        """Returns the sum of all samples of a metric with the given labels."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(
            float(line.rpartition(" ")[2])
            for line in self.get("/metrics")[1].splitlines()
            if re.match(rf"{name}\{{", line) and all(each in line for each in wanted)
        )
