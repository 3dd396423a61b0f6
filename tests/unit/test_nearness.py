"""Order of rails by distance from the GPU of a rank: each rank begins with its nearest NIC."""

from __future__ import annotations

import ctypes
import socket
from pathlib import Path
from typing import Any

import pytest
from test_topo import plug

from r2serve.ports import nearness, pci
from r2serve.ports.choice import Port
from r2serve.ports.info import PortInfo, ProcessInfo
from r2serve.ports.pairing import rails_between
from r2serve.ports.pci import Distance
from r2serve.ports.rdma import Transport

COUNT = 8


def process(
    number: int, node: int, gpu: int, away: list[int], *, shares: int = -1, mbit_s: int = 100_000
) -> ProcessInfo:
    """A process with a port for each entry of ``away``; port ``shares`` carries control traffic."""
    ports = tuple(
        PortInfo(
            f"eth{index}",
            f"10.0.{index}.{node + 1}",
            4000 + index,
            network=f"10.0.{index}.0/24",
            mbit_s=mbit_s,
            shares_control=index == shares,
            away=distance,
        )
        for index, distance in enumerate(away)
    )
    return ProcessInfo(number, bytes(32), f"node{node}", f"host{node}", ports, None, "", gpu)


def order(own: ProcessInfo, peer: ProcessInfo) -> list[int]:
    """Returns the rails between two processes, the first to use first."""
    distances = [rail["distance"] for rail in rails_between(own, peer, 0)]
    assert distances == [rail["distance"] for rail in rails_between(peer, own, 1)]
    return sorted(range(len(distances)), key=distances.__getitem__)


def near(*ports: int) -> list[int]:
    """Distances of a GPU with some ports behind its switch."""
    return [Distance.PIX if index in ports else Distance.NODE for index in range(COUNT)]


@pytest.mark.parametrize(
    ("kind", "nearest"),
    [
        ("a NIC for each GPU", lambda gpu: [gpu]),
        ("two GPUs and two NICs behind a switch", lambda gpu: [gpu // 2 * 2, gpu // 2 * 2 + 1]),
        ("nothing is known", lambda _: list(range(COUNT))),
    ],
)
@pytest.mark.parametrize("swapped", [False, True])
def test_eight_ranks_begin_with_eight_nics_the_nearest(
    kind: str, nearest: Any, swapped: bool
) -> None:
    firsts = []
    for gpu in range(COUNT):
        numbers = (2, 1) if swapped else (1, 2)
        own, peer = (
            process(number, node, gpu, near(*nearest(gpu))) for node, number in enumerate(numbers)
        )
        found = order(own, peer)
        assert set(found[: len(nearest(gpu))]) == set(nearest(gpu)), kind
        firsts.append(found[0])
    assert sorted(firsts) == list(range(COUNT)), kind


def test_a_port_with_control_traffic_comes_last() -> None:
    own, peer = process(1, 0, 1, [0, 0, 4], shares=1), process(2, 1, 1, [4, 4, 4])
    assert order(own, peer) == [0, 2, 1]


def test_a_rail_is_as_near_as_both_of_its_ports() -> None:
    own, peer = process(1, 0, 0, [0, 3, 3]), process(2, 1, 2, [4, 0, 3])
    assert order(own, peer) == [1, 0, 2]


def test_processes_without_a_gpu_have_no_order() -> None:
    own, peer = process(1, 0, -1, [4, 4]), process(2, 1, -1, [4, 4])
    assert [rail["distance"] for rail in rails_between(own, peer, 0)] == [0, 0]


def test_a_gpu_at_one_end_is_enough() -> None:
    own, peer = process(1, 0, -1, [4, 4, 4]), process(2, 1, 5, [4, 0, 4])
    assert order(own, peer)[0] == 1


# ---- the GPU of a process ----


class PlayedDriver:
    """A CUDA driver that this process has loaded; ``codes``: results of the two functions."""

    def __init__(self, address: str, codes: tuple[int, int] = (0, 0)) -> None:
        self._address, self._codes = address, codes

    def cuCtxGetDevice(self, device: Any) -> int:
        device._obj.value = 3
        return self._codes[0]

    def cuDeviceGetPCIBusId(self, text: Any, room: int, device: ctypes.c_int) -> int:
        assert device.value == 3
        text.value = self._address.encode()[: room - 1]
        return self._codes[1]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs, and a NIC behind the switch of the second one."""
    plug(tmp_path, "pci0000:00/0000:1a:00.0", vendor=0x10DE, kind=0x030200)
    switch = "pci0000:80/0000:80:01.0/0000:81:00.0"
    plug(tmp_path, f"{switch}/0000:82:00.0/0000:9b:00.0", vendor=0x10DE, kind=0x030200)
    plug(tmp_path, f"{switch}/0000:82:01.0/0000:9c:00.0")
    bus = tmp_path / "bus"
    function, gpus = pci.function, pci.gpus

    def here(address: str, _: Path = bus) -> pci.Function | None:
        return function(address, bus)

    monkeypatch.setattr(pci, "function", here)
    monkeypatch.setattr("r2serve.ports.info.function", here)
    monkeypatch.setattr(pci, "gpus", lambda: gpus(bus))


def test_a_rank_finds_its_gpu_and_the_distances_of_its_ports(machine: None) -> None:
    gpu = nearness.gpu_of_thread("libcuda", lambda _: PlayedDriver("0000:9B:00.0"))
    assert gpu is not None
    assert gpu.address == "0000:9b:00.0"
    assert nearness.index_of(gpu) == 1
    port = Port("rail0", "eth0", "10.0.0.1", socket.AF_INET, pci="0000:9c:00.0")
    assert PortInfo.of(port, [Transport()], gpu=gpu).away == Distance.PIX
    assert PortInfo.of(port, [Transport()]).away == Distance.SYS


@pytest.mark.parametrize(
    "driver",
    [
        PlayedDriver("0000:9B:00.0", (201, 0)),  # no context
        PlayedDriver("0000:9B:00.0", (0, 1)),
        PlayedDriver("0000:77:00.0"),  # a device that the container hides
        object(),  # a driver without the functions
    ],
)
def test_a_rank_without_a_known_gpu_has_no_order(machine: None, driver: Any) -> None:
    gpu = nearness.gpu_of_thread("libcuda", lambda _: driver)
    assert gpu is None
    assert nearness.index_of(gpu) == -1


def test_the_question_loads_no_driver() -> None:
    library = "libanl.so.1"  # of the C library, and used by nothing here
    assert nearness.gpu_of_thread(library) is None
    with pytest.raises(OSError, match="dlopen"):
        nearness._loaded(library)
    ctypes.CDLL(library)
    assert nearness._loaded(library)
