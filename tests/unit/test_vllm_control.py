"""vLLM's connections behind a relay: where a relay starts, what moves, and how the engine ends."""

from __future__ import annotations

import logging
import os
import queue
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from r2serve.config import Config
from r2serve.engines.children import EXIT_STATUS
from r2serve.engines.node_store import ComparedNode
from r2serve.engines.vllm import carried, control, ending, exit_status, handshake
from r2serve.engines.vllm.control import Site, addresses_of, rewrite, site_of
from r2serve.errors import (
    ConfigError,
    PeerClosedError,
    PeerLostError,
    R2cclError,
    StartupTimeoutError,
)
from r2serve.ports.management_address import HostAddressError
from r2serve.relay.client import Carried
from r2serve.relay.lines import NO_RELAY, NoRelayError
from r2serve.relay.parent import Failure
from r2serve.variables import MANAGEMENT, RELAY

HERE = Carried("127.7.8.0", 1)
ALONE = {
    "nnodes": 1,
    "node_rank": 0,
    "master_addr": "127.0.0.1",
    "master_port": 29501,
    "data_parallel_size": 1,
    "data_parallel_size_local": 1,
    "data_parallel_rank": 0,
    "data_parallel_rank_local": None,
    "data_parallel_external_lb": False,
    "data_parallel_backend": "mp",
    "data_parallel_master_ip": "127.0.0.1",
    "data_parallel_rpc_port": 29550,
    "distributed_executor_backend": "mp",
    "distributed_timeout_seconds": None,
}
TWO_NODES = {"nnodes": 2, "node_rank": 1, "master_addr": "10.0.0.1"}
REPLICAS = {
    "data_parallel_size": 4,
    "data_parallel_size_local": 2,
    "data_parallel_rank": 2,
    "data_parallel_master_ip": "10.0.0.1",
}
OWN_ENGINES = TWO_NODES | {"data_parallel_external_lb": True}


def parallel(**values: Any) -> SimpleNamespace:
    return SimpleNamespace(**ALONE | values)


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (*carried.CARRIED, "VLLM_HOST_IP"):
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    monkeypatch.setattr(control, "_relay", None)
    monkeypatch.setattr(control, "_before", {})
    monkeypatch.setattr(control, "_functions", {})
    monkeypatch.setattr(control.flag, "log_with", lambda *_: None)
    control._say_direct.cache_clear()


# ---- where a relay starts ----


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, None),
        (TWO_NODES, Site(1, 2, "10.0.0.1", 29501)),
        (TWO_NODES | {"master_addr": "127.0.0.1"}, None),
        (TWO_NODES | {"master_addr": "::1"}, None),
        (REPLICAS, Site(1, 2, "10.0.0.1", 29550)),
        (REPLICAS | {"data_parallel_rank": 0}, Site(0, 2, "10.0.0.1", 29550)),
        (REPLICAS | {"data_parallel_size_local": 4}, None),
        (REPLICAS | {"data_parallel_master_ip": "127.0.0.1", "data_parallel_rank_local": 0}, None),
        (OWN_ENGINES | {"data_parallel_size": 2}, Site(1, 2, "10.0.0.1", 29501)),
    ],
)
def test_a_node_of_several_has_a_site(values: dict[str, Any], expected: Site | None) -> None:
    assert site_of(parallel(**values), Config()) == expected


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (TWO_NODES | {"distributed_executor_backend": "ray"}, "Ray"),
        (REPLICAS | {"data_parallel_backend": "ray"}, "Ray"),
        (REPLICAS | {"data_parallel_external_lb": True}, "an engine with a command"),
        (REPLICAS | {"data_parallel_rank_local": 0}, "an engine with a command"),
        (REPLICAS | {"data_parallel_size_local": 3}, "3 of 4 data-parallel ranks"),
        (REPLICAS | {"data_parallel_size_local": 0}, "0 of 4 data-parallel ranks"),
        (TWO_NODES | {"distributed_executor_backend": "external_launcher"}, "external launcher"),
        (OWN_ENGINES | {"data_parallel_size": 4}, "an engine with a command"),
    ],
)
def test_connections_that_stay_direct_are_told_once(
    values: dict[str, Any], why: str, said: Callable[[], list[str]]
) -> None:
    for _ in range(2):
        control.carry(SimpleNamespace(parallel_config=parallel(**values)))
    [line] = said()
    assert "stay on the management NIC" in line
    assert why in line
    assert RELAY not in os.environ


def transfer(connector: str, **extra: Any) -> SimpleNamespace:
    return SimpleNamespace(kv_connector=connector, kv_connector_extra_config=extra)


@pytest.mark.parametrize(
    "connector",
    [
        transfer("MooncakeConnector"),
        transfer("MultiConnector", connectors=[{"kv_connector": "MooncakeConnector"}]),
    ],
)
def test_workers_that_register_at_the_master_address_stay_direct(
    relays: list[Relay], said: Callable[[], list[str]], connector: SimpleNamespace
) -> None:
    made = engine(kv_transfer_config=connector)
    control.carry(made)
    assert not relays
    assert made.parallel_config.master_addr == "10.0.0.1"
    assert "Mooncake" in said()[0]
    connector.kv_connector_extra_config["bootstrap_server_address"] = "10.0.0.9:8998"
    assert not control._registers_at_master(made)


def test_the_user_may_choose_direct(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("R2CCL_CONTROL", "direct")
    with caplog.at_level(logging.INFO, logger="r2serve"):
        control.carry(SimpleNamespace(parallel_config=parallel(**TWO_NODES)))
    assert [each.levelno for each in caplog.records] == [logging.INFO]


def test_the_own_address_of_node_0_comes_first() -> None:
    assert addresses_of(Site(0, 2, "10.0.0.1", 1), "10.0.0.9") == ["10.0.0.9", "10.0.0.1"]
    assert addresses_of(Site(0, 2, "10.0.0.1", 1), "10.0.0.1") == ["10.0.0.1"]
    assert addresses_of(Site(1, 2, "10.0.0.1", 1), "10.0.0.2") == ["10.0.0.1"]
    # A host's own name is often a loopback address there.
    assert addresses_of(Site(0, 2, "localhost", 1), "10.0.0.9") == ["10.0.0.9"]
    with pytest.raises(ConfigError, match="'localhost', which is a loopback address here"):
        addresses_of(Site(1, 2, "localhost", 1), "10.0.0.2")
    assert addresses_of(Site(0, 2, "no.such.invalid", 1), "10.0.0.9") == ["10.0.0.9"]
    with pytest.raises(ConfigError, match=r"'no\.such\.invalid', a name that cannot be resolved"):
        addresses_of(Site(1, 2, "no.such.invalid", 1), "10.0.0.2")


# ---- what moves ----


@pytest.mark.parametrize(
    ("values", "master", "for_data_parallel"),
    [
        (TWO_NODES, "127.7.8.1", "127.0.0.1"),
        (TWO_NODES | {"data_parallel_master_ip": "10.0.0.1"}, "127.7.8.1", "127.7.8.1"),
        (REPLICAS, "127.0.0.1", "127.7.8.1"),
        (TWO_NODES | REPLICAS, "127.7.8.1", "127.7.8.1"),
    ],
)
def test_master_addresses_become_virtual(
    values: dict[str, Any], master: str, for_data_parallel: str
) -> None:
    made = parallel(**values)
    for _ in range(2):  # vLLM may call the hook for a copy of a configuration
        rewrite(made, HERE)
        assert (made.master_addr, made.data_parallel_master_ip) == (master, for_data_parallel)


class Relay:
    """A relay that is ready at once, or fails."""

    made: list[Relay]
    failure: Failure | None = None

    def __init__(self, argv: list[str]) -> None:
        self.argv = argv
        self.closed = False
        self.prefix, self.node = HERE.prefix, HERE.node
        self.made.append(self)

    def wait_ready(self, timeout_s: float) -> None:
        if self.failure is not None:
            raise self.failure

    def on_end(self, call: Callable[[Failure], None]) -> None:
        self.call = call

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def relays(monkeypatch: pytest.MonkeyPatch) -> list[Relay]:
    class Own(Relay):
        made: ClassVar[list[Relay]] = []

    monkeypatch.setattr(control, "RelayProcess", Own)
    monkeypatch.setattr(control, "find_management_address", lambda _: "10.0.0.2")
    monkeypatch.setattr(control, "management_address", lambda: "10.0.0.2")
    monkeypatch.setattr(control.torch_seams, "apply", lambda *_: None)
    return Own.made


def engine(**parts: Any) -> SimpleNamespace:
    return SimpleNamespace(parallel_config=parallel(**TWO_NODES), **parts)


def test_a_node_starts_one_relay_and_moves_every_configuration(relays: list[Relay]) -> None:
    for _ in range(2):
        made = engine(kv_transfer_config=None)
        control.carry(made)
        assert made.parallel_config.master_addr == "127.7.8.1"
    [relay] = relays
    assert " ".join(relay.argv[3:]) == (
        "relay --node 1 --nodes 2 --master 10.0.0.1 --port 29501 --timeout-s 1800"
    )
    assert os.environ["VLLM_HOST_IP"] == "127.7.8.2"
    assert os.environ[MANAGEMENT] == "10.0.0.2"
    assert os.environ[RELAY] == "127.7.8.0/1"
    assert {RELAY, MANAGEMENT} <= set(carried.CARRIED)


def test_the_user_names_the_addresses_of_the_meeting_and_the_wait(
    relays: list[Relay], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("R2CCL_CONTROL_MASTER", "10.1.0.1,10.2.0.1")
    made = engine()
    made.parallel_config.master_addr = "no.such.invalid"
    made.parallel_config.distributed_timeout_seconds = 604800
    control.carry(made)
    assert " ".join(relays[0].argv).endswith(
        "--master 10.1.0.1,10.2.0.1 --port 29501 --timeout-s 86400"
    )


@pytest.mark.case("22", "the nodes waited for each other, and named no value")
@pytest.mark.parametrize(
    ("master", "given"),
    [("10.0.0.1", "10.0.0.2,10.0.0.1"), ("no.such.invalid", "10.0.0.2")],
)
def test_node_0_also_listens_where_a_node_without_a_relay_looks(
    relays: list[Relay], monkeypatch: pytest.MonkeyPatch, master: str, given: str
) -> None:
    """The relay's command adds the addresses of R2CCL_CONTROL_MASTER."""
    monkeypatch.setenv("R2CCL_CONTROL_MASTER", "10.1.0.1,10.2.0.1")
    made = engine()
    made.parallel_config.node_rank = 0
    made.parallel_config.master_addr = master
    control.carry(made)
    assert f"--master {given} --port" in " ".join(relays[0].argv)


def test_a_head_without_ranks_is_told_at_once(
    relays: list[Relay], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank is on a follower, since the head has ``--data-parallel-size-local 0``."""
    nowhere = "198.51.100.7"  # of no host (RFC 5737)
    first = REPLICAS | {"data_parallel_rank": 0, "data_parallel_master_ip": nowhere}
    with pytest.raises(ConfigError, match=rf"--data-parallel-address is '{nowhere}'.*'direct'"):
        control.carry(SimpleNamespace(parallel_config=parallel(**first)))
    assert not relays
    assert RELAY not in os.environ
    for other in (first | {"data_parallel_rank": 2}, TWO_NODES | {"node_rank": 0}):
        monkeypatch.delenv(RELAY, raising=False)
        control.carry(SimpleNamespace(parallel_config=parallel(**other)))
    assert len(relays) == 2


@pytest.mark.parametrize(("elsewhere", "lines"), [(["198.51.100.7"], 1), ([], 0)])
def test_a_head_may_have_the_name_of_a_service(
    relays: list[Relay],
    monkeypatch: pytest.MonkeyPatch,
    said: Callable[[], list[str]],
    elsewhere: list[str],
    lines: int,
) -> None:
    """The name may resolve to another host, or only on the other nodes."""

    def wrong(variable: str, value: str) -> None:
        raise HostAddressError(f"{variable} is {value!r}", elsewhere)

    monkeypatch.setattr(control, "check_here", wrong)
    first = REPLICAS | {"data_parallel_rank": 0, "data_parallel_master_ip": "head.invalid"}
    control.carry(SimpleNamespace(parallel_config=parallel(**first)))
    assert len(relays) == 1
    told = [line for line in said() if "--data-parallel-address is 'head.invalid'" in line]
    assert len(told) == lines


@pytest.mark.parametrize("part", control.TELLS_ADDRESS)
def test_other_jobs_hear_the_real_address(
    relays: list[Relay], monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    names = ("queues_of_this_test", "executor_of_this_test")
    for name in names:
        module: Any = ModuleType(name)
        module.get_ip = lambda: "10.0.0.2"
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(control, "QUEUES", names)
    monkeypatch.setenv("VLLM_HOST_IP", "10.0.0.2")
    control.carry(engine(**{part: transfer("NixlConnector")}))
    assert os.environ["VLLM_HOST_IP"] == "10.0.0.2"
    assert [sys.modules[name].get_ip() for name in names] == ["127.7.8.2"] * 2


@pytest.mark.parametrize(
    "failure", [StartupTimeoutError("nobody came"), ConfigError("the key is wrong")]
)
def test_a_relay_that_does_not_start_ends_the_start_with_its_error(
    relays: list[Relay], monkeypatch: pytest.MonkeyPatch, failure: Failure
) -> None:
    monkeypatch.setattr(Relay, "failure", failure)
    made = engine()
    with pytest.raises(type(failure), match=rf"R2CCL_CONTROL.*node 1 did not start: {failure}"):
        control.carry(made)
    assert relays[0].closed
    assert made.parallel_config.master_addr == "10.0.0.1"
    assert {RELAY, MANAGEMENT, "VLLM_HOST_IP"}.isdisjoint(os.environ)


def test_a_difference_between_nodes_is_told_as_it_is(
    relays: list[Relay], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "checksum is 'off' on node 0 and 'on' on node 1: must be the same on every node"
    monkeypatch.setattr(Relay, "failure", ConfigError(text))
    with pytest.raises(ConfigError) as caught:
        control.carry(engine())
    assert str(caught.value) == text
    assert relays[0].closed
    assert {RELAY, MANAGEMENT, "VLLM_HOST_IP"}.isdisjoint(os.environ)


@pytest.mark.case("22", "the nodes waited for each other, and named no value")
@pytest.mark.parametrize(("values", "asks"), [(REPLICAS, True), (TWO_NODES, False)])
def test_a_relay_that_meets_an_engine_asks_node_0_for_its_values(
    relays: list[Relay], monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], asks: bool
) -> None:
    """The nodes of an engine with ``--nnodes`` compare over torch's store."""
    asked: list[ComparedNode] = []
    monkeypatch.setattr(handshake, "ask", lambda node: asked.append(node) or "the values differ")
    monkeypatch.setattr(Relay, "failure", NoRelayError(NO_RELAY))
    monkeypatch.setenv(control.flag.VARIABLE, "r2ccl")
    with pytest.raises(ConfigError, match="the values differ" if asks else NO_RELAY):
        control.carry(SimpleNamespace(parallel_config=parallel(**values)))
    assert relays[0].closed
    assert RELAY not in os.environ
    assert [(own.number, own.nodes, own.master, own.port) for own in asked] == (
        [(1, 2, "10.0.0.1", 29550)] * asks
    )
    assert all("r2ccl" in own.values.values() for own in asked)


# ---- the end ----


@pytest.mark.parametrize("error", [PeerLostError("gone"), PeerClosedError("ended")])
def test_the_end_of_the_relay_is_reported_and_ends_the_engine(
    relays: list[Relay], monkeypatch: pytest.MonkeyPatch, error: Failure
) -> None:
    reported: queue.Queue[tuple[str, str]] = queue.Queue()
    monkeypatch.setattr(control, "CLOSED_S", 0.0)
    monkeypatch.setattr(exit_status, "report", lambda text: reported.put(("report", text)))
    monkeypatch.setattr(ending, "end_engine", lambda text: reported.put(("end", text)))
    control.carry(engine())
    relays[0].call(error)
    text = f"{type(error).__name__}: {error}"
    assert [reported.get_nowait() for _ in range(2)] == [("report", text), ("end", text)]


def test_an_engine_after_the_loss_of_the_relay_starts_as_the_first(
    relays: list[Relay], monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = ModuleType("queues_of_this_test")
    module.get_ip = lambda: "10.0.0.2"
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(control, "QUEUES", [module.__name__])
    monkeypatch.setattr(exit_status, "report", lambda _: None)
    monkeypatch.setattr(ending, "end_engine", lambda _: None)
    monkeypatch.setenv("VLLM_HOST_IP", "10.0.0.7")
    for count, parts in enumerate(({}, {"kv_transfer_config": transfer("NixlConnector")}), start=1):
        control.carry(engine(**parts))
        assert len(relays) == count
        assert os.environ[RELAY] == "127.7.8.0/1"
        assert (module.get_ip() == "127.7.8.2") is bool(parts)
        relays[-1].call(PeerLostError("gone"))
        assert os.environ["VLLM_HOST_IP"] == "10.0.0.7"
        assert {RELAY, MANAGEMENT}.isdisjoint(os.environ)
        assert module.get_ip() == "10.0.0.2"
        control.started()  # tells no relay that has ended


ENDS = """
import multiprocessing, psutil, sys, time
from r2serve.engines import flag
from r2serve.engines.children import kill_children
from r2serve.engines.vllm import ending
def sleep():
    multiprocessing.Process(target=time.sleep, args=(600,)).start()
    time.sleep(600)
if __name__ == "__main__":
    flag.of_command_line = sys.argv[1] == "serve"
    fork = multiprocessing.get_context("fork")
    children = [fork.Process(target=sleep, name=name) for name in ("EngineCore", "ApiServer_0")]
    for child in children:
        child.start()
    while not all(psutil.Process(child.pid).children() for child in children):
        time.sleep(0.01)
    ending.end_engine("PeerLostError: gone")
    children[0].join()
    print(children[0].exitcode, children[1].is_alive(), flush=True)
    if flag.of_command_line:
        time.sleep(600)
    kill_children()
"""


@pytest.mark.parametrize(("kind", "status"), [("serve", EXIT_STATUS), ("program", 0)])
def test_the_engine_ends_before_the_servers_that_answer_clients(kind: str, status: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDS, kind], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == status, done.stderr
    assert done.stdout == "-9 True\n"
    assert ("PeerLostError: gone" in done.stderr) is (kind == "serve")


def test_the_relay_hears_that_the_engine_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    control.started()
    monkeypatch.setattr(control, "_relay", SimpleNamespace(started=lambda: told.append("up")))
    control.started()
    assert told == ["up"]


def test_a_process_without_a_relay_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "apply", lambda _: pytest.fail("nothing to move"))
    control.join()
    monkeypatch.setenv(RELAY, "10.0.0.0/1")
    with pytest.raises(ConfigError, match=r"R2SERVE_RELAY is '10\.0\.0\.0/1'"):
        control.join()


@pytest.mark.parametrize(
    ("error", "told", "ends"),
    [
        (PeerLostError("gone"), True, True),
        (PeerClosedError("has ended"), False, True),
        (PeerClosedError("has ended"), True, False),
    ],
)
def test_the_end_of_the_relay_ends_the_engine_unless_its_node_stops_in_order(
    monkeypatch: pytest.MonkeyPatch, error: R2cclError, told: bool, ends: bool
) -> None:
    ended: list[str] = []
    monkeypatch.setattr(control, "CLOSED_S", 0.0)
    monkeypatch.setattr(control.ending, "end_engine", ended.append)
    monkeypatch.setattr(control.stopping, "_told", told)
    control._lost(error)
    assert bool(ended) is ends
