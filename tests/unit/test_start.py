"""A rank that cannot start tells the other ranks why, and no rank waits for a timeout."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pairs import WAIT_S

from r2serve import rendezvous, start
from r2serve.config import Config
from r2serve.errors import ConfigError, StartupTimeoutError
from r2serve.ports.info import PortInfo, ProcessInfo
from r2serve.ports.interfaces import list_interfaces
from r2serve.ports.management_address import HostAddressError, own_address
from r2serve.ports.wires import Question, Wire
from r2serve.process import Process, release
from r2serve.rendezvous import Exchange

Control = Callable[[], str | None]


def exchanges(ranks: int) -> list[Exchange]:
    """Returns an exchange for each rank, over memory."""
    rounds: list[dict[int, Any]] = [{} for _ in range(16)]
    barrier = threading.Barrier(ranks, timeout=WAIT_S)

    def of(rank: int) -> Exchange:
        done = iter(range(len(rounds)))

        def exchange(own: dict[str, Any]) -> list[dict[str, Any]]:
            number = next(done)
            rounds[number][rank] = own
            barrier.wait()
            values = [rounds[number][each] for each in range(ranks)]
            barrier.wait()
            return values

        return exchange

    return [of(rank) for rank in range(ranks)]


def join(*ranks: tuple[Config, Control]) -> list[Exception | None]:
    """Joins ranks of this process; returns the error of each rank."""
    made = exchanges(len(ranks))

    def one(rank: int) -> Exception | None:
        config, control = ranks[rank]
        try:
            joined = start.join(made[rank], rank, config, control, share_engine=False)
        except (ConfigError, StartupTimeoutError) as error:
            return error
        release(joined.process)
        return None

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, range(len(ranks))))


def config(rank: int, **options: Any) -> Config:
    return Config(rails="127.0.0.1", node=f"n{rank}", **options)


def nothing() -> None:
    return None


def test_call_timeout_s_ends_the_wait_for_rails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 does not know rank 0, so no rail comes up."""
    add_peer = Process.add_peer

    def added(self: Process, *others: Any) -> None:
        if self.rank_hint == 0:
            add_peer(self, *others)

    monkeypatch.setattr(Process, "add_peer", added)
    errors = join(*((config(rank, call_timeout_s=1.0), nothing) for rank in range(2)))
    for rank, error in enumerate(errors):
        assert isinstance(error, StartupTimeoutError)
        assert str(error).startswith(
            f"rank {rank} did not connect: no rail came up within call_timeout_s "
            "(R2CCL_CALL_TIMEOUT_S) = 1"
        )


WRONG_ADDRESS = "the other ranks waited for the timeout"


def test_ranks_without_a_problem_start() -> None:
    assert join((config(0), nothing), (config(1), nothing)) == [None, None]


@pytest.mark.case("07", WRONG_ADDRESS)
def test_a_wrong_host_address_fails_all_ranks_and_names_variable_value_and_addresses() -> None:
    def wrong() -> str:
        return own_address("VLLM_HOST_IP", "192.0.2.99", list_interfaces())

    here, there = join((config(0), wrong), (config(1), nothing))
    assert isinstance(here, HostAddressError)
    text = "VLLM_HOST_IP is '192.0.2.99': must be an address of this node"
    assert str(here).startswith(text)
    assert "lo=127.0.0.1" in str(here)
    told = f"rank 0 (host {socket.gethostname()}) cannot start: {text}"
    assert isinstance(there, ConfigError)
    assert str(there).startswith(told)


@pytest.mark.case("07", WRONG_ADDRESS)
def test_an_address_of_another_rank_is_named_as_such() -> None:
    """Rank 0 has the address that rank 1 listens on."""

    def of_the_other() -> str:
        raise HostAddressError("VLLM_HOST_IP is '127.0.0.1': …", ["127.0.0.1"])

    here, _ = join((config(0), of_the_other), (config(1), nothing))
    host = socket.gethostname()
    assert str(here).endswith(f"; 127.0.0.1 is an address of rank 1 (host {host})")


def test_an_error_without_words_fails_all_ranks() -> None:
    def broken() -> str:
        raise RuntimeError

    made = exchanges(2)
    with ThreadPoolExecutor(2) as pool:
        here = pool.submit(start.join, made[0], 0, config(0), broken, share_engine=False)
        there = pool.submit(start.join, made[1], 1, config(1), nothing, share_engine=False)
        with pytest.raises(RuntimeError):
            here.result()
        with pytest.raises(ConfigError, match=r"cannot start: RuntimeError\(\)"):
            there.result()


def test_a_probe_without_a_socket_fails_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_socket(self: start.Process, questions: list[Question]) -> list[Wire]:
        if questions:
            raise OSError(24, "Too many open files")
        return []

    asked = PortInfo("", "127.0.0.1", 0)
    monkeypatch.setattr(start, "questions", lambda _: [Question(1, 0, asked, asked)])
    monkeypatch.setattr(start.Process, "find_wires", no_socket)
    made = exchanges(2)
    with ThreadPoolExecutor(2) as pool:
        here = pool.submit(start.join, made[0], 0, config(0), nothing, share_engine=False)
        there = pool.submit(start.join, made[1], 1, config(1), nothing, share_engine=False)
        with pytest.raises(OSError, match="Too many open files"):
            there.result()
        with pytest.raises(ConfigError, match=r"rank 1 cannot start: .*Too many open files"):
            here.result()


def test_ports_that_reach_no_port_fail_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise ConfigError("R2CCL_RAILS: no port of a reaches a port of b")

    monkeypatch.setattr(start.Process, "add_peer", refused)
    for error in join((config(0), nothing), (config(1), nothing)):
        assert "no port of a reaches a port of b" in str(error)


def test_an_option_that_differs_is_named_with_both_ranks_and_values() -> None:
    errors = join((config(0), nothing), (config(1, checksum=True, slots=16), nothing))
    host = socket.gethostname()
    values = [("off", "8"), ("on", "16")]
    for rank, error in enumerate(errors):
        assert isinstance(error, ConfigError)
        slots = f"slots (R2CCL_SLOTS) is '{values[rank][1]}' on rank {rank} (host {host}) and "
        assert str(error) == (
            f"{slots}'{values[1 - rank][1]}' on rank {1 - rank} (host {host}): "
            "must be the same on every rank (also different: checksum)"
        )


def test_a_consensus_left_to_the_engine_equals_no_consensus() -> None:
    infos = [
        {"options": start.common_options(Config())},
        {"options": start.common_options(Config(consensus="off"))},
    ]
    rendezvous.check_options(infos, 0)
    infos[1] = {"options": start.common_options(Config(consensus="site"))}
    with pytest.raises(
        ConfigError, match=r"R2CCL_CONSENSUS\) is 'off' on rank 0 .* 'site' on rank 1"
    ):
        rendezvous.check_options(infos, 0)


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ("ab" * 31, "public_key is 'abab"),
        (None, "public_key is None"),
        ("00" * 32, "rank 1: public_key of host "),
    ],
)
def test_a_public_key_that_is_malformed_on_its_way_fails_all_ranks(
    monkeypatch: pytest.MonkeyPatch, told: Any, reason: str
) -> None:
    """Rank 1 tells a wrong key, as a defect or an attacker at the store would make it."""
    to_wire = ProcessInfo.to_wire

    def changed(self: ProcessInfo) -> dict[str, Any]:
        wire = to_wire(self)
        return wire | {"public_key": told} if self.node.endswith("n1") else wire

    monkeypatch.setattr(ProcessInfo, "to_wire", changed)
    errors = join(*((config(rank), nothing) for rank in range(3)))
    for error in errors:
        assert isinstance(error, ConfigError)
        assert reason in str(error)
        assert "rank 1" in str(error)


@pytest.mark.parametrize("texts", [("k" * 32, "k" * 32, "l" * 32), ("k" * 32, "k" * 32, "")])
def test_ranks_with_different_key_files_fail_at_once_and_name_the_option(
    tmp_path: Path, texts: tuple[str, ...]
) -> None:
    """Without the comparison no rail comes up, and the ranks wait for connect_timeout_s."""
    ranks = []
    for rank, text in enumerate(texts):
        path = tmp_path / f"key{rank}"
        path.write_text(text)
        path.chmod(0o600)
        ranks.append((config(rank, secret_file=str(path) if text else ""), nothing))
    errors = join(*ranks)
    what = "have different keys" if all(texts) else "has no key, and host "
    for rank, error in enumerate(errors):
        assert type(error) is ConfigError, rank
        assert "secret_file (R2CCL_SECRET_FILE): " in str(error)
        assert what in str(error)
        assert socket.gethostname() in str(error)


def test_ranks_with_the_same_key_in_different_files_start(tmp_path: Path) -> None:
    ranks = []
    for rank in range(2):
        path = tmp_path / f"key{rank}"
        path.write_text("k" * 32)
        path.chmod(0o600)
        ranks.append((config(rank, secret_file=str(path)), nothing))
    assert join(*ranks) == [None, None]
