"""``r2serve relay``: carries the TCP connections of a job between its nodes over all rails."""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType

import click

from r2serve import _core
from r2serve.config import Config
from r2serve.errors import ConfigError, R2cclError
from r2serve.ports.identity import local_address_towards
from r2serve.ports.info import PortInfo, ProcessInfo
from r2serve.process import Process, acquire, release
from r2serve.relay import roster
from r2serve.relay.meeting import Host, Outcome, join

FAILED = 70
"""Exit status after the loss of a peer: the parent must end, too."""
_LOG = logging.getLogger("r2serve.relay")
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
    help="Addresses of node 0 between commas; R2CCL_CONTROL_MASTER takes precedence.",
)
@click.option("--port", type=click.IntRange(1, 65535), required=True, help="Port of the meeting.")
@click.option(
    "--timeout-s",
    type=click.FloatRange(1, 86400),
    default=1800,
    show_default=True,
    help="Wait for the other nodes.",
)
def command(node: int, nodes: int, master: str, port: int, timeout_s: float) -> None:
    """Carry TCP connections between virtual addresses of a job's nodes.

    Started by a process of the node, with a pipe as standard input: the relay ends with its parent.
    Standard output has a line of JSON once the connections can begin, and a line after a failure.
    The exit status is 0 after the end of the parent, and 70 after the loss of another node.
    """
    # Ends the wait in the core with an exception, so that the peers hear of the end.
    signal.signal(signal.SIGTERM, _end)
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        config = relay_config(Config.from_env())
        addresses = master_addresses(config.control_master or master)
        run(config, node, nodes, addresses, port, timeout_s)
    except (R2cclError, ConfigError) as error:
        kind = ConfigError if isinstance(error, ConfigError) else type(error)
        say({"failed": str(error), "error": kind.__name__})
        click.echo(f"r2serve relay: {error}", err=True)
        sys.exit(FAILED)


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
    config: Config, node: int, nodes: int, addresses: Sequence[str], port: int, timeout_s: float
) -> None:
    """Meets the other relays, and carries connections until the parent ends.

    Raises:
        R2cclError: the start failed, or another node is lost.
        ConfigError: an option is wrong, or the relays do not fit.
    """
    management = addresses[0] if node == 0 else local_address_towards(addresses[0])
    process = acquire(config, node, management, share=False)
    late: queue.Queue[tuple[int, ProcessInfo]] = queue.Queue()
    host = None
    try:
        process.engine.set_label(f"relay of node {node}")
        if node == 0:
            host = Host(
                addresses,
                port,
                nodes,
                process.info,
                process.key,
                on_late=lambda number, info: late.put((number, info)),
            )
            outcome = host.gather(timeout_s)
        else:
            outcome = join(addresses, port, node, process.info, timeout_s, process.key)
        serve(config, node, process, outcome, late)
    finally:
        if host is not None:
            host.close()
        release(process)


def serve(
    config: Config,
    node: int,
    process: Process,
    outcome: Outcome,
    late: queue.Queue[tuple[int, ProcessInfo]],
) -> None:
    """Connects the links and carries connections until the parent ends.

    ``late``: nodes that join after the start, as the meeting at node 0 tells.
    """
    others = {number: info for number, info in outcome.infos.items() if number != node}
    for number, info in others.items():
        process.add_peer(info, f"relay of node {number}", node)
    process.engine.connect([info.process for info in others.values()], config.connect_timeout_s)
    relay = _core.Relay(
        process.engine,
        node,
        outcome.prefix,
        [
            (info.process, number, listeners_of(info, process.info))
            for number, info in others.items()
        ],
        config.link_timeout_s,
        sys.stdin.fileno(),
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
            relay.add_peer((info.process, number, listeners_of(info, process.info)))
        except (R2cclError, ConfigError) as error:
            _LOG.error("node %d does not join: %s", number, error)

    if node == 0:
        book = roster.Roster(address_of.format(1))
        threading.Thread(target=_enter, args=(late, book, joined), daemon=True).start()
    else:
        roster.follow(address_of.format(1), joined)
    address = address_of.format(node + 1)
    say({"node": node, "prefix": outcome.prefix, "address": address, "pid": os.getpid()})
    relay.run()


def _enter(
    late: queue.Queue[tuple[int, ProcessInfo]], book: roster.Roster, joined: roster.Joined
) -> None:
    while True:
        node, info = late.get()
        book.add(node, info)
        joined(node, info)


def listeners_of(info: ProcessInfo, own: ProcessInfo) -> list[tuple[str, int]]:
    """Returns address and port of each listener of another relay's engine.

    Addresses of both nodes are left out, and ports without an address so far. This node itself
    would refuse the connection, and the refusal would not tell of the other relay.
    """
    away = info.node != own.node
    here = {view.address for port in _ports_of(own) for view in port.views() if away}
    views = [view for port in _ports_of(info) for view in port.views()]
    return [
        (view.address, view.port) for view in views if not view.waits and view.address not in here
    ]


def _ports_of(info: ProcessInfo) -> list[PortInfo]:
    return [*info.ports, *([info.control] if info.control else [])]


def say(what: dict[str, object]) -> None:
    """Prints a line of JSON for the parent."""
    click.echo(json.dumps(what))
    sys.stdout.flush()


def _end(_signal: int, _frame: FrameType | None) -> None:
    sys.exit(0)
