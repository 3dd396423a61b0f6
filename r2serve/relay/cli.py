"""``r2serve relay``: carries the TCP connections of a job between its nodes over all rails."""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import queue
import select
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import FrameType

import click

from r2serve import _core
from r2serve.agreement import node_values
from r2serve.config import Config
from r2serve.errors import ConfigError, R2cclError
from r2serve.ports.identity import local_address_towards
from r2serve.ports.info import ProcessInfo
from r2serve.process import Process, acquire, release
from r2serve.relay import parent, roster, wrapped
from r2serve.relay.meeting import Host, Outcome, join
from r2serve.variables import MANAGEMENT

FAILED = wrapped.FAILED
"""Exit status after the loss of a peer: the parent must end, too."""
MARGIN_S = 30.0
"""Wait for a relay beyond its own limits, for the start of its process."""
_LOG = logging.getLogger("r2serve.relay")
PARENT_S = 0.5
"""Interval of the look at the parent while the relay waits for the other nodes."""
BACKGROUND_MS = 10
"""Interval of the engine's background thread; the relay's own thread serves traffic."""


@click.command()
@click.option("--node", type=click.IntRange(0, 251), required=True, help="Number of this node.")
@click.option(
    "--nodes",
    type=click.IntRange(2, 252),
    required=True,
    help="Nodes of the job at its start; a node of a higher number joins later.",
)
@click.option(
    "--master",
    required=True,
    help="Addresses of node 0 between commas; R2CCL_CONTROL_MASTER takes precedence. Node 0 "
    "listens at its addresses of both lists.",
)
@click.option("--port", type=click.IntRange(1, 65535), required=True, help="Port of the meeting.")
@click.option(
    "--timeout-s",
    type=click.FloatRange(1, 86400),
    default=1800,
    show_default=True,
    help="Wait for the other nodes.",
)
@click.option(
    "--others-may-end",
    is_flag=True,
    help="Go on after another node has ended in good order; always so with COMMAND.",
)
@click.argument("argv", metavar="[-- COMMAND…]", nargs=-1, type=click.UNPROCESSED)
def command(
    node: int,
    nodes: int,
    master: str,
    port: int,
    timeout_s: float,
    others_may_end: bool,
    argv: tuple[str, ...],
) -> None:
    """Carry TCP connections between virtual addresses of a job's nodes.

    With COMMAND: runs a plain torch job or torchrun, whose stores and gloo groups then survive the
    loss of any NIC. The command finds the virtual address of node 0 in MASTER_ADDR and the port in
    MASTER_PORT. Words of COMMAND may contain {master}, the address of node 0, and {address}, the
    address of this node. The exit status is the command's, or 70 after the loss of another node.

    Without COMMAND: started by a process of the node, with a pipe as standard input: the relay ends
    with its parent. Standard output has a line of JSON once the connections can begin, and a line
    after a failure. The exit status is 0 after the end of the parent, and 70 after the loss of
    another node.
    """
    # Ends the wait in the core with an exception, so that the peers hear of the end.
    signal.signal(signal.SIGTERM, _end_before_command if argv else _end)
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        config = relay_config(Config.from_env())
        values = node_values()
        addresses = master_addresses(config.control_master or master)
        if argv:
            sys.exit(run_command(config, node, nodes, addresses, port, timeout_s, argv))
        also = [each for each in master_addresses(master) if each not in addresses]
        run(config, node, nodes, addresses, port, timeout_s, others_may_end, values, also)
    except (R2cclError, ConfigError) as error:
        if not argv:
            say({"failed": str(error), "error": parent.kind_of(error).__name__})
        click.echo(f"r2serve relay: {error}", err=True)
        sys.exit(FAILED)


def run_command(
    config: Config,
    node: int,
    nodes: int,
    addresses: Sequence[str],
    port: int,
    timeout_s: float,
    argv: Sequence[str],
) -> int:
    """Runs a command behind a relay of its own; returns the exit status.

    Raises:
        R2cclError, ConfigError: the relay did not start, or the command cannot be started.
    """
    master = ",".join(addresses)
    relay = parent.RelayProcess(
        parent.command(node, nodes, master, port, timeout_s, others_may_end=True)
    )
    try:
        relay.wait_ready(timeout_s + config.connect_timeout_s + MARGIN_S)
        return wrapped.run(relay, argv, port, management_address(node, addresses))
    finally:
        relay.close(config.link_timeout_s + parent.END_S)


def management_address(node: int, addresses: Sequence[str]) -> str | None:
    """Returns the real address of this node for control frames; None: no route to node 0."""
    given = os.environ.get(MANAGEMENT)
    if given or node == 0:
        return given or addresses[0]
    return local_address_towards(addresses[0])


def relay_config(config: Config) -> Config:
    """Returns the configuration of the relay's engine.

    Control traffic may use every NIC, and always fails over, whatever the collectives do.
    """
    return replace(
        config,
        fallback=True,
        resilience=True,
        background_interval_ms=max(config.background_interval_ms, BACKGROUND_MS),
    )


def master_addresses(text: str) -> list[str]:
    """Returns the numeric addresses of a list between commas.

    Raises:
        click.BadParameter: a word is no address.
    """
    addresses = [word.strip() for word in text.split(",")]
    for address in addresses:
        try:
            ipaddress.ip_address(address)
        except ValueError as error:
            raise click.BadParameter(
                f"'{address}' is no IP address; must be addresses of node 0 between commas"
            ) from error
    return addresses


def run(
    config: Config,
    node: int,
    nodes: int,
    addresses: Sequence[str],
    port: int,
    timeout_s: float,
    others_may_end: bool,
    values: Mapping[str, str],
    also: Sequence[str] = (),
) -> None:
    """Meets the other relays, and carries connections until the parent ends.

    ``values``: what every node must share, by name. ``also``: further addresses of node 0, where a
    node without a relay tells its values.

    Raises:
        R2cclError: the start failed, or another node is lost.
        ConfigError: an option is wrong, or the relays do not fit.
    """
    process = acquire(config, node, management_address(node, addresses), share=False)
    late: queue.Queue[tuple[int, ProcessInfo]] = queue.Queue()
    host = None
    carries = threading.Event()
    threading.Thread(target=_watch_parent, args=(carries,), daemon=True).start()
    try:
        process.engine.set_label(f"relay of node {node}")
        if node == 0:
            host = Host(
                addresses,
                port,
                nodes,
                process.info,
                process.key,
                values=values,
                on_late=lambda number, info: late.put((number, info)),
                also=also,
            )
            outcome = host.gather(timeout_s)
        else:
            outcome = join(
                addresses, port, node, process.info, timeout_s, process.key, values=values
            )
        serve(config, node, process, outcome, late, carries, others_may_end)
    finally:
        carries.set()
        if host is not None:
            host.close()
        release(process)


def serve(
    config: Config,
    node: int,
    process: Process,
    outcome: Outcome,
    late: queue.Queue[tuple[int, ProcessInfo]],
    carries: threading.Event,
    others_may_end: bool,
) -> None:
    """Connects the links and carries connections until the parent ends.

    Args:
        late: nodes that join after the start, as the meeting at node 0 tells.
        carries: set before the core begins to watch the parent.
        others_may_end: the relay goes on after another node has ended in good order.
    """
    others = {number: info for number, info in outcome.infos.items() if number != node}
    for number, info in others.items():
        process.add_peer(info, f"relay of node {number}", node)
    process.engine.connect([info.process for info in others.values()], config.connect_timeout_s)
    relay = _core.Relay(
        process.engine,
        node,
        outcome.prefix,
        [(info.process, number) for number, info in others.items()],
        config.link_timeout_s,
        sys.stdin.fileno(),
        others_may_end,
    )
    address_of = outcome.prefix.removesuffix("0") + "{}"
    known = {node, *others}

    def joined(number: int, info: ProcessInfo) -> None:
        if number in known:
            return
        known.add(number)
        try:
            process.add_peer(info, f"relay of node {number}", node)
            process.engine.connect([info.process], config.connect_timeout_s)
            relay.add_peer((info.process, number))
        except (R2cclError, ConfigError) as error:
            _LOG.error("node %d does not join: %s", number, error)

    if node == 0:
        book = roster.Roster(address_of.format(1))
        threading.Thread(target=_enter, args=(late, book, joined), daemon=True).start()
    else:
        roster.follow(address_of.format(1), joined)
    address = address_of.format(node + 1)
    # A supervisor may stop all processes of a unit at once, but the parent ends in good order, and
    # the relay ends with the parent.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    say({"node": node, "prefix": outcome.prefix, "address": address, "pid": os.getpid()})
    carries.set()
    relay.run()


def _watch_parent(carries: threading.Event) -> None:
    """Ends this process after its parent, until the core watches the parent."""
    parent_process = os.getppid()
    poller = select.poll()
    poller.register(sys.stdin.fileno(), 0)
    while not carries.wait(PARENT_S):
        closed = any(events & select.POLLHUP for _, events in poller.poll(0))
        if closed or os.getppid() != parent_process:
            os.kill(os.getpid(), signal.SIGTERM)
            return


def _enter(
    late: queue.Queue[tuple[int, ProcessInfo]], book: roster.Roster, joined: roster.Joined
) -> None:
    while True:
        node, info = late.get()
        book.add(node, info)
        joined(node, info)


def say(what: dict[str, object]) -> None:
    """Prints a line of JSON for the parent."""
    click.echo(json.dumps(what))
    sys.stdout.flush()


def _end(_signal: int, _frame: FrameType | None) -> None:
    sys.exit(0)


def _end_before_command(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)  # 0 would mean that the command has succeeded
