"""A real lab: reachability under each fault, isolation of nodes, and clean-up."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lab_probes import becomes_reachable, is_silent, reaches
from timely import ended, patience

from r2serve.lab import lab as labs
from r2serve.lab.holder import LabCommandError
from r2serve.lab.lab import Lab


def test_every_rail_and_the_management_port_connect_the_nodes(lab: Lab) -> None:
    first, second = lab.nodes
    for address in (*map(second.rail_address, range(2)), second.management_address):
        assert becomes_reachable(first, address)


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("at_switch", [True, False])
def test_a_cut_takes_the_carrier_of_one_port_only(lab: Lab, node: int, at_switch: bool) -> None:
    first, second = lab.nodes
    lab.cut(node, 0, at_switch=at_switch)
    try:
        assert not lab.carrier(node, 0)
        assert lab.carrier(1 - node, 0)
        assert is_silent(first, second.rail_address(0))
        assert reaches(first, second.rail_address(1))
    finally:
        lab.heal(node, 0)
    assert becomes_reachable(first, second.rail_address(0))
    assert lab.carrier(node, 0)


@pytest.mark.parametrize("node", [0, 1])
def test_a_black_hole_leaves_the_carrier_up(lab: Lab, node: int) -> None:
    first, second = lab.nodes
    lab.black_hole(node, 1)
    try:
        assert lab.carrier(0, 1)
        assert lab.carrier(1, 1)
        assert is_silent(first, second.rail_address(1))
        assert reaches(first, second.rail_address(0))
    finally:
        lab.heal(node, 1)
    assert becomes_reachable(first, second.rail_address(1))


def test_a_repeated_fault_is_healed_once(lab: Lab) -> None:
    first, second = lab.nodes
    for fault in (lab.black_hole, lab.cut):
        began_ns = time.monotonic_ns()
        assert began_ns < fault(0, 1) < fault(0, 1) < time.monotonic_ns()
        assert is_silent(first, second.rail_address(1))
        lab.heal(0, 1)
        assert becomes_reachable(first, second.rail_address(1))


def test_a_request_refused_by_the_kernel_is_an_error(lab: Lab) -> None:
    with pytest.raises(LabCommandError, match=r"set rail9 down: .*No such device"):
        lab.nodes[0].holder.set_down("rail9")
    with pytest.raises(LabCommandError, match=r"unplug n0r0 from rail9: .*No such device"):
        lab._require_switch().unplug("n0r0", "rail9")


def test_nodes_see_their_own_devices_processes_and_shared_memory(lab: Lab) -> None:
    first, second = lab.nodes
    first.run("touch", "/dev/shm/only-here")
    assert first.run("ls", "/dev/shm").split() == ["only-here"]
    assert second.run("ls", "/dev/shm").split() == []
    assert sorted(first.run("ls", "/sys/class/net").split()) == ["lo", "mgmt0", "rail0", "rail1"]
    processes = [name for name in first.run("ls", "/proc").split() if name.isdigit()]
    assert processes[0] == "1"
    assert len(processes) <= 3


def test_kill_all_ends_processes_of_other_sessions(lab: Lab) -> None:
    node = lab.nodes[0]
    parent = node.popen(["sh", "-c", "setsid sleep 987 & setsid sleep 987 & exit 7"])
    assert ended(parent, "the shell") == 7
    waiting = node.popen(["sleep", "987"])
    node.kill_all()
    assert waiting.returncode is not None
    processes = [name for name in node.run("ls", "/proc").split() if name.isdigit()]
    assert len(processes) <= 2, "only init and ls"


def test_the_error_of_a_failed_command_names_the_cause(lab: Lab) -> None:
    with pytest.raises(LabCommandError, match="no-such-device"):
        lab.run_in_switch("ip", "link", "show", "dev", "no-such-device")
    with pytest.raises(ValueError, match="rail 2 is not one of"):
        lab.cut(0, 2)


# The script restores SIGINT's handler: a background job of a shell ignores SIGINT, and the test may
# run in such a job. Only this script's children sleep for this number of seconds.
MAKER = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from r2serve.lab.lab import Lab
with Lab() as lab:
    nap = f"98765.{os.getpid()}"
    lab.nodes[0].popen(["sh", "-c", f"setsid sleep {nap} & sleep {nap}"])
    lab.nodes[1].popen(["sleep", nap])
    time.sleep(0.5)
    sys.stdout.write(lab.name + "\\n")
    sys.stdout.flush()
    time.sleep(600)
"""


def _left_of(name: str, maker: int) -> list[str]:
    left = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                words = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if any(name in word or f"98765.{maker}" in word for word in words):
                left.append(" ".join(words))
    return left


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_lab_ends_with_the_creating_process(number: signal.Signals) -> None:
    maker = subprocess.Popen([sys.executable, "-c", MAKER], stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    name = maker.stdout.readline().strip()
    if not name:
        pytest.skip("no lab on this machine")
    assert _left_of(name, maker.pid)
    maker.send_signal(number)
    ended(maker, "the process with a lab")
    maker.stdout.close()
    deadline = time.monotonic() + 60 * patience()
    while _left_of(name, maker.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _left_of(name, maker.pid) == []
    # Labs of other tests may end at the same time.
    assert all(name not in left for _, left in labs.holders_of_dead_processes())
