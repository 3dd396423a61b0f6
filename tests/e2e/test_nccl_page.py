"""docs/nccl.md, followed on two nodes of a lab, with a player in place of NCCL and torchrun.

Only the address and the names of devices are other ones. A bash of the node runs each command.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from timely import ended, timely

from r2serve.lab.faults import nic_name
from r2serve.lab.lab import Lab

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "nccl.md"
PLAYER = ROOT / "tests" / "nccl_player.py"
LONG_S = 120.0
RAILS = (0, 1)


def commands() -> list[str]:
    """Returns the commands of both nodes under the heading "Two nodes"."""
    section = PAGE.read_text(encoding="utf-8").split("\n### Two nodes\n")[1]
    block = re.search(r"^```\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    assert block is not None
    exported, *starts = block[1].splitlines()
    assert exported.startswith("export R2CCL_RAILS=")
    assert [start.partition("# ")[2] for start in starts] == ["node 0", "node 1"]
    return [f"{exported}\n{start}" for start in starts]


class Reader:
    """A person at two nodes, with the page."""

    def __init__(self, lab: Lab, work: Path) -> None:
        self._lab, self._work = lab, work
        ours = ("R2CCL_", "NCCL_")
        self._environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        self._environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    def text_at(self, text: str) -> str:
        """Returns a command of the page with this lab's names in place of the page's."""
        names = {"eth1": nic_name(0), "eth2": nic_name(1)}
        names |= {"10.0.1.1": self._lab.nodes[0].rail_address(0)}
        names |= {"torchrun": f"{sys.executable} {PLAYER}"}
        for theirs, name in names.items():
            assert theirs in text
            text = re.sub(rf"(?<![\w.]){re.escape(theirs)}(?![\w.])", name, text)
        return text

    def start(self, node: int, text: str) -> subprocess.Popen[bytes]:
        with self.log(node).open("wb") as log:
            return self._lab.nodes[node].popen(
                ["bash", "-c", text],
                env=self._environment,
                cwd=self._work,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def log(self, node: int) -> Path:
        return self._work / f"node{node}.log"

    def said(self, node: int) -> str:
        return self.log(node).read_text(errors="replace")

    def rounds(self, node: int) -> int:
        found = re.findall(r"^rounds (\d+)$", self.said(node), re.MULTILINE)
        return int(found[-1]) if found else 0

    def has(self, node: int, up: dict[str, bool]) -> bool:
        """Whether `r2serve rails` at a node shows these rails, by device, and requests are served.

        up: device, and whether its rail is up.
        """
        out = self._work / "rails"
        with out.open("wb") as file:
            words = ["r2serve", "rails", "--json"]
            asked = self._lab.nodes[node].popen(words, env=self._environment, stdout=file)
        if ended(asked, "r2serve rails") != 0:
            return False
        rails = json.loads(out.read_text())
        return up == {rail["device"]: rail["state"] in ("UP", "SUSPECT") for rail in rails}


def test_two_nodes_of_the_page_survive_a_lost_cable(
    make_lab: Callable[..., Lab], tmp_path: Path
) -> None:
    lab = make_lab(len(RAILS))
    reader = Reader(lab, tmp_path)
    texts = [reader.text_at(text) for text in commands()]
    ranks = [reader.start(node, text) for node, text in enumerate(texts)]

    def more_rounds(than: int) -> bool:
        for node, rank in enumerate(ranks):
            assert rank.poll() is None, reader.said(node)[-4000:]
        return min(map(reader.rounds, (0, 1))) > than

    def go_on(what: str) -> None:
        before = max(map(reader.rounds, (0, 1)))
        timely(lambda: more_rounds(before + 100), what, within_s=LONG_S)

    go_on("messages pass")
    both = {nic_name(rail): True for rail in RAILS}
    for node in (0, 1):
        assert f"devices {len(RAILS)}\n" in reader.said(node)
    for node in (0, 1):
        timely(partial(reader.has, node, both), "both rails are up", LONG_S, every_s=0.5)
    lab.cut(0, 0)
    go_on("messages pass without a cable")
    one = both | {nic_name(0): False}
    timely(partial(reader.has, 0, one), "the lost rail is shown", LONG_S, every_s=0.5)
    lab.heal(0, 0)
    timely(partial(reader.has, 0, both), "the rail is back", LONG_S, every_s=0.5)
    go_on("messages pass with both cables")
    (tmp_path / "stop").touch()
    for node, rank in enumerate(ranks):
        assert ended(rank, f"rank {node}", within_s=LONG_S) == 0, reader.said(node)[-4000:]
        assert re.search(r"^done \d+$", reader.said(node), re.MULTILINE)
    # The lines of the log that the page promises.
    lost = [line for line in reader.said(0).splitlines() if "carrier_loss" in line]
    assert lost, reader.said(0)
    assert all(line.startswith("NET/r2ccl: ") for line in lost)
