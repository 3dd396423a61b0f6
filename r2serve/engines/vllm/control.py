"""vLLM's own connections between nodes, carried by a relay (``R2CCL_CONTROL=rails``).

vLLM makes ZMQ sockets, gloo groups and TCPStores between nodes over the management NIC. The first
process of a node starts a relay before vLLM listens anywhere, and then puts virtual addresses in
the place of real ones: in the engine's configuration, in ``VLLM_HOST_IP``, and in the listeners of
torch. The real address of the node stays in a carried variable for r2serve's control rail.
"""

from __future__ import annotations

import functools
import importlib
import ipaddress
import logging
import os
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any

from r2serve.agreement import SAME, node_values
from r2serve.config import Config
from r2serve.engines import flag
from r2serve.engines.node_store import ComparedNode
from r2serve.engines.vllm import ending, exit_status, stopping
from r2serve.engines.vllm.management_address import management_address
from r2serve.errors import ConfigError, PeerClosedError, R2cclError
from r2serve.ports.addresses import parse
from r2serve.ports.management_address import HostAddressError, check_here, find_management_address
from r2serve.relay import torch_seams
from r2serve.relay.client import Carried
from r2serve.relay.lines import NoRelayError
from r2serve.relay.parent import Failure, RelayProcess, command
from r2serve.variables import MANAGEMENT, RELAY

HOST_IP = "VLLM_HOST_IP"
STORE_USER = "vllm.distributed.utils"
"""Module of vLLM that constructs stores."""
QUEUES = (
    "vllm.v1.executor.multiproc_executor",
    "vllm.distributed.device_communicators.shm_broadcast",
)
"""Modules of vLLM that announce the address of a message queue by their name ``get_ip``."""
TELLS_ADDRESS = ("kv_transfer_config", "ec_transfer_config", "kv_events_config")
"""Parts of the configuration by which an engine announces its address to other jobs."""
MOONCAKE, MOONCAKE_SERVER = "MooncakeConnector", "bootstrap_server_address"
"""Connector whose workers connect to the master address, unless this option names another one."""
OWN_COMMANDS = "each data-parallel rank is an engine with a command or a program of its own"
WAIT_S = 1800.0
"""Wait for the other nodes if the configuration has no timeout, as torch's for gloo."""
LONGEST_WAIT_S = 86400.0
"""Longest wait of the relay's command."""
MARGIN_S = 30.0
"""Wait for a relay beyond its own limits, for the start of its process."""
CLOSED_S = 1.0
"""Time for this node to stop by itself after another node has stopped in order."""

_LOG = logging.getLogger(__name__)
_relay: RelayProcess | None = None
"""The relay that this process has started."""
_before: dict[str, str | None] = {}
"""Variables that :func:`carry` has set, with their values before; None: not set."""
_functions: dict[str, Any] = {}
"""The function ``get_ip`` of vLLM's modules that :func:`apply` has replaced, by module."""


@dataclass(frozen=True)
class Site:
    """The place of this node in the engine, and the master address of the user."""

    node: int
    nodes: int
    master: str
    port: int


def carry(vllm_config: Any) -> None:
    """Starts the relay, once a node, and moves the engine's connections to virtual addresses.

    Raises:
        R2cclError, ConfigError: the relay did not start; the text has the reason.
    """
    parallel = vllm_config.parallel_config
    config = Config.from_env()
    site = relay_site_of(vllm_config, config)
    if site is None:
        return
    flag.log_with(logging.getLogger("vllm"), config.log_level)
    if isinstance(site, str):
        _say_direct(site)
        return
    carried = Carried.here()
    if carried is None:
        _check_head(site, parallel)
        carried = _start(site, parallel, config)
    rewrite(parallel, carried)
    if all(getattr(vllm_config, name, None) is None for name in TELLS_ADDRESS):
        _set(HOST_IP, carried.address)
    apply(carried)


def relay_site_of(vllm_config: Any, config: Config) -> Site | str | None:
    """Returns the place of this node's relay; else a text or None, as :func:`site_of`."""
    site = site_of(vllm_config.parallel_config, config)
    if isinstance(site, Site) and _registers_at_master(vllm_config):
        return "workers of the Mooncake connector register at the real master address"
    return site


def site_of(parallel: Any, config: Config) -> Site | str | None:
    """Returns the place of this node; a text: why its connections stay direct; None: no other node.

    A master at a loopback address means that all nodes of the engine run on one host.
    """
    if parallel.distributed_executor_backend == "ray" or parallel.data_parallel_backend == "ray":
        return "Ray's own connections stay there, too"
    site = _site_by_nodes(parallel)
    if site is None or isinstance(site, str):
        return site
    if _is_loopback(site.master):
        return None
    return "R2CCL_CONTROL=direct" if config.control == "direct" else site


def _site_by_nodes(parallel: Any) -> Site | str | None:
    everywhere, here = parallel.data_parallel_size, parallel.data_parallel_size_local
    if parallel.nnodes > 1:
        if parallel.distributed_executor_backend == "external_launcher":
            return "each rank is a program of its own, which an external launcher starts"
        if parallel.data_parallel_external_lb and parallel.nnodes % everywhere:
            return OWN_COMMANDS
        return Site(parallel.node_rank, parallel.nnodes, parallel.master_addr, parallel.master_port)
    if everywhere <= here or _is_loopback(parallel.data_parallel_master_ip):
        return None
    if parallel.data_parallel_rank_local is not None or parallel.data_parallel_external_lb:
        return OWN_COMMANDS
    if here < 1 or everywhere % here:
        return (
            f"{here} of {everywhere} data-parallel ranks are on this node, and a relay needs the "
            "same number on every node"
        )
    return Site(
        parallel.data_parallel_rank // here,
        everywhere // here,
        parallel.data_parallel_master_ip,
        parallel.data_parallel_rpc_port,
    )


def _is_loopback(address: str) -> bool:
    numeric = parse(address)
    return numeric is not None and numeric.is_loopback


def _registers_at_master(vllm_config: Any) -> bool:
    """Whether workers connect to a server of node 0 that listens at every address.

    Such a listener has no mirror. The Mooncake connector has this server unless the user names one.
    """
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    if transfer is None:
        return False
    extra = transfer.kv_connector_extra_config or {}
    parts = extra.get("connectors", [])  # of MultiConnector
    names = [transfer.kv_connector, *(part.get("kv_connector") for part in parts)]
    return MOONCAKE in names and extra.get(MOONCAKE_SERVER) is None


@functools.cache
def _say_direct(reason: str) -> None:
    chosen = reason.startswith("R2CCL_CONTROL")
    _LOG.log(
        logging.INFO if chosen else logging.WARNING,
        "vLLM's own connections between nodes stay on the management NIC, whose loss freezes or "
        "ends requests: %s",
        reason,
    )


def _check_head(site: Site, parallel: Any) -> None:
    """Refuses a data-parallel engine whose head has no ranks, at the node with the first rank.

    The head has no relay then, so the relays of the other nodes would wait for each other. A name
    may belong to a service in front of this node, so a name that resolves to other hosts is only a
    warning.

    Raises:
        ConfigError: the master address is numeric and belongs to another host.
    """
    if site.node != 0 or parallel.nnodes > 1:
        return
    try:
        check_here("--data-parallel-address", site.master)
    except HostAddressError as error:
        text = (
            "control (R2CCL_CONTROL) is 'rails', and the first data-parallel rank is on this node, "
            f"but the head seems to be another: {error}; must be 'direct' on every node if the "
            "head has no ranks (--data-parallel-size-local 0)"
        )
        if parse(site.master) is not None:
            raise ConfigError(text) from error
        if error.addresses:  # else a name of this node that only the others know
            _LOG.warning("%s", text)


def _start(site: Site, parallel: Any, config: Config) -> Carried:
    global _relay
    management = find_management_address(management_address())
    wait_s = float(getattr(parallel, "distributed_timeout_seconds", None) or WAIT_S)
    wait_s = min(wait_s, LONGEST_WAIT_S)
    masters = _masters(site, management, config)
    if management:
        _set(MANAGEMENT, management)  # the relay inherits it
    meets_at = config.control_master or masters
    _LOG.info("relay of node %d: meets other nodes at %s, port %d", site.node, meets_at, site.port)
    relay = RelayProcess(command(site.node, site.nodes, masters, site.port, wait_s))
    try:
        relay.wait_ready(wait_s + config.connect_timeout_s + MARGIN_S)
    except (R2cclError, ConfigError) as error:
        relay.close()
        _withdraw()
        if isinstance(error, NoRelayError) and parallel.nnodes == 1:
            raise ConfigError(_ask_node_0(site)) from error
        if SAME in str(error):
            raise  # the sentence names host, value and what would be right
        raise type(error)(
            f"control (R2CCL_CONTROL) is 'rails', but the relay of node {site.node} did not start: "
            f"{error}"
        ) from error
    except BaseException:
        relay.close()
        _withdraw()
        raise
    carried = Carried(relay.prefix, relay.node)
    _set(RELAY, str(carried))
    _relay = relay
    relay.on_end(_lost)
    _LOG.info(
        "relay of node %d of %d: connections of this node are at %s, and survive the loss of any "
        "NIC",
        carried.node,
        site.nodes,
        carried.address,
    )
    return carried


def _ask_node_0(site: Site) -> str:
    """Returns the sentence about a node 0 whose engine listens where its relay should."""
    from r2serve.engines.vllm import handshake  # imports ZMQ

    values = node_values({flag.VARIABLE: "default"} | dict(os.environ))
    host = socket.gethostname()
    return handshake.ask(
        ComparedNode(site.node, site.nodes, site.master, site.port, host, values, has_relay=True)
    )


def _masters(site: Site, management: str | None, config: Config) -> str:
    """Returns the addresses of node 0 between commas, for the relay's command.

    The relay itself gives ``R2CCL_CONTROL_MASTER`` precedence. Node 0 also listens at the engine's
    master address, the only address that a node without a relay knows.

    Raises:
        ConfigError: the master address cannot be resolved, and nothing else is named.
    """
    if config.control_master and site.node != 0:
        return config.control_master
    try:
        return ",".join(addresses_of(site, management))
    except ConfigError:
        if not config.control_master:
            raise
        return config.control_master


def addresses_of(site: Site, management: str | None) -> list[str]:
    """Returns the numeric addresses at which the relays meet.

    A master address may be the name of a service, or resolve to a loopback address on its own
    host. So node 0 also listens at its own address, which comes first.

    Raises:
        ConfigError: the master address cannot be resolved.
    """
    own = [management] if site.node == 0 and management else []
    numeric = parse(site.master)
    if numeric is not None:
        found = [str(numeric)]
    else:
        try:
            entries = socket.getaddrinfo(site.master, site.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            if own:  # a name of this node that only the others know
                return own
            raise ConfigError(
                f"--master-addr is {site.master!r}, a name that cannot be resolved ({error}): must "
                "be an address of node 0, or its name"
            ) from error
        found = [str(entry[4][0]) for entry in entries]
        found = [each for each in found if not ipaddress.ip_address(each).is_loopback]
    addresses = list(dict.fromkeys([*own, *found]))
    if not addresses:
        raise ConfigError(
            f"--master-addr is {site.master!r}, which is a loopback address here: must be an "
            "address of node 0 that the other nodes reach"
        )
    return addresses


def rewrite(parallel: Any, carried: Carried) -> None:
    """Puts the virtual address of node 0 in the place of the user's master addresses."""
    master, before = carried.address_of(0), parallel.master_addr
    spans = parallel.data_parallel_size > 1 and not _is_loopback(parallel.data_parallel_master_ip)
    if spans or (parallel.nnodes > 1 and parallel.data_parallel_master_ip == before):
        parallel.data_parallel_master_ip = master
    if parallel.nnodes > 1:
        parallel.master_addr = master


def apply(carried: Carried) -> None:
    """Moves the listeners of this process to the virtual address; imports vLLM.

    Where other jobs hear the address of this engine, ``VLLM_HOST_IP`` stays, and only the message
    queues announce the virtual address.
    """
    torch_seams.apply(carried, STORE_USER)
    if os.environ.get(HOST_IP) != carried.address:
        for name in QUEUES:
            module: Any = importlib.import_module(name)
            _functions.setdefault(name, module.get_ip)
            module.get_ip = lambda: carried.address


def _set(variable: str, value: str) -> None:
    _before.setdefault(variable, os.environ.get(variable))
    os.environ[variable] = value


def _withdraw() -> None:
    """Restores what :func:`carry` has set, for a later engine of this process."""
    global _relay
    _relay = None
    for variable, value in list(_before.items()):
        if value is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = value
    _before.clear()
    torch_seams.withdraw(STORE_USER)
    for name, function in list(_functions.items()):
        module: Any = sys.modules[name]
        module.get_ip = function
    _functions.clear()


def join() -> None:
    """Moves the listeners of a process of an engine with a relay; else does nothing.

    vLLM calls this (entry point group ``vllm.general_plugins``) in every process.
    """
    carried = Carried.here()
    if carried is not None:
        apply(carried)


def started() -> None:
    """Tells the relay of this process that the engine is up: new listeners are rare from now on."""
    if _relay is not None:
        _relay.started()


def _lost(error: Failure) -> None:
    """Ends the engine after the end of the relay, in a thread of the relay's parent."""
    if isinstance(error, PeerClosedError):
        time.sleep(CLOSED_S)
        if stopping.told_to_stop():
            return  # the leader has ended, so this node ends, too
    text = f"{type(error).__name__}: {error}"
    _LOG.error("the relay of this node has ended, so the engine exits: %s", text)
    exit_status.report(text)
    try:
        _withdraw()
    finally:
        ending.end_engine(text)
