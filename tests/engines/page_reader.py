"""A reader of docs/quickstart.md follows the page to the letter on two nodes of a lab.

Only the model, its sizes, the addresses and the names of devices are other ones. A bash of the node
runs each command. The installation of step 1 is the environment of the tests.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from quickstart import Command, commands
from timely import TimingMiss, ended, timely

from r2serve.lab.faults import nic_name
from r2serve.lab.holder import LabUnavailableError
from r2serve.lab.lab import Lab
from r2serve.lab.nodes import management_address
from r2serve.lab.serving.model import make_tiny_llama
from r2serve.ports.management_address import VARIABLES

START_S, TOKENS_S = 900.0, 900.0
PULLS = 3
BOTH = (0, 1)


@dataclass(frozen=True)
class PageEngine:
    """An engine of the page.

    bin: folder of its commands. sizes: options of a small model on CPUs. host_ip: its variable in
    place of VLLM_HOST_IP. variables: of a machine without a GPU.
    """

    name: str
    bin: Path
    sizes: str
    host_ip: str = VARIABLES[0]
    variables: dict[str, str] = field(default_factory=dict)


class Reader:
    """A person at two nodes, with the page."""

    def __init__(self, lab: Lab, work: Path, engine: PageEngine) -> None:
        self.lab, self.work, self.engine = lab, work, engine
        self.model = make_tiny_llama(work / "model")
        self.folders = [work / f"node{node}" for node in BOTH]
        for folder in self.folders:
            folder.mkdir()
        self.environment = [self._environment(node) for node in BOTH]
        self.page = commands()
        self.servers: list[subprocess.Popen[bytes]] = []

    def _environment(self, node: int) -> dict[str, str]:
        folder = self.folders[node]
        return (
            dict(os.environ)
            | {
                "PATH": f"{self.engine.bin}:{os.environ['PATH']}",
                "COLUMNS": "80",
                "HOME": str(folder),
                "TMPDIR": str(folder),
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
                # Both nodes share the file system of this host.
                "R2CCL_JOURNAL_DIR": str(folder / "journals"),
            }
            | self.engine.variables
        )

    def text_at(self, node: int, text: str) -> str:
        """Returns a command of the page with this lab's names in place of the page's."""
        ours = {"eth0": nic_name(None), "eth1": nic_name(0), "eth2": nic_name(1)}
        ours |= {"10.0.0.1": management_address(0), "MODEL": str(self.model)}
        if VARIABLES[0] in text:  # the page: the node's own address, and SGLang's variable
            ours |= {"10.0.0.1": management_address(node), VARIABLES[0]: self.engine.host_ip}
        for theirs, name in ours.items():
            text = re.sub(rf"(?<![\w.]){re.escape(theirs)}(?![\w.])", name, text)
        serves = text.startswith(f"{self.engine.name} serve")
        return f"{text} {self.engine.sizes}" if serves else text

    def find(self, *beginnings: str) -> list[Command]:
        return [each for each in self.page if each.text.startswith(beginnings)]

    def start(self, node: int, text: str) -> subprocess.Popen[bytes]:
        """Starts a command at a node; the output is in `out` of the node's folder."""
        (self.folders[node] / "journals").mkdir(exist_ok=True)
        with self.out(node).open("wb") as out:
            return self.lab.nodes[node].popen(
                ["bash", "-c", self.text_at(node, text)],
                env=self.environment[node],
                cwd=self.folders[node],
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def out(self, node: int, name: str = "out") -> Path:
        return self.folders[node] / name

    def log(self, node: int) -> str:
        """Returns the log of the node's server."""
        return self.out(node, "log").read_text(errors="replace")

    def run(self, node: int, text: str) -> tuple[int, str]:
        """Runs a command at a node; returns status and output."""
        status = ended(self.start(node, text), text, within_s=300)
        return status, self.out(node).read_text(errors="replace")

    def follow(self, command: Command) -> list[tuple[int, str]]:
        """Runs a command at its nodes."""
        return [self.run(node, command.text) for node in command.nodes]

    def states(self) -> list[list[str]]:
        """Returns the rails of each node with their states, as `r2serve rails` prints them."""
        [rails] = self.find("r2serve rails")
        found = []
        for _, said in self.follow(rails):
            lines = [line.split() for line in said.splitlines() if line.startswith("rail")]
            found.append([f"{words[0]} {words[2]}" for words in lines if "@" in words[0]])
            assert found[-1], said
        return found


@contextmanager
def a_reader(engine: PageEngine) -> Iterator[Reader]:
    """Yields a reader with a lab; skips the test on a machine without labs."""
    with ExitStack() as stack:
        # Sockets of the engine have long names, so the folder has a short one.
        work = Path(stack.enter_context(TemporaryDirectory(prefix="r2s-")))
        try:
            lab = stack.enter_context(Lab(nodes=2, rails=2))
        except LabUnavailableError as error:
            pytest.skip(f"no lab on this machine: {error}")
        yield Reader(lab, work, engine)


def follow_the_page(reader: Reader) -> None:
    """Follows steps 2 to 6: the engine serves, and survives a lost cable."""
    look_at_the_nodes(reader)
    set_the_environment(reader)
    start_the_engine(reader)
    watch_the_rails(reader)
    pull_a_cable(reader)


def look_at_the_nodes(reader: Reader) -> None:
    for command in reader.find("r2serve topo", "r2serve doctor"):
        if "--peer" in command.text:
            shutil.copy(reader.folders[1] / "node1.json", reader.folders[0])
        for status, said in reader.follow(command):
            assert status == 0, f"{command.text}: {said}"


def set_the_environment(reader: Reader) -> None:
    for command in reader.find("export"):
        for node in command.nodes:
            name, _, value = reader.text_at(node, command.text).split(" ", 1)[1].partition("=")
            reader.environment[node][name] = value


def start_the_engine(reader: Reader) -> None:
    for command in reader.find(f"{reader.engine.name} serve"):
        [node] = command.nodes
        reader.servers.append(reader.start(node, command.text))
        reader.out(node).rename(reader.out(node, "log"))  # the open file keeps its writer
    assert len(reader.servers) == len(BOTH)

    def serves() -> bool:
        for node, server in enumerate(reader.servers):
            assert server.poll() is None, reader.log(node)[-5000:]
        return reader.run(0, "curl -sf http://10.0.0.1:8000/health")[0] == 0

    timely(serves, "the engine serves", within_s=START_S, every_s=2)
    carried = r"group tp:0: 2 ranks on 2 nodes, carried by r2ccl over .*rail0@node\d, rail1@node\d"
    assert re.search(carried, reader.log(0)), reader.log(0)


def everything_is_up(reader: Reader) -> bool:
    return reader.states() == [[f"rail{rail}@node{node} UP" for rail in (0, 1)] for node in BOTH]


def watch_the_rails(reader: Reader) -> None:
    timely(lambda: everything_is_up(reader), "all rails are UP", within_s=120, every_s=1)
    for node in BOTH:
        assert reader.run(node, "curl -sf http://localhost:8199/readyz")[0] == 0


def pull_a_cable(reader: Reader) -> None:
    [request] = reader.find("curl")
    asking = reader.start(0, request.text)
    answer = reader.out(0).rename(reader.out(0, "answer"))

    def parts() -> list[Any]:
        """Returns the whole parts of the answer; curl's progress stands among them."""
        text = answer.read_text(errors="replace")
        lines = text[: text.rfind("\n") + 1].splitlines()
        return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]

    def tokens() -> int:
        return len(parts())

    timely(lambda: tokens() > 20, "the first tokens", within_s=TOKENS_S)
    down, up = reader.find("ip link")

    def told() -> bool:
        lost = (
            r"rail0@node0 \(.*\) on .* to rank 1 was lost \(.*\): .* stall in .*; carried by .*; "
            rf"requests: {re.escape(parts()[0]['id'])}"
        )
        return re.search(lost, reader.log(0)) is not None

    # A fault between two collectives stalls no step and has no line: pull the cable again.
    for place in range(PULLS):
        [(status, said)] = reader.follow(down)
        assert status == 0, said
        before = tokens()
        assert asking.poll() is None, "the answer ended before the fault"
        timely(lambda b=before: tokens() > b + 50, "tokens after the fault", within_s=TOKENS_S)
        try:
            timely(told, "the line about the fault", within_s=20)
            break
        except TimingMiss as miss:
            if place == PULLS - 1:
                raise TimingMiss(f"{miss}\n{reader.log(0)[-3000:]}") from None
        [(status, said)] = reader.follow(up)
        assert status == 0, said
        timely(lambda: everything_is_up(reader), "the rail is UP again", within_s=300, every_s=1)
    timely(
        lambda: "rail0@node0 DOWN" in reader.states()[0],
        "the port is DOWN",
        within_s=120,
        every_s=1,
    )
    [rails] = reader.find("r2serve rails")
    assert reader.run(0, rails.text)[0] == 0  # requests are served
    [(status, said)] = reader.follow(up)
    assert status == 0, said
    timely(lambda: everything_is_up(reader), "the rail is UP again", within_s=300, every_s=1)
    assert ended(asking, "the answer", within_s=TOKENS_S) == 0
    assert "data: [DONE]" in answer.read_text().splitlines()
    assert all("error" not in each for each in parts())
