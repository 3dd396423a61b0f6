"""Journals of processes with the network plugin, as r2serve's commands and its sidecar see them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from fastapi.testclient import TestClient

from r2serve.cli import nccl
from r2serve.observe.health import engines
from r2serve.observe.sidecar import app as sidecar
from r2serve.observe.watch import Watch

PLAYER = """
import sys
sys.path.insert(0, sys.argv[1])
import nccl_player
net = nccl_player.Net(sys.argv[2])
nccl_player.say(f"devices {net.init()}")
sys.stdin.read()
"""


def test_journals_and_metrics_name_nccl_as_the_engine(tmp_path: Path) -> None:
    env = os.environ | {"R2CCL_RAILS": "127.0.0.1", "R2CCL_JOURNAL_DIR": str(tmp_path)}
    words = [sys.executable, "-c", PLAYER, str(Path(__file__).parents[1]), str(nccl.library())]
    with subprocess.Popen(
        words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "devices 1\n"
        watch = Watch(tmp_path)
        watch.look()
        assert engines(watch) == ["nccl"]
        [worker] = watch.live()
        assert worker.journal.process == process.pid
        of_nccl = Watch(tmp_path, engine="nccl")
        of_nccl.look()
        assert len(of_nccl.live()) == 1
        with TestClient(sidecar.make_app(watch), base_url="http://localhost") as client:
            assert (
                'r2serve_serving_engine_ready{serving_engine="nccl"}' in client.get("/metrics").text
            )
        process.kill()
