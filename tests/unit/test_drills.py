"""Drills: accepted, refused and undone by a worker; and the drill command."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pairs import Pair
from timely import ended, timely

from r2serve.cli import main
from r2serve.config import Config
from r2serve.drills import cli as drills_cli
from r2serve.drills import client, service, system
from r2serve.drills.order import DrillError, Order
from r2serve.drills.service import DrillService
from r2serve.drills.system import Guardian, SystemFault
from r2serve.errors import ConfigError
from r2serve.observe import files, journal

RAIL = "rail1@node0"


@pytest.fixture
def drilled(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path, drills=True, checksum=False)
    for rail in (0, 1):
        made.wait_for_state(rail, "UP")
    yield made
    made.close()


def injected(pair: Pair) -> list[str]:
    events = journal.parse(pair.engine.journal_bytes()).events
    return [event.text for event in events if event.kind == "injected"]


def losses(pair: Pair) -> list[str]:
    """Returns the rail of each loss by a drill; the rail itself may be back already."""
    events = journal.parse(pair.engine.journal_bytes()).events
    lost = [event for event in events if event.kind == "rail_state"]
    return [event.rail for event in lost if event.text.endswith("->DOWN injected")]


def start(pair: Pair, **fields: Any) -> list[dict[str, Any]]:
    return client.start(client.find(pair.folder, RAIL), rail=RAIL, **fields)


def drills(pair: Pair) -> list[dict[str, Any]]:
    """Returns the drills of the worker, once the worker answers."""

    def answer() -> list[list[dict[str, Any]]]:
        workers, found = client.listed(pair.folder)
        return [found] if workers else []

    return timely(answer, "an answer of the worker", within_s=60)[0]


def wait_for(done: Callable[[], object]) -> None:
    timely(done, "the expected state of the drill", within_s=60, every_s=0.005)


def test_a_drill_is_recorded_and_undoes_itself(drilled: Pair) -> None:
    (view,) = start(drilled, kind="carrier_loss", seconds=0.2)
    assert (view["kind"], view["rail"], view["ended_clock_ns"]) == ("carrier_loss", RAIL, 0)
    wait_for(lambda: RAIL in losses(drilled))
    assert drilled.engine.rails()[0]["state"] in ("UP", "SUSPECT")
    (listed,) = drills(drilled)
    assert listed["id"] == view["id"]
    drilled.wait_for_state(1, "UP")
    wait_for(lambda: drills(drilled)[0]["ended_clock_ns"])
    assert injected(drilled) == ["carrier_loss", "heal"]


def test_the_peer_knows_of_a_drill_before_its_fault(drilled: Pair) -> None:
    peer = drilled.ends[1].engine
    (view,) = start(drilled, kind="black_hole", seconds=600.0)
    assert [rail["drill"] for rail in peer.rails()] == ["", "black_hole"]
    assert [rail["drill"] for rail in drilled.engine.rails()] == ["", "black_hole"]
    events = journal.parse(peer.journal_bytes()).events
    assert [one.text for one in events if one.kind == "injected"] == ["black_hole at the peer"]
    client.end(drilled.folder, view["id"])
    timely(lambda: not peer.rails()[1]["drill"], "the end of the drill at the peer", within_s=60)


class Deaf:
    """An engine whose peer does not confirm a drill, or confirms at the third question."""

    def __init__(self, confirms: bool, peers: dict[int, str] | None = None) -> None:
        """``peers``: the state of the rail to each peer."""
        self.calls: list[str] = []
        self._confirms = confirms
        self._peers = peers or {7: "UP"}
        self.asked: set[int] = set()

    def rails(self) -> list[dict[str, Any]]:
        return [
            {
                "name": RAIL,
                "index": 1,
                "kind": "tcp",
                "peer": f"rank {peer}",
                "peer_engine": peer,
                "state": state,
            }
            for peer, state in self._peers.items()
        ]

    def drill_is_known(self, rail: int, process: int) -> bool:
        self.asked.add(process)
        return self._confirms and self.calls.count("drill_is_known") >= 3

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in ("announce_drill", "end_drill", "inject", "note_injected", "drill_is_known"):
            return found
        self.calls.append(name)
        return found

    def check_fault(self, fault: str, bytes_per_s: float) -> None: ...
    def announce_drill(self, rail: int, fault: str, seconds: float, process: int) -> None: ...
    def end_drill(self, rail: int, process: int) -> None: ...
    def inject(self, rail: int, fault: str, process: int, bytes_per_s: float) -> None: ...


@pytest.mark.parametrize(
    ("peers", "asked"),
    [
        ({7: "UP", 8: "DOWN"}, {7}),
        ({7: "SUSPECT", 8: "CONNECTING"}, {7}),
        ({7: "DOWN", 8: "DOWN"}, {7, 8}),
    ],
)
def test_a_drill_by_name_does_not_wait_for_a_lost_peer(
    peers: dict[int, str], asked: set[int], tmp_path: Path
) -> None:
    engine = Deaf(True, peers)
    path = tmp_path / "x.drills"
    serving = DrillService(engine, path)
    try:
        order = {"id": "1", "kind": "carrier_loss", "rail": RAIL, "seconds": 600.0}
        client.ask(path, {"do": "start", **order})
        assert engine.asked == asked
        assert engine.calls.count("announce_drill") == engine.calls.count("inject") == 2
    finally:
        serving.close()


@pytest.mark.parametrize("confirms", [False, True])
def test_a_fault_waits_for_the_confirmation_of_the_peer(
    confirms: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not confirms:
        monkeypatch.setattr(service, "KNOWN_S", 0.05)
    engine = Deaf(confirms)
    order = {"id": "1", "kind": "carrier_loss", "rail": RAIL, "seconds": 600.0}
    serving = DrillService(engine, tmp_path / "x.drills")
    try:
        path = tmp_path / "x.drills"
        if confirms:
            client.ask(path, {"do": "start", **order})
            assert engine.calls == ["announce_drill", *["drill_is_known"] * 3, "inject"]
        else:
            with pytest.raises(DrillError, match="did not confirm the drill"):
                client.ask(path, {"do": "start", **order})
            assert set(engine.calls) == {"announce_drill", "drill_is_known", "end_drill"}
            assert client.ask(path, {"do": "list"})["drills"] == []
    finally:
        serving.close()


def test_a_worker_answers_while_its_peers_confirm_a_drill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sidecar lists the drills of a worker that waits."""
    monkeypatch.setattr(service, "KNOWN_S", 600.0)
    path = tmp_path / "x.drills"
    order = {"id": "1", "kind": "carrier_loss", "rail": RAIL, "seconds": 600.0}
    refused: list[str] = []

    def start_and_wait() -> None:
        try:
            client.ask(path, {"do": "start", **order}, timeout_s=60)
        except DrillError as error:
            refused.append(str(error))

    engine = Deaf(confirms=False)
    serving = DrillService(engine, path)
    asking = threading.Thread(target=start_and_wait)
    asking.start()
    try:
        timely(lambda: client.listed(tmp_path)[1], "the drill that waits for its peers")
        assert client.end(tmp_path, "1") == 1
        asking.join()
        assert refused == ["do: start is refused, because the drill was ended"]
        assert "inject" not in engine.calls
        assert client.listed(tmp_path) == (1, [])
    finally:
        serving.close()
        asking.join()


def test_a_worker_that_closes_waits_for_no_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "KNOWN_S", 600.0)
    path = tmp_path / "x.drills"
    order = {"id": "1", "kind": "carrier_loss", "rail": RAIL, "seconds": 600.0}
    engine = Deaf(confirms=False)
    serving = DrillService(engine, path)
    with socket.socket(socket.AF_UNIX) as talk:
        talk.connect(str(path))
        talk.sendall(json.dumps({"do": "start", **order}).encode() + b"\n")
        timely(lambda: "drill_is_known" in engine.calls, "the wait for the peer")
        serving.close()
        assert "was ended" in json.loads(talk.makefile("rb").readline())["error"]
    assert "inject" not in engine.calls


def test_a_refusal_is_told_although_the_drill_of_other_workers_is_over() -> None:
    """The refusing worker waits for its peers, for longer than a short drill lasts."""
    asked: list[tuple[int, str]] = []

    class Worker(client.WorkerEnd):
        def ask(self, request: dict[str, Any]) -> dict[str, Any]:
            number = int(self.socket.name)
            asked.append((number, request["do"]))
            if request["do"] == "end":
                raise DrillError("id: no drill is running")
            if number == 2:
                raise DrillError("rail: a peer did not confirm the drill")
            return {"drill": {}}

    workers = [Worker(Path(str(number)), ()) for number in range(3)]
    with pytest.raises(DrillError, match="did not confirm"):
        client.start(workers, kind="carrier_loss", rail=RAIL, seconds=0.1)
    assert asked == [(0, "start"), (1, "start"), (2, "start"), (0, "end"), (1, "end")]


def test_without_a_thread_to_end_a_drill_its_fault_is_undone_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_thread = threading.Thread.start

    def start_no_drill(thread: threading.Thread) -> None:
        if thread.name == "r2serve-drill":
            raise RuntimeError("can't start new thread")
        start_thread(thread)

    monkeypatch.setattr(threading.Thread, "start", start_no_drill)
    path = tmp_path / "x.drills"
    order = {"id": "1", "kind": "carrier_loss", "rail": RAIL, "seconds": 600.0}
    engine = Deaf(confirms=True)
    serving = DrillService(engine, path)
    try:
        with pytest.raises(DrillError, match="nothing would end the drill: can't start new thread"):
            client.ask(path, {"do": "start", **order})
        assert engine.calls[-3:] == ["inject", "inject", "end_drill"]
        assert client.ask(path, {"do": "list"})["drills"] == []
    finally:
        serving.close()


def test_a_second_interrupt_does_not_keep_a_drill_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second Ctrl-C, while the first ends the drill, must not leave the drill running."""
    ended_drills: list[str] = []

    def end(folder: Path, identity: str) -> int:
        signal.raise_signal(signal.SIGINT)
        ended_drills.append(identity)
        return 1

    monkeypatch.setattr(client, "end", end)
    with pytest.raises(KeyboardInterrupt):
        drills_cli._end(tmp_path, "1")
    assert ended_drills == ["1"]


def test_a_drill_can_be_ended_before_its_time(drilled: Pair) -> None:
    (view,) = start(drilled, kind="black_hole", seconds=600.0)
    assert client.end(drilled.folder, view["id"]) == 1
    wait_for(lambda: injected(drilled) == ["black_hole", "heal"])
    with pytest.raises(DrillError, match="no drill"):
        client.end(drilled.folder, view["id"])


def test_a_flap_cuts_again_and_again(drilled: Pair) -> None:
    start(drilled, kind="flap", seconds=1.0, period_s=0.2)
    wait_for(lambda: drills(drilled)[0]["ended_clock_ns"])
    told = injected(drilled)
    assert set(told[::2]) == {"carrier_loss"}
    assert set(told[1::2]) == {"heal"}
    timely(lambda: told.count("carrier_loss") >= 2, f"cuts within 1 s: {told}", within_s=0)
    drilled.wait_for_state(1, "UP")


def test_a_worker_that_closes_ends_its_drills(drilled: Pair) -> None:
    start(drilled, kind="carrier_loss", seconds=600.0)
    drilled.close()
    assert client.sockets(drilled.folder) == []
    assert injected(drilled) == ["carrier_loss", "heal"]


def test_one_rail_has_one_drill_at_a_time(drilled: Pair) -> None:
    start(drilled, kind="black_hole", seconds=600.0)
    with pytest.raises(DrillError, match="already in drill"):
        start(drilled, kind="carrier_loss", seconds=1.0)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"kind": "melt", "seconds": 1.0}, "kind: 'melt' must be one of carrier_loss, black_hole"),
        ({"kind": "carrier_loss", "seconds": 0}, "seconds: 0 must be a number from 0.01 to 3600"),
        ({"kind": "carrier_loss", "seconds": 1e9}, "seconds: 1000000000.0 must be"),
        ({"kind": "slow", "seconds": 1.0, "mbit": -1}, "mbit: -1 must be"),
        ({"kind": "corrupt", "seconds": 1.0}, "corrupt needs checksum"),
        (
            {"kind": "carrier_loss", "seconds": 1.0, "peer": "rank 7"},
            "'rail1@node0' to rank 7 is not a rail",
        ),
    ],
)
def test_an_impossible_drill_is_refused_by_name(drilled: Pair, fields: Any, why: str) -> None:
    with pytest.raises(DrillError, match=why):
        start(drilled, **fields)
    assert injected(drilled) == []
    at_peer = journal.parse(drilled.ends[1].engine.journal_bytes()).events
    assert [event.text for event in at_peer if event.kind == "injected"] == []
    assert [drill for drill in drills(drilled) if not drill["ended_clock_ns"]] == []


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"{\n",
        b"[]\n",
        b'"x"\n',
        b"null\n",
        b"[" * 9999 + b"\n",
        b'{"do": "melt"}\n',
        b'{"do": "start", "x": 1}\n',
        b"x" * 99_999,
    ],
)
def test_a_malformed_request_gets_an_error_and_the_next_an_answer(
    drilled: Pair, said: bytes
) -> None:
    (path,) = client.sockets(drilled.folder)
    with socket.socket(socket.AF_UNIX) as talk:
        talk.connect(str(path))
        talk.sendall(said)
        talk.shutdown(socket.SHUT_WR)
        assert "error" in json.loads(talk.makefile("rb").readline())
    assert len(client.ask(path, {"do": "rails"})["rails"]) >= 2


def test_a_worker_without_a_rail_for_drills_says_so(tmp_path: Path) -> None:
    class Railless:
        def rails(self) -> list[dict[str, Any]]:
            return [{"name": "shm", "kind": "shm", "peer": "1"}]

    order = {"id": "1", "kind": "black_hole", "rail": RAIL, "seconds": 1}
    serving = DrillService(Railless(), tmp_path / "x.drills")
    try:
        with pytest.raises(DrillError, match="this worker has no rail for drills"):
            client.ask(tmp_path / "x.drills", {"do": "start", **order})
    finally:
        serving.close()


def test_only_the_workers_user_may_connect(drilled: Pair) -> None:
    (path,) = client.sockets(drilled.folder)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_socket_has_its_mode_from_the_start(
    drilled: Pair, tmp_path_factory: pytest.TempPathFactory
) -> None:
    before = os.umask(0)
    try:
        made = DrillService(drilled.engine, tmp_path_factory.mktemp("sockets") / "x.drills")
    finally:
        os.umask(before)
    (path,) = client.sockets(made._path.parent)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    made.close()


def test_a_folder_that_is_too_deep_for_a_socket_is_refused_at_start(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    Config(journal_dir=str(deep))
    with pytest.raises(ConfigError, match=r"journal_dir.*at most"):
        Config(journal_dir=str(deep), drills=True)


def test_sockets_of_killed_workers_are_pruned(drilled: Pair) -> None:
    left = drilled.folder / "r2ccl-1-abc.drills"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(left))
    assert len(client.sockets(drilled.folder)) == 2
    files.prune(drilled.folder, keep=64)
    assert len(client.sockets(drilled.folder)) == 1
    assert client.listed(drilled.folder)[0] == 1


def test_a_service_may_be_closed_from_one_of_its_threads(
    drilled: Pair,
) -> None:
    serving = drilled.ends[0].drills
    assert serving is not None

    class Closing:
        """An engine's finalizer may close the service in any thread."""

        def inject(self, *words: Any) -> None:
            drilled.engine.inject(*words)
            serving.close()

        def __getattr__(self, name: str) -> Any:
            return getattr(drilled.engine, name)

    workers = client.find(drilled.folder, RAIL)
    serving._engine = Closing()
    assert client.start(workers, rail=RAIL, kind="carrier_loss", seconds=0.05)
    timely(lambda: not serving._thread.is_alive(), "the end of the service", within_s=120)


def test_without_the_option_drills_are_refused(pair: Pair) -> None:
    with pytest.raises(DrillError, match="R2CCL_DRILLS=on"):
        client.find(pair.folder, RAIL)


def test_drills_without_a_journal_are_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="drills"):
        Config(drills=True)


def test_the_command_names_the_existing_rails(drilled: Pair) -> None:
    words = ["drill", "carrier_loss", "--rail", "rail7@node0", "--journal-dir", str(drilled.folder)]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 1
    assert "must be one of rail0@node0, rail1@node0" in result.output


def test_a_deprecated_kind_is_accepted_with_a_note(drilled: Pair) -> None:
    words = ["--rail", RAIL, "--for", "100ms", "--by", "engine"]
    folder = ["--journal-dir", str(drilled.folder)]
    result = CliRunner().invoke(main, ["drill", "drop", *words, *folder])
    assert result.exit_code == 0, result.output
    assert "`drop` is deprecated: use `black_hole`" in result.output
    assert f": black_hole of {RAIL} for 0.1 s" in result.output
    wait_for(lambda: injected(drilled) == ["black_hole", "heal"])


def test_a_fault_of_the_system_is_never_left_to_the_engine(drilled: Pair) -> None:
    words = ["--rail", RAIL, "--for", "100ms", "--peer", "rank 1"]
    folder = ["--journal-dir", str(drilled.folder)]
    result = CliRunner().invoke(main, ["drill", "egress_refused", *words, *folder])
    assert result.exit_code == 1
    assert "peer: 'rank 1' needs a fault by the engine" in result.output
    assert injected(drilled) == []


@pytest.mark.parametrize("word", ["melt", "port", "carrier-loss"])
def test_an_unknown_drill_is_no_command(word: str) -> None:
    result = CliRunner().invoke(main, ["drill", word, "--rail", RAIL])
    assert result.exit_code == 2
    assert "No such command" in result.output


def test_the_command_waits_and_prints_the_drill(drilled: Pair) -> None:
    words = ["--rail", RAIL, "--for", "200ms", "--by", "engine"]
    folder = ["--journal-dir", str(drilled.folder), "--json"]
    result = CliRunner().invoke(main, ["drill", "slow", "--mbit", "50", *words, *folder])
    assert result.exit_code == 0, result.output
    said = json.loads(result.output)
    assert (said["kind"], said["seconds"], said["mbit"]) == ("slow", 0.2, 50)
    wait_for(lambda: injected(drilled) == ["slow", "heal"])


def test_a_drill_ends_even_if_its_command_is_killed(drilled: Pair) -> None:
    code = "from r2serve.cli import main; main()"
    words = ["drill", "carrier_loss", "--rail", RAIL, "--for", "1s", "--by", "engine"]
    words += ["--journal-dir", str(drilled.folder)]
    command = subprocess.Popen([sys.executable, "-c", code, *words])
    wait_for(lambda: injected(drilled))
    command.kill()
    command.wait()
    drilled.wait_for_state(1, "UP")
    assert injected(drilled) == ["carrier_loss", "heal"]


@pytest.mark.parametrize("text", ["", "x", "5h", "-1s", "0", "1e9"])
def test_an_invalid_duration_is_refused(text: str) -> None:
    result = CliRunner().invoke(main, ["drill", "carrier_loss", "--rail", RAIL, "--for", text])
    assert result.exit_code == 2
    assert "--for" in result.output


def marking(folder: Path, seconds: float, period_s: float = 0.0) -> SystemFault:
    """Returns a fault whose start and end are written into a file."""

    def command(word: str) -> tuple[str, ...]:
        return ("sh", "-c", f"echo {word} >> {folder / 'said'}")

    return SystemFault([command("made")], [command("undone")], seconds, period_s)


def said(folder: Path) -> list[str]:
    return (folder / "said").read_text().split()


def test_a_guardian_undoes_when_the_time_is_over(tmp_path: Path) -> None:
    assert Guardian(marking(tmp_path, 0.2)).wait()
    assert said(tmp_path) == ["made", "undone"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_guardian_undoes_its_fault_on_a_signal(tmp_path: Path, number: int) -> None:
    guardian = Guardian(marking(tmp_path, 600.0))
    os.kill(guardian.pid, number)
    assert guardian.wait()
    assert said(tmp_path) == ["made", "undone"]


def test_a_guardian_outlives_its_parent(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from r2serve.drills.system import Guardian, SystemFault;"
        f"fault = SystemFault([('sh', '-c', 'echo made >> {tmp_path}/said')],"
        f" [('sh', '-c', 'echo undone >> {tmp_path}/said')], 0.5);"
        "Guardian(fault); os.killpg(0, signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code], start_new_session=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    wait_for(lambda: said(tmp_path) == ["made", "undone"])


def test_an_interrupt_while_a_fault_is_made_undoes_the_fault(tmp_path: Path) -> None:
    code = (
        # A test run in the background may ignore Ctrl-C, and the child would inherit that.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "import sys; from r2serve.drills.system import Guardian, SystemFault;"
        f"fault = SystemFault([('sh', '-c', 'echo made >> {tmp_path}/said'),"
        # The fault is not made before the interrupt, and the guardian has time to learn of it.
        " ('timeout', '60', 'sh', '-c',"
        f" 'until [ -e {tmp_path}/go ]; do sleep 0.05; done; sleep 1')],"
        f" [('sh', '-c', 'echo undone >> {tmp_path}/said')], 600.0);"
        "Guardian(fault)"
    )
    making = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    wait_for((tmp_path / "said").exists)
    making.send_signal(signal.SIGINT)
    (tmp_path / "go").touch()
    assert ended(making, "the interrupted drill", within_s=120) != 0
    assert said(tmp_path) == ["made", "undone"]


def test_a_guardian_flaps(tmp_path: Path) -> None:
    assert Guardian(marking(tmp_path, 2.0, 0.2)).wait()
    told = said(tmp_path)
    assert set(told[::2]) == {"made"}
    assert told[-1] == "undone"
    timely(lambda: len(told) >= 4, f"flaps within 2 s: {told}", within_s=0)


def test_a_fault_that_cannot_be_made_is_undone_and_reported(tmp_path: Path) -> None:
    fault = marking(tmp_path, 5.0)
    broken = SystemFault([*fault.make, ("sh", "-c", "echo no >&2; exit 3")], fault.undo, 5.0)
    with pytest.raises(DrillError, match=r"could not make the fault: .*no"):
        Guardian(broken)
    assert said(tmp_path) == ["made", "undone"]


def test_system_faults_need_a_port_of_this_namespace() -> None:
    with pytest.raises(DrillError, match=r"network device 'nope'|needs root"):
        system.plan("carrier_loss", "nope", "10.0.0.1:5", 1.0, mbit=1, period_s=1)
    if os.geteuid() == 0:
        with pytest.raises(DrillError, match="another network namespace"):
            system.plan("black_hole", "lo", "10.0.0.1:5", 1.0, mbit=1, period_s=1)
    with pytest.raises(DrillError, match="must be engine"):
        system.plan("corrupt", "lo", "127.0.0.1:5", 1.0, mbit=1, period_s=1)


def test_a_wrong_order_is_an_error_with_the_field() -> None:
    with pytest.raises(DrillError, match="id: '' must be"):
        Order(id="", kind="carrier_loss", rail=RAIL, seconds=1)
    with pytest.raises(DrillError, match="by: 'magic' must be"):
        Order(id="x", kind="carrier_loss", rail=RAIL, seconds=1, by="magic")
    with pytest.raises(DrillError, match="by: 'engine' cannot make egress_refused; must be system"):
        Order(id="x", kind="egress_refused", rail=RAIL, seconds=1)
