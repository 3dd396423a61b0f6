"""docs/quickstart.md, followed to the letter on two nodes of a lab with vLLM.

Only the model, its sizes, the addresses and the names of devices are other ones. A bash of the node
runs each command. The installation of step 1 is the environment of the tests.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from quickstart import Command, commands
from timely import ended, timely

from r2serve.lab.faults import nic_name
from r2serve.lab.holder import LabUnavailableError
from r2serve.lab.lab import Lab
from r2serve.lab.nodes import management_address
from r2serve.lab.serving.model import make_tiny_llama

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

SIZES = "--dtype float32 --enforce-eager --max-model-len 4096 --max-num-seqs 4"
START_S, TOKENS_S = 900.0, 900.0


class Reader:
    """A person at two nodes, with the page."""

    def __init__(self, lab: Lab, work: Path) -> None:
        self.lab, self.work = lab, work
        self.model = make_tiny_llama(work / "model")
        self.folders = [work / f"node{node}" for node in (0, 1)]
        for folder in self.folders:
            folder.mkdir()
        self.environment = [self._environment(node) for node in (0, 1)]
        self.page = commands()

    def _environment(self, node: int) -> dict[str, str]:
        folder = self.folders[node]
        here = Path(sys.executable).parent
        return dict(os.environ) | {
            "PATH": f"{here}:{os.environ['PATH']}",
            "COLUMNS": "80",
            "HOME": str(folder),
            "TMPDIR": str(folder),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # Both nodes share the file system of this host.
            "R2CCL_JOURNAL_DIR": str(folder / "journals"),
        }

    def text_at(self, node: int, text: str) -> str:
        """Returns a command of the page with this lab's names in place of the page's."""
        ours = {"eth0": nic_name(None), "eth1": nic_name(0), "eth2": nic_name(1)}
        ours |= {"10.0.0.1": management_address(0), "MODEL": str(self.model)}
        if "VLLM_HOST_IP" in text:  # the page: the node's own address
            ours["10.0.0.1"] = management_address(node)
        for theirs, name in ours.items():
            text = re.sub(rf"(?<![\w.]){re.escape(theirs)}(?![\w.])", name, text)
        return f"{text} {SIZES}" if text.startswith("vllm serve") else text

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

    def run(self, node: int, text: str) -> tuple[int, str]:
        """Runs a command at a node; returns status and output."""
        status = ended(self.start(node, text), text, within_s=300)
        return status, self.out(node).read_text(errors="replace")

    def follow(self, command: Command) -> list[tuple[int, str]]:
        """Runs a command at its nodes."""
        return [self.run(node, command.text) for node in command.nodes]


@pytest.fixture
def reader() -> Iterator[Reader]:
    with ExitStack() as stack:
        # Sockets of the engine have long names, so the folder has a short one.
        work = Path(stack.enter_context(TemporaryDirectory(prefix="r2s-")))
        try:
            lab = stack.enter_context(Lab(nodes=2, rails=2))
        except LabUnavailableError as error:
            pytest.skip(f"no lab on this machine: {error}")
        yield Reader(lab, work)


def test_the_page_leads_to_a_server_that_survives_a_lost_cable(reader: Reader) -> None:
    # 2. Look at the nodes.
    for command in reader.find("r2serve topo", "r2serve doctor"):
        if "--peer" in command.text:
            shutil.copy(reader.folders[1] / "node1.json", reader.folders[0])
        for status, said in reader.follow(command):
            assert status == 0, f"{command.text}: {said}"
    # 3. Set the environment.
    for command in reader.find("export"):
        for node in command.nodes:
            name, _, value = reader.text_at(node, command.text).split(" ", 1)[1].partition("=")
            reader.environment[node][name] = value
    # 4. Start the engine.
    servers = []
    for command in reader.find("vllm serve"):
        [node] = command.nodes
        servers.append(reader.start(node, command.text))
        reader.out(node).rename(reader.out(node, "log"))  # the open file keeps its writer

    def log(node: int) -> str:
        return reader.out(node, "log").read_text(errors="replace")

    def serves() -> bool:
        for node, server in enumerate(servers):
            assert server.poll() is None, log(node)[-5000:]
        return reader.run(0, "curl -sf http://10.0.0.1:8000/health")[0] == 0

    timely(serves, "the engine serves", within_s=START_S, every_s=2)
    carried = r"group tp:0: 2 ranks on 2 nodes, carried by r2ccl over .*rail0@node\d, rail1@node\d"
    assert re.search(carried, log(0)), log(0)
    # 5. Watch the rails.
    [rails] = reader.find("r2serve rails")

    def states() -> list[list[str]]:
        found = []
        for node, (_, said) in enumerate(reader.follow(rails)):
            lines = [line.split() for line in said.splitlines() if line.startswith("rail")]
            found.append([f"{words[0]} {words[2]}" for words in lines if "@" in words[0]])
            assert found[node], said
        return found

    everything = [[f"rail{rail}@node{node} UP" for rail in (0, 1)] for node in (0, 1)]
    timely(lambda: states() == everything, "all rails are UP", within_s=120, every_s=1)
    for node in (0, 1):
        assert reader.run(node, "curl -sf http://localhost:8199/readyz")[0] == 0
    # 6. Pull a cable.
    [request] = reader.find("curl")
    asking = reader.start(0, request.text)
    answer = reader.out(0).rename(reader.out(0, "answer"))

    def tokens() -> int:
        return answer.read_text(errors="replace").count("data: {")

    timely(lambda: tokens() > 20, "the first tokens", within_s=TOKENS_S)
    down, up = reader.find("ip link")
    [(status, said)] = reader.follow(down)
    assert status == 0, said
    before = tokens()
    assert asking.poll() is None, "the answer ended before the fault"
    timely(lambda: tokens() > before + 50, "tokens after the fault", within_s=TOKENS_S)
    lost = (
        r"rail0@node0 \(.*\) on .* to rank 1 was lost \(.*\): .* stall in .*; carried by .*; "
        r"requests: cmpl-"
    )
    timely(lambda: re.search(lost, log(0)), "the line about the fault", within_s=120)
    timely(lambda: "rail0@node0 DOWN" in states()[0], "the port is DOWN", within_s=120, every_s=1)
    assert reader.run(0, rails.text)[0] == 0  # requests are served
    [(status, said)] = reader.follow(up)
    assert status == 0, said
    timely(lambda: states() == everything, "the rail is UP again", within_s=300, every_s=1)
    assert ended(asking, "the answer", within_s=TOKENS_S) == 0
    lines = answer.read_text().splitlines()
    assert "data: [DONE]" in lines
    told = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert all("error" not in each for each in told)
