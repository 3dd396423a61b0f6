"""Engines in a confined process: read-only root, tiny /dev/shm, no capability, no netlink."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

UNIT = Path(__file__).resolve().parents[1] / "unit"

CONFINED = """
set -e
mount -o remount,ro,bind /
mount -t tmpfs -o size=512k tmpfs /dev/shm
exec setpriv --bounding-set=-all --inh-caps=-all --no-new-privs "$@"
"""

PROGRAM = """
import json, logging, os, sys
from pathlib import Path
from test_without_netlink import refuse_netlink
refuse_netlink()
said = []
class Kept(logging.Handler):
    def emit(self, record):
        if record.levelno >= logging.WARNING:
            said.append(record.getMessage())
logging.getLogger().addHandler(Kept())
from pairs import Pair
from r2serve.config import Config
from r2serve.observe import health
from r2serve.observe.watch import Watch
from r2serve.process import acquire, release
from timely import timely

folder = Path(sys.argv[1])
own = acquire(Config(rails="127.0.0.1", journal_dir=str(folder), drills=True), 0, None, False)
release(own)
warnings = list(said)
pair = Pair(folder)
for rail in (0, 1):
    pair.wait_for_state(rail, "UP")
pair.cut_and_heal(1)
watch = Watch(folder)
def settled():  # a starved machine may suspect a rail for a moment, which is a reason, too
    watch.look()
    now = health.examine(watch)
    return now if now.ready and len(now.reasons) == 1 else None
found = timely(settled, "a ready node with one reason")
capabilities = [line for line in open("/proc/self/status") if line.startswith("CapEff")]
print(json.dumps({
    "warnings": warnings,
    "ready": found.ready,
    "reasons": found.reasons,
    "journal": pair.engine.journal_path,
    "capabilities": capabilities[0].split()[1],
}))
pair.close()
"""


def confined(folder: str) -> dict[str, Any]:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    paths = [str(UNIT), *sys.path]
    ran = subprocess.run(
        [
            *("unshare", "-m", "bash", "-c", CONFINED, "confined"),
            *(sys.executable, "-c", f"import sys; sys.path[:] = {paths!r}\n{PROGRAM}", folder),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    assert int(found["capabilities"], 16) == 0
    return found


@pytest.mark.case("15", "no start without netlink")
@pytest.mark.parametrize(
    ("folder", "why"),
    [
        ("/dev/shm", "a quarter of the file system (524288 bytes)"),
        ("/var/tmp", "Read-only file system"),
    ],
)
def test_a_confined_engine_serves_with_one_warning_for_each_loss(folder: str, why: str) -> None:
    found = confined(folder)
    journal, carrier = sorted(found["warnings"], key=lambda line: "carrier" in line)
    assert "without a journal" in journal
    assert why in journal
    assert "carrier events are missing" in carrier
    assert found["journal"] == ""
    assert found["ready"]
    (reason,) = found["reasons"]
    assert why in reason
