"""Relays in a lab: connections survive the loss of NICs, and the job ends with a relay."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from prometheus_client.parser import text_string_to_metric_families
from real_rails import rejecting
from timely import ended, timely

from r2serve.cli import main
from r2serve.lab.lab import Lab
from r2serve.lab.nodes import Node
from r2serve.observe.sidecar.metrics import Metrics
from r2serve.observe.watch import Watch

R2SERVE = Path(sys.executable).with_name("r2serve")
TALK = Path(__file__).parent / "workers" / "relay_talk.py"
TORCH = TALK.with_name("relay_torch.py")
PARENT = TALK.with_name("relay_parent.py")
MASTERS = "10.77.0.1,10.77.1.1,10.77.2.1"
FAILED = 70


class Talker:
    """A process of a node that prints lines of JSON."""

    def __init__(self, node: Node, argv: Sequence[str], env: dict[str, str] | None = None) -> None:
        self.process = node.popen(
            argv,
            env=os.environ | {"R2CCL_CONTROL_MASTER": MASTERS} | (env or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.lines: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(json.loads(line))

    def hear(self, key: str) -> dict[str, Any]:
        """Waits for a line with `key`."""

        def heard() -> dict[str, Any]:
            while not self.lines.empty():
                line = self.lines.get()
                assert "failed" not in line or key == "failed", line
                if key in line:
                    return line
            assert self.process.poll() is None or not self.lines.empty(), self.process.returncode
            return {}

        return timely(heard, f"a line with {key}", within_s=60)

    def go_on(self, rounds: int) -> None:
        """Waits for `rounds` more reports of the asking side, one per 50 answers."""
        while not self.lines.empty():
            assert "failed" not in self.lines.get()
        for _ in range(rounds):
            self.hear("count")

    def say(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode() + b"\n")
        self.process.stdin.flush()

    def close_stdin(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)
        self._reader.join(10)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            if not stream.closed:
                try:
                    stream.close()
                except BrokenPipeError:
                    continue  # the line is needed no more


Start = Callable[..., Talker]


@pytest.fixture
def start() -> Iterator[Start]:
    with ExitStack() as stack:

        def made(node: Node, *argv: str, env: dict[str, str] | None = None) -> Talker:
            talker = Talker(node, argv, env)
            stack.callback(talker.stop)
            return talker

        yield made


def start_relay(
    lab: Lab,
    start: Start,
    node: int,
    env: dict[str, str] | None = None,
    as_user: Sequence[str] = (),
) -> Talker:
    arguments = ["--nodes", "2", "--master", "10.77.0.1", "--port", "29500"]
    command = [*as_user, str(R2SERVE), "relay", "--node", str(node), *arguments]
    return start(lab.nodes[node], *command, env=env)


def start_jobs(
    lab: Lab, start: Start, *launcher: str, program: Path = TORCH, **options: str
) -> list[Talker]:
    """Starts a torch job behind relays: a rank on each node, or ranks of a launcher."""
    jobs = []
    for node in (0, 1):
        arguments = ["--nodes", "2", "--master", "10.77.0.1", "--port", "29500"]
        command = [str(R2SERVE), "relay", "--node", str(node), *arguments, "--", sys.executable]
        command += [word.replace("{node}", str(node)) for word in launcher]
        env = {"RANK": str(node), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", **options}
        jobs.append(start(lab.nodes[node], *command, str(program), env=env))
    return jobs


def start_relays(lab: Lab, start: Start) -> list[Talker]:
    return [start_relay(lab, start, node) for node in (0, 1)]


def start_talk(
    lab: Lab,
    start: Start,
    prefix: str,
    echo_at: int = 0,
    ask_at: int = 1,
    as_user: Sequence[str] = (),
) -> Talker:
    """Returns the asking side."""
    program = [*as_user, sys.executable, str(TALK)]
    echo = start(lab.nodes[echo_at], *program, "serve", prefix, str(echo_at))
    port = echo.hear("port")["port"]
    address = f"{prefix.removesuffix('.0')}.{echo_at + 1}"
    return start(lab.nodes[ask_at], *program, "ask", address, str(port))


@pytest.fixture
def pair(make_lab: Callable[..., Lab]) -> Lab:
    return make_lab(nodes=2, rails=2)


def test_connections_survive_the_loss_of_all_nics_but_one(
    pair: Lab, start: Start, show: Callable[[str], None]
) -> None:
    relays = start_relays(pair, start)
    ready = [relay.hear("prefix") for relay in relays]
    assert ready[0]["prefix"] == ready[1]["prefix"]
    assert [each["address"].rsplit(".", 1)[1] for each in ready] == ["1", "2"]
    talk = start_talk(pair, start, ready[0]["prefix"])
    talk.go_on(2)
    pair.cut(0, None)
    talk.go_on(2)
    pair.black_hole(1, 0)
    talk.go_on(2)
    pair.heal(1, 0)
    talk.go_on(2)
    talk.say("end")
    end = talk.hear("end")
    show(f"{end['end']} answers, the worst after {end['worst_ms']} ms")
    assert ended(talk.process, "the talk", 30) == 0


def test_a_filter_that_rejects_everything_is_an_outage(pair: Lab, start: Start) -> None:
    """Refusals alone are no proof that the other relay is dead."""
    relays = start_relays(pair, start)
    [prefix, _] = [relay.hear("prefix")["prefix"] for relay in relays]
    asking = start_talk(pair, start, prefix)
    asking.go_on(1)
    with rejecting(pair.nodes[1]):
        time.sleep(4.0)
    asking.go_on(2)
    assert [relay.process.poll() for relay in relays] == [None, None]


OTHER_USER = ["--reuid", "65534", "--regid", "65534", "--clear-groups"]
NO_RIGHTS = ["--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]


@pytest.mark.long
def test_relays_need_no_rights(pair: Lab, start: Start) -> None:
    """All processes run as user 65534 without capabilities."""
    rights = ["setpriv", *OTHER_USER, *NO_RIGHTS]
    if os.geteuid() != 0:
        pytest.skip("needs root")
    can_read = [*rights, sys.executable, "-c", "import r2serve._core"]
    if subprocess.run(can_read, check=False).returncode:
        pytest.skip("user 65534 may not read this checkout")
    relays = [start_relay(pair, start, node, as_user=rights) for node in (0, 1)]
    ready = [relay.hear("prefix") for relay in relays]
    talk = start_talk(pair, start, ready[0]["prefix"], as_user=rights)
    talk.go_on(1)
    pair.cut(0, None)
    talk.go_on(2)


def test_a_start_without_the_management_nic(pair: Lab, start: Start) -> None:
    pair.cut(0, None)
    pair.cut(1, None)
    relays = start_relays(pair, start)
    ready = [relay.hear("prefix") for relay in relays]
    talk = start_talk(pair, start, ready[0]["prefix"])
    talk.go_on(1)


def ask(folder: Path, *words: str) -> Result:
    """Runs a command of `r2serve` for the journals of a folder."""
    runner = CliRunner(env={"COLUMNS": "200"})
    return runner.invoke(main, [*words, "--journal-dir", str(folder)])


def ends_of(rails: Sequence[dict[str, Any]]) -> set[tuple[str, str]]:
    return {(rail["label"], rail["peer"]) for rail in rails}


def test_tools_name_a_relay_by_its_node(pair: Lab, start: Start, tmp_path: Path) -> None:
    """A lost rail of a relay must not look like a lost rail of a worker."""
    folder = tmp_path / "journals"
    folder.mkdir(mode=0o700)
    relays = [
        start_relay(pair, start, 0, {"R2CCL_JOURNAL_DIR": str(folder)}),
        start_relay(pair, start, 1),
    ]
    for relay in relays:
        relay.hear("prefix")
    wanted = {("relay of node 0", "relay of node 1")}

    def shown() -> bool:
        return ends_of(json.loads(ask(folder, "rails", "--json").stdout)) == wanted

    timely(shown, "`r2serve rails` shows the rails of the relay")
    assert "relay of node 0" in ask(folder, "rails", "--links").output
    summary = json.loads(ask(folder, "top", "--json", "--count", "1").stdout)
    assert ends_of(summary["rails"]) == wanted
    watch = Watch(folder)
    watch.look()
    text = Metrics(watch).render().decode()
    labels = {
        (sample.labels["worker"], sample.labels["peer"])
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "r2serve_rail_up"
    }
    assert labels == wanted


def test_a_node_joins_after_the_start(make_lab: Callable[..., Lab], start: Start) -> None:
    lab = make_lab(nodes=3, rails=1)
    relays = start_relays(lab, start)
    ready = [relay.hear("prefix") for relay in relays]
    late = start_relay(lab, start, 2)
    assert late.hear("prefix")["prefix"] == ready[0]["prefix"]
    for at in (0, 1):  # the late node's connections to every other node
        start_talk(lab, start, ready[0]["prefix"], at, 2).go_on(1)


def test_a_relay_that_is_killed_ends_the_relay_of_the_other_node(pair: Lab, start: Start) -> None:
    limit = {"R2CCL_LINK_TIMEOUT_S": "5"}
    relays = [start_relay(pair, start, node, limit) for node in (0, 1)]
    for relay in relays:
        relay.hear("prefix")
    pair.nodes[1].kill_all()
    failed = relays[0].hear("failed")
    assert failed["error"] == "PeerLostError"
    assert "the relay of node 1: " in failed["failed"]
    # A relay that leaves unread bytes on every rail counts as lost after link_timeout_s.
    reasons = ("its process is gone", "no rail within the link timeout")
    assert any(reason in failed["failed"] for reason in reasons), failed
    assert ended(relays[0].process, "relay 0", 30) == FAILED


def test_a_relay_ends_with_its_parent_and_tells_the_other_node(pair: Lab, start: Start) -> None:
    relays = start_relays(pair, start)
    for relay in relays:
        relay.hear("prefix")
    relays[0].close_stdin()
    assert ended(relays[0].process, "relay 0", 30) == 0
    failed = relays[1].hear("failed")
    assert failed["error"] == "PeerClosedError"
    assert "node 0 has ended" in failed["failed"]
    assert ended(relays[1].process, "relay 1", 30) == FAILED


def test_a_relay_ends_with_a_killed_parent_whose_child_has_the_pipe(
    pair: Lab, start: Start, show: Callable[[str], None]
) -> None:
    """The pipe stays open, so only the number of the parent tells the relay of the death."""
    relay = start_relay(pair, start, 0)
    place = ["1", "2", "10.77.0.1", "29500"]
    parent = start(pair.nodes[1], sys.executable, str(PARENT), *place)
    relay.hear("prefix")
    parent.hear("prefix")
    killed = time.monotonic()
    parent.say("die")
    failed = relay.hear("failed")
    late_s = time.monotonic() - killed
    assert failed["error"] == "PeerClosedError"
    assert "node 1 has ended" in failed["failed"]
    assert ended(relay.process, "relay 0", 30) == FAILED
    show(f"parent of relay 1 killed: relay 0 ends after {late_s:.2f} s")
    timely(lambda: late_s < 3.0, f"relay 0 ended after {late_s:.2f} s", 0)


def test_a_stop_of_all_processes_of_a_unit_leaves_the_relay_to_its_parent(
    pair: Lab, start: Start
) -> None:
    relays = start_relays(pair, start)
    [prefix, _] = [relay.hear("prefix")["prefix"] for relay in relays]
    asking = start_talk(pair, start, prefix)
    asking.go_on(1)
    relays[0].process.send_signal(signal.SIGTERM)
    asking.go_on(5)
    assert relays[0].process.poll() is None
    relays[0].close_stdin()
    assert ended(relays[0].process, "relay 0", 30) == 0


def test_a_pre_shared_key_must_be_the_same(pair: Lab, start: Start, tmp_path: Path) -> None:
    for node, key in enumerate((b"a" * 32, b"b" * 32)):
        path = tmp_path / f"key{node}"
        path.write_bytes(key)
        path.chmod(0o600)
    relays = [
        start_relay(pair, start, node, env={"R2CCL_SECRET_FILE": str(tmp_path / f"key{node}")})
        for node in (0, 1)
    ]
    assert "R2CCL_SECRET_FILE" in relays[1].hear("failed")["failed"]
    assert ended(relays[1].process, "relay 1", 30) == FAILED


def test_a_relay_that_waits_for_other_nodes_ends_with_its_parent(pair: Lab, start: Start) -> None:
    relay = start_relay(pair, start, 0)
    other = start_relay(pair, start, 1, {"R2CCL_CONTROL_MASTER": "10.77.1.9"})
    for each in (relay, other):
        each.close_stdin()
        assert ended(each.process, "a relay without a parent", 30) == 0


def test_a_torch_job_survives_the_loss_of_the_management_nic(
    pair: Lab, start: Start, show: Callable[[str], None]
) -> None:
    """Stores and gloo groups of `r2serve relay -- COMMAND`, over all NICs but one."""
    survive_two_nics(pair, start_jobs(pair, start), show)


TORCHRUN = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
STATIC = ["--node-rank", "{node}", "--master-addr", "{master}", "--master-port", "29500"]
C10D = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "{master}:29500", "--rdzv-id", "1"]


@pytest.mark.long
@pytest.mark.parametrize(
    "rendezvous", [STATIC, [*C10D, "--local-addr", "{address}"]], ids=["static", "c10d"]
)
def test_torchrun_survives_the_loss_of_the_management_nic(
    pair: Lab, start: Start, show: Callable[[str], None], rendezvous: list[str]
) -> None:
    """Two ranks on each node; the stores of torchrun's agents are carried, too."""
    survive_two_nics(pair, start_jobs(pair, start, *TORCHRUN, *rendezvous), show)


def survive_two_nics(lab: Lab, jobs: Sequence[Talker], show: Callable[[str], None]) -> None:
    """The management NIC goes for good, and a rail becomes a black hole for a while."""
    jobs[0].go_on(2)
    lab.cut(0, None)
    jobs[0].go_on(2)
    lab.black_hole(1, 0)
    jobs[0].go_on(2)
    lab.heal(1, 0)
    for job in jobs:
        job.say("end")  # rank 0 listens, on any node
    for job in jobs:
        end = job.hear("end")
        show(f"{end['end']} rounds, the worst took {end['worst_ms']} ms")
    for node, job in enumerate(jobs):
        assert ended(job.process, f"job {node}", 30) == 0


@pytest.mark.long
@pytest.mark.parametrize("lost", [None, 0], ids=["all NICs", "a rail lost before"])
def test_the_word_of_a_relay_tells_of_a_death(
    pair: Lab, start: Start, show: Callable[[str], None], lost: int | None
) -> None:
    """Unread bytes on every rail, whose connections are then reset, make no difference."""
    program = TALK.with_name("relay_death.py")
    options = {"R2CCL_REFUSED_GRACE_S": "20"}  # refusals alone prove nothing within this time
    ranks = start_jobs(pair, start, program=program, **options)
    for rank in ranks:
        rank.hear("ready")
    if lost is not None:
        pair.black_hole(1, lost)
        time.sleep(2.0)
    ranks[1].say("die")
    dies_at = ranks[1].hear("dies_at")["dies_at"]
    said = ranks[0].hear("error")
    assert said["error"] == "PeerLostError", said
    assert "the process has ended" in said["text"], said
    late_s = said["at"] - dies_at
    show(f"rank 1 killed: known after {late_s:.3f} s")
    timely(lambda: late_s < 0.3, f"known after {late_s:.3f} s", 0)


def test_a_torch_job_ends_with_a_lost_node(pair: Lab, start: Start) -> None:
    """A relay with unread bytes on every rail counts as lost after link_timeout_s."""
    jobs = start_jobs(pair, start, R2CCL_LINK_TIMEOUT_S="5")
    jobs[0].go_on(1)
    pair.nodes[1].kill_all()
    assert ended(jobs[0].process, "job 0", 60) == FAILED
