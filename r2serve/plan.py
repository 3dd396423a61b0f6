"""What the planner does for an all-reduce while rails are lost, and what the call then costs.

The core's own functions choose the algorithm, the announced losses, the shares and the blocks, for
nodes that were healthy before the loss. The times are predictions for given rates of the rails:
closed forms, and the core's flow model. Neither counts the time of CPUs and memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from r2serve import _core
from r2serve.errors import ConfigError

MOST_NODES = 64
"""Limit of the flow model, which has a flow for each pair of nodes and block."""
MOST_RANKS = 256
"""Limit of a communicator."""
_RAIL = re.compile(r"rail(\d{1,4})@node(\d{1,4})")


@dataclass(frozen=True)
class Cluster:
    """Equal nodes: rail i of a node reaches rail i of every other node."""

    nodes: int = 4
    rails: int = 2
    ranks_per_node: int = 1
    gbit_s: float = 100.0
    """Rate of a rail in each direction."""
    latency_us: float = 5.0
    slot_bytes: int = 1 << 20
    algorithm: str = "auto"
    """Value of the option ``R2CCL_ALGORITHM``."""


@dataclass(frozen=True)
class NodePlan:
    """A node in a plan."""

    node: int
    rails_up: int
    announced: int
    """Loss that the node announces, in sixteenths of its bandwidth."""
    share: float
    """Part of the buffer that the node's ranks fold."""
    moved_bytes: int
    """Bytes that the node sends, and receives as many."""


@dataclass(frozen=True)
class Prediction:
    """Predicted times of a call, in seconds; None without a value."""

    form_s: float | None
    flow_s: float | None


@dataclass(frozen=True)
class Plan:
    """The choice for a call, with reasons and predicted times."""

    bytes: int
    cluster: Cluster
    lost: tuple[str, ...]
    algorithm: str
    shares: str
    """``even`` or ``uneven``."""
    blocks: int
    """Blocks that overlap; 0: none."""
    reasons: tuple[str, ...]
    nodes: tuple[NodePlan, ...]
    healthy: Prediction
    even: Prediction
    chosen: Prediction

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def lost_rails(names: Iterable[str], cluster: Cluster) -> tuple[frozenset[int], ...]:
    """Returns the lost rails of each node.

    Raises:
        ConfigError: a name is no ``rail<i>@node<j>`` of the cluster, or two nodes have no common
            rail left.
    """
    lost: list[set[int]] = [set() for _ in range(cluster.nodes)]
    for name in names:
        found = _RAIL.fullmatch(name)
        rail, node = (int(found[1]), int(found[2])) if found else (-1, -1)
        if not (0 <= rail < cluster.rails and 0 <= node < cluster.nodes):
            raise ConfigError(
                f"--lost: {name!r}; must be rail<i>@node<j> with i below {cluster.rails} and j "
                f"below {cluster.nodes}"
            )
        lost[node].add(rail)
    for node, rails in enumerate(lost):
        if len(rails) == cluster.rails:
            raise ConfigError(
                f"--lost: takes all {cluster.rails} rails of node{node}; must leave one, because a "
                "plan has no path over the management NIC"
            )
    for node, rails in enumerate(lost):
        for other in range(node):
            if len(rails | lost[other]) == cluster.rails:
                raise ConfigError(
                    f"--lost: takes all common rails of node{other} and node{node}; must leave "
                    "one, because a plan has no path over the management NIC"
                )
    return tuple(frozenset(rails) for rails in lost)


def make(size: int, cluster: Cluster, names: Sequence[str]) -> Plan:
    """Returns the plan of an all-reduce of ``size`` bytes while the named rails are lost.

    Raises:
        ConfigError: as :func:`lost_rails`, or a number of the cluster is out of range.
    """
    _check(size, cluster)
    lost = lost_rails(names, cluster)
    announced = _announced(cluster, lost)
    algorithm, healthy, reasons = _algorithm(size, cluster, announced)
    weights, blocks, why = _shares(size, cluster, lost, announced, algorithm)
    reasons.append(why)
    overlapped = _even_blocks(size, cluster, algorithm)
    bandwidths = [1 - len(rails) / cluster.rails for rails in lost]
    whole = [1.0] * cluster.nodes
    parts = _parts(weights, cluster)
    moved = _moved(size, cluster, algorithm, parts)
    return Plan(
        bytes=size,
        cluster=cluster,
        lost=tuple(names),
        algorithm=algorithm,
        shares="uneven" if weights else "even",
        blocks=blocks or overlapped,
        reasons=tuple(reasons),
        nodes=tuple(
            NodePlan(
                node=node,
                rails_up=cluster.rails - len(lost[node]),
                announced=announced[node],
                share=parts[node],
                moved_bytes=round(moved[node]),
            )
            for node in range(cluster.nodes)
        ),
        healthy=_predict(size, cluster, healthy, whole, [], _even_blocks(size, cluster, healthy)),
        even=_predict(size, cluster, algorithm, bandwidths, [], overlapped),
        chosen=_predict(size, cluster, algorithm, bandwidths, weights, blocks or overlapped),
    )


def _check(size: int, cluster: Cluster) -> None:
    for name, value, least, most in (
        ("--bytes", size, 1, 1 << 50),
        ("--nodes", cluster.nodes, 2, MOST_NODES),
        ("--rails", cluster.rails, 1, 64),
        ("--ranks-per-node", cluster.ranks_per_node, 1, 64),
        ("--gbit", cluster.gbit_s, 0.001, 100_000),
        ("--latency-us", cluster.latency_us, 0, 1_000_000),
    ):
        if not least <= value <= most:
            raise ConfigError(f"{name}: {value}; must be from {least} to {most}")
    if cluster.nodes * cluster.ranks_per_node > MOST_RANKS:
        raise ConfigError(
            f"--ranks-per-node: {cluster.ranks_per_node}; must be from 1 to "
            f"{MOST_RANKS // cluster.nodes} on {cluster.nodes} nodes, because a communicator has "
            f"at most {MOST_RANKS} ranks"
        )


def _algorithm(size: int, cluster: Cluster, announced: Sequence[int]) -> tuple[str, str, list[str]]:
    """Returns the algorithm, the algorithm without a loss, and the reasons."""
    if cluster.algorithm != "auto":
        why = f"{cluster.algorithm}: set by R2CCL_ALGORITHM"
        return cluster.algorithm, cluster.algorithm, [why]
    node_sizes = [cluster.ranks_per_node] * cluster.nodes
    choice = _core.choose_all_reduce(size, node_sizes, announced)
    algorithm = choice["algorithm"]
    reasons = [
        f"{algorithm}: the engine's model gives {show_time(choice['one_shot_s'])} for one_shot "
        f"and {show_time(choice['two_shot_s'])} for two_shot (constants of a loopback)"
    ]
    healthy = _core.choose_all_reduce(size, node_sizes)["algorithm"]
    if algorithm != healthy:
        reasons.append(f"{algorithm} instead of {healthy}: a node has announced a loss")
    return algorithm, healthy, reasons


def _lacks(cluster: Cluster, lost: Sequence[frozenset[int]]) -> list[int]:
    """Returns the loss of each node in sixteenths."""
    return [_core.whole_bandwidth * len(rails) // cluster.rails for rails in lost]


def _announced(cluster: Cluster, lost: Sequence[frozenset[int]]) -> list[int]:
    """Returns the losses that the nodes announce; two nodes announce none."""
    if cluster.nodes < 3:
        return [0] * cluster.nodes
    return _core.announced_losses(_lacks(cluster, lost))


def _shares(
    size: int,
    cluster: Cluster,
    lost: Sequence[frozenset[int]],
    announced: Sequence[int],
    algorithm: str,
) -> tuple[list[int], int, str]:
    """Returns the weights of the nodes, the blocks, and the reason."""
    if cluster.nodes < 3:
        return [], 0, "even shares: with two nodes, no shares are faster"
    if not any(lost):
        return [], 0, "even shares: no node has lost a rail"
    if not any(_lacks(cluster, lost)):
        return [], 0, f"even shares: less than 1/{_core.whole_bandwidth} counts as no loss"
    weights = _core.weights_in_use(announced)
    if not any(announced):
        return [], 0, f"even shares: others gain less than {_core.least_gain_percent} %"
    if len(set(announced)) == 1:
        return [], 0, "even shares: all nodes announce the same loss"
    if not weights:
        return [], 0, "even shares: others leave most of the buffer to too few nodes"
    if algorithm == "one_shot":
        return [], 0, "shares: one_shot has none, each rank folds everything"
    ranks = cluster.nodes * cluster.ranks_per_node
    blocks = _core.overlapped_blocks(size, ranks, cluster.slot_bytes)
    if not blocks:
        least = 2 * ranks * cluster.slot_bytes
        return (
            [],
            0,
            f"even shares: less than {show_bytes(least)} makes too few blocks for an overlap",
        )
    slowest = max(range(cluster.nodes), key=lambda node: announced[node])
    return (
        weights,
        blocks,
        f"uneven shares: node{slowest} lacks {len(lost[slowest])} of {cluster.rails} rails and "
        f"announces {announced[slowest]}/{_core.whole_bandwidth}",
    )


def _even_blocks(size: int, cluster: Cluster, algorithm: str) -> int:
    """Returns the number of blocks that overlap with even shares; 0: none."""
    if algorithm != "two_shot_overlap":
        return 0
    ranks = cluster.nodes * cluster.ranks_per_node
    return _core.overlapped_blocks(size, ranks, cluster.slot_bytes)


def _parts(weights: Sequence[int], cluster: Cluster) -> list[float]:
    if not weights:
        return [1 / cluster.nodes] * cluster.nodes
    return [weight / sum(weights) for weight in weights]


def _moved(size: int, cluster: Cluster, algorithm: str, parts: Sequence[float]) -> list[float]:
    """Returns the bytes that each node sends over its rails, and receives."""
    per_rank = size * cluster.ranks_per_node
    if algorithm == "one_shot":
        ranks_elsewhere = (cluster.nodes - 1) * cluster.ranks_per_node
        return [float(per_rank * ranks_elsewhere)] * cluster.nodes
    return [per_rank * (1 + (cluster.nodes - 2) * part) for part in parts]


def _predict(
    size: int,
    cluster: Cluster,
    algorithm: str,
    bandwidths: Sequence[float],
    weights: Sequence[int],
    blocks: int,
) -> Prediction:
    """Returns the times for these parts of a node's bandwidth."""
    rate = cluster.gbit_s * 1e9 / 8 * cluster.rails
    moved = _moved(size, cluster, algorithm, _parts(weights, cluster))
    form = max(each / (part * rate) for each, part in zip(moved, bandwidths, strict=True))
    latency_s = cluster.latency_us * 1e-6
    if algorithm == "one_shot":
        return Prediction(form + latency_s, None)

    def flow(count: int) -> float:
        rates = [part * rate for part in bandwidths]
        carried = float(count * cluster.ranks_per_node)
        return _core.flow_time(rates, latency_s, carried, weights, max(blocks, 1), bool(blocks))

    if blocks:
        return Prediction(form + 2 * latency_s, flow(size))
    # A block of even shares begins after the end of the block before.
    ranks = cluster.nodes * cluster.ranks_per_node
    block = _core.even_block_bytes(ranks, cluster.slot_bytes)
    whole, rest = divmod(size, block)
    flow_s = (whole * flow(block) if whole else 0.0) + (flow(rest) if rest else 0.0)
    return Prediction(form + 2 * latency_s, flow_s)


def show_time(seconds: float | None) -> str:
    """Returns a time with its unit and three digits; ``-`` without a time."""
    if seconds is None:
        return "-"
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def show_bytes(count: float) -> str:
    """Returns a number of bytes with its unit."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= factor:
            return f"{count / factor:.4g} {unit}"
    return f"{count:.0f} B"
