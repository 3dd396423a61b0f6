"""Plans of an all-reduce: the closed form against all tree schedules, choices, the command."""

from __future__ import annotations

import itertools
import json
import operator
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from r2serve import _core, plan
from r2serve.cli import main
from r2serve.errors import ConfigError, InvalidArgumentError

# Every run uses the same examples; the tests do not measure time.
fuzz = settings(
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)

MIB = 1 << 20
Loads = tuple[int, ...]
"""Sends and receives of the nodes, in buffers: the sends come first."""


def form(bandwidths: Sequence[float]) -> float:
    """Returns the time of a buffer with the best shares; unit: a whole node moves the buffer."""
    return max(1 / min(bandwidths), 2 * (len(bandwidths) - 1) / sum(bandwidths))


@cache
def schedules(nodes: int) -> tuple[Loads, ...]:
    """Returns the loads of all pairs of a reduction tree and a broadcast tree with its root."""
    found: set[Loads] = set()
    for root in range(nodes):
        trees = {children(parents, root) for parents in parent_maps(nodes, root)}
        for inner, outer in itertools.product(trees, trees):
            sends = tuple((node != root) + outer[node] for node in range(nodes))
            receives = tuple(inner[node] + (node != root) for node in range(nodes))
            found.add(sends + receives)
    return tuple(sorted(found))


def parent_maps(nodes: int, root: int) -> list[dict[int, int]]:
    """Returns the parents of every tree with this root."""
    others = [node for node in range(nodes) if node != root]
    maps = []
    for parents in itertools.product(range(nodes), repeat=len(others)):
        tree = dict(zip(others, parents, strict=True))
        if all(reaches(tree, node, root) for node in others):
            maps.append(tree)
    return maps


def reaches(parents: dict[int, int], node: int, root: int) -> bool:
    for _ in parents:
        node = parents.get(node, root)
    return node == root


def children(parents: dict[int, int], root: int) -> tuple[int, ...]:
    above = list(parents.values())
    return tuple(above.count(node) for node in range(len(parents) + 1))


def direct(nodes: int, owner: int) -> Loads:
    """Returns the loads of a two-shot all-reduce of bytes with this owner."""
    return tuple(nodes - 1 if node == owner else 1 for node in range(nodes)) * 2


def least_time(bandwidths: Sequence[float]) -> float:
    """Returns a time that no mixture of the schedules beats, from dual solutions.

    The linear programme: mix schedules of one buffer, so that the largest load over bandwidth is
    least. For prices p_i of the sends with a sum of b_i * p_i of 1, the time is at least the price
    of the cheapest schedule. The two vectors of prices here are those of the form.
    """
    nodes = len(bandwidths)
    slowest = bandwidths.index(min(bandwidths))
    alone = [1 / bandwidths[slowest] if node == slowest else 0.0 for node in range(nodes)]
    together = [1 / sum(bandwidths)] * nodes
    return max(
        min(sum(map(operator.mul, prices, loads)) for loads in schedules(nodes))
        for prices in (alone, together)
    )


def time_of_shares(bandwidths: Sequence[float], shares: Sequence[float]) -> float:
    """Returns the time of a mixture of direct schedules."""
    nodes = len(bandwidths)
    owners = [direct(nodes, owner) for owner in range(nodes)]
    assert set(owners) <= set(schedules(nodes))
    return max(
        sum(share * loads[row] for share, loads in zip(shares, owners, strict=True))
        / bandwidths[row % nodes]
        for row in range(2 * nodes)
    )


def test_the_schedules_are_all_pairs_of_trees() -> None:
    assert [len(schedules(nodes)) for nodes in (2, 3, 4, 5)] == [1, 9, 100, 1225]


bandwidths = st.integers(2, 5).flatmap(
    lambda nodes: st.lists(st.floats(0.1, 1.0), min_size=nodes, max_size=nodes)
)
small_losses = st.integers(3, 5).flatmap(
    lambda nodes: st.lists(st.integers(0, 15), min_size=nodes, max_size=nodes)
)
some_losses = st.integers(3, 8).flatmap(
    lambda nodes: st.lists(st.integers(0, 15), min_size=nodes, max_size=nodes)
)
losses = st.integers(3, 64).flatmap(
    lambda nodes: st.lists(st.integers(0, 15), min_size=nodes, max_size=nodes)
)


@settings(fuzz, max_examples=100)
@given(bandwidths)
def test_no_mixture_of_trees_is_faster_than_the_form(each: list[float]) -> None:
    assert least_time(each) == pytest.approx(form(each), rel=1e-9)


@settings(fuzz, max_examples=100)
@given(small_losses)
def test_the_shares_are_the_best_mixture_of_trees(lost: list[int]) -> None:
    each = [(16 - node) / 16 for node in lost]
    weights = _core.share_weights(lost) or [1] * len(lost)
    shares = [weight / sum(weights) for weight in weights]
    assert time_of_shares(each, shares) == pytest.approx(least_time(each), rel=1e-9)


@settings(fuzz, max_examples=200)
@given(losses)
def test_the_shares_reach_the_form(lost: list[int]) -> None:
    weights = _core.share_weights(lost)
    exact = form([(16 - each) / 16 for each in lost])
    assert _core.exchange_factor(weights, lost) == pytest.approx(exact, rel=1e-5)
    assert _core.exchange_factor(weights, lost) <= _core.exchange_factor([], lost) + 1e-5


@settings(fuzz, max_examples=200)
@given(losses)
def test_the_weights_in_use_are_the_best_ones_or_none(lost: list[int]) -> None:
    assert _core.weights_in_use(lost) in ([], _core.share_weights(lost))


# More than 8 nodes make the flows of an example too many.
@settings(fuzz, max_examples=60)
@given(some_losses, st.integers(4, 32))
def test_flows_are_never_faster_than_the_form(lost: list[int], blocks: int) -> None:
    each = [(16 - node) / 16 for node in lost]
    weights = _core.share_weights(lost)
    assert _core.flow_time(each, 0.0, 1.0, weights, blocks, True) >= form(each) * (1 - 1e-5)


@settings(fuzz, max_examples=60)
@given(st.integers(3, 8), st.sampled_from([2, 4, 8]), st.integers(4, 32))
def test_flows_of_one_slow_node_take_part_of_a_block_more(
    nodes: int, lost: int, blocks: int
) -> None:
    each = [1 - lost / 16] + [1.0] * (nodes - 1)
    weights = _core.share_weights([lost] + [0] * (nodes - 1))
    flows = _core.flow_time(each, 0.0, 1.0, weights, blocks, True)
    assert flows <= form(each) * (1 + 2 / blocks)


def test_flows_share_a_resource_and_wait_for_each_other() -> None:
    network = _core.FlowNetwork()
    nic = network.add_resource(10.0)
    first = network.add_flow(10.0, [nic])
    second = network.add_flow(30.0, [nic], latency_s=1.0)
    last = network.add_flow(10.0, [nic], after=[second], behind=first)
    times = network.run()
    assert times["sent_s"] == [2.0, 4.0, 6.0]
    assert times["arrived_s"] == [2.0, 5.0, 6.0]
    assert times["carried_bytes"] == [50.0]
    assert times["end_s"] == times["arrived_s"][last]
    with pytest.raises(InvalidArgumentError, match="flow 3: path: resource 1 is unknown"):
        network.add_flow(1.0, [1])


def test_the_page_has_the_times_of_the_form() -> None:
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| 1/(\d) \| ([\d.]+) \|.*\| \*\*([\d.]+)\*\* \|$", page, re.M)
    assert len(rows) == 11
    for nodes, part, even, uneven in rows:
        slow = 1 - 1 / int(part)
        each = [slow] + [1.0] * (int(nodes) - 1)
        healthy = form([1.0] * int(nodes))
        assert even == f"{1 / slow:.3f}"
        assert uneven == f"{form(each) / healthy:.3f}"


# ---- plans ----


def test_a_lost_rail_of_eight_shifts_shares() -> None:
    cluster = plan.Cluster(nodes=8, rails=8)
    made = plan.make(1024 * MIB, cluster, ["rail1@node3"])
    assert (made.algorithm, made.shares, made.blocks) == ("two_shot", "uneven", 32)
    assert [node.announced for node in made.nodes] == [0, 0, 0, 2, 0, 0, 0, 0]
    assert [node.rails_up for node in made.nodes] == [8, 8, 8, 7, 8, 8, 8, 8]
    assert made.nodes[3].share == pytest.approx(0.093, abs=0.001)
    assert sum(node.share for node in made.nodes) == pytest.approx(1)
    healthy, even, chosen = (each.form_s for each in (made.healthy, made.even, made.chosen))
    assert healthy is not None
    assert even is not None
    assert chosen is not None
    # The latency of the two messages is a thousandth.
    assert even / healthy == pytest.approx(8 / 7, rel=2e-3)
    assert chosen / healthy == pytest.approx(1.016, rel=2e-3)
    # The flow hides one of the two latencies behind other blocks.
    assert made.chosen.flow_s is not None
    assert chosen - 1.01 * 5e-6 <= made.chosen.flow_s < even
    moved = [node.moved_bytes for node in made.nodes]
    assert moved[3] == pytest.approx(1024 * MIB * (1 + 6 * made.nodes[3].share), rel=1e-9)
    assert sum(moved) == pytest.approx(14 * 1024 * MIB, rel=1e-9)


@pytest.mark.parametrize(
    ("size", "cluster", "lost", "reason"),
    [
        (64 * MIB, plan.Cluster(nodes=2), ["rail1@node0"], "with two nodes"),
        (64 * MIB, plan.Cluster(), [], "no node has lost a rail"),
        (64 * MIB, plan.Cluster(rails=32), ["rail9@node3"], "less than 1/16 counts as no loss"),
        (64 * MIB, plan.Cluster(nodes=3, rails=16), ["rail9@node2"], "gain less than 5 %"),
        (
            64 * MIB,
            plan.Cluster(nodes=3),
            ["rail1@node0", "rail1@node1", "rail1@node2"],
            "announce the same loss",
        ),
        (
            64 * MIB,
            plan.Cluster(rails=8),
            ["rail1@node0", "rail1@node1", "rail1@node2"],
            "others leave most of the buffer to too few nodes",
        ),
        (4 * MIB, plan.Cluster(), ["rail1@node0"], "less than 8 MiB makes too few blocks"),
        (
            64 * MIB,
            plan.Cluster(algorithm="one_shot"),
            ["rail1@node0"],
            "one_shot has none",
        ),
    ],
)
def test_even_shares_have_a_reason(
    size: int, cluster: plan.Cluster, lost: list[str], reason: str
) -> None:
    made = plan.make(size, cluster, lost)
    assert made.shares == "even"
    assert made.blocks == 0
    assert reason in made.reasons[-1]
    assert made.chosen == made.even


def test_small_buffers_take_one_shot() -> None:
    made = plan.make(1024, plan.Cluster(latency_us=0.0), ["rail1@node0"])
    assert made.algorithm == "one_shot"
    assert "for one_shot" in made.reasons[0]
    assert made.nodes[0].moved_bytes == 3 * 1024
    assert made.chosen.form_s == pytest.approx(3 * 1024 / 12.5e9)
    assert made.chosen.flow_s is None


def test_a_lost_rail_changes_the_algorithm() -> None:
    """The model crosses at 32 KB for four whole nodes, and at 17 KB with half a node."""
    lost = plan.make(24 << 10, plan.Cluster(), ["rail1@node0"])
    assert lost.algorithm == "two_shot"
    assert "two_shot instead of one_shot" in lost.reasons[1]
    whole = plan.make(24 << 10, plan.Cluster(), [])
    assert whole.algorithm == "one_shot"
    assert lost.healthy == whole.healthy


def test_overlapped_blocks_hide_their_latencies() -> None:
    """The form has a latency for each half of the call besides the transfer."""
    slow = plan.Cluster(latency_us=100.0)
    plain = plan.make(64 * MIB, slow, [])
    overlap = plan.make(64 * MIB, replace(slow, algorithm="two_shot_overlap"), [])
    assert (plain.blocks, overlap.blocks, overlap.shares) == (0, 32, "even")
    assert overlap.nodes == plain.nodes
    assert overlap.chosen.form_s == plain.chosen.form_s
    assert overlap.chosen.form_s is not None
    assert overlap.chosen.flow_s is not None
    assert plain.chosen.flow_s is not None
    transfer_s = overlap.chosen.form_s - 2 * 100e-6
    assert transfer_s < overlap.chosen.flow_s < plain.chosen.flow_s
    assert overlap.healthy == overlap.chosen


@pytest.mark.parametrize("lost", [[0], [0, 0, 0, 0, 0]])
def test_the_core_takes_a_loss_for_each_node(lost: list[int]) -> None:
    with pytest.raises(ValueError, match="lost: must be a loss for each node, or none"):
        _core.choose_all_reduce(1024, [1] * 4, lost)


def test_blocks_of_even_shares_wait_for_each_other() -> None:
    """Blocks have 2 MiB at four ranks; each costs the latency of two messages."""
    cluster = plan.Cluster(latency_us=100.0)
    made = plan.make(7 * MIB, cluster, [])
    whole = 7 * MIB * 1.5 / 25e9
    assert made.healthy.form_s == pytest.approx(whole + 200e-6)
    assert made.healthy.flow_s == pytest.approx(whole + 4 * 200e-6)


def test_ranks_of_a_node_multiply_its_bytes() -> None:
    alone = plan.make(64 * MIB, plan.Cluster(), ["rail1@node0"])
    four = plan.make(64 * MIB, plan.Cluster(ranks_per_node=4), ["rail1@node0"])
    assert [node.moved_bytes for node in four.nodes] == pytest.approx(
        [4 * node.moved_bytes for node in alone.nodes]
    )


@pytest.mark.parametrize(
    ("lost", "text"),
    [
        (["rail2@node0"], "'rail2@node0'; must be rail<i>@node<j> with i below 2 and j below 4"),
        (["eth0"], "'eth0'; must be"),
        (["rail0@node1", "rail1@node1"], "takes all 2 rails of node1; must leave one"),
        (["rail0@node1", "rail1@node2"], "takes all common rails of node1 and node2; must leave"),
    ],
)
def test_impossible_losses_are_refused(lost: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match="--lost: ") as refused:
        plan.make(64 * MIB, plan.Cluster(), lost)
    assert text in str(refused.value)


@pytest.mark.parametrize(
    ("size", "cluster", "name"),
    [
        (0, plan.Cluster(), "--bytes"),
        (1, plan.Cluster(nodes=65), "--nodes"),
        (1, plan.Cluster(rails=0), "--rails"),
        (1, plan.Cluster(ranks_per_node=0), "--ranks-per-node"),
        (1, plan.Cluster(nodes=5, ranks_per_node=52), "--ranks-per-node"),
        (1, plan.Cluster(gbit_s=0.0), "--gbit"),
        (1, plan.Cluster(latency_us=-1.0), "--latency-us"),
    ],
)
def test_numbers_out_of_range_are_refused(size: int, cluster: plan.Cluster, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: .*; must be from"):
        plan.make(size, cluster, [])


def test_the_command_explains_its_choice() -> None:
    arguments = ["plan", "--bytes", "64MiB", "--lost", "rail1@node3", "--nodes", "4"]
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    text = " ".join(done.output.split())
    assert "choice: two_shot, uneven shares, 32 blocks, two under way" in text
    assert "node3 lacks 1 of 2 rails and announces 8/16" in text
    assert "rails lost, as chosen" in text


def test_the_command_prints_json() -> None:
    arguments = ["plan", "--lost", "rail1@node3", "--rails", "8", "--json"]
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    made = plan.make(64 * MIB, plan.Cluster(rails=8), ["rail1@node3"])
    assert json.loads(done.output) == json.loads(json.dumps(made.to_json()))


def test_the_command_takes_options_of_the_environment() -> None:
    arguments = ["plan", "--bytes", "4MiB", "--lost", "rail1@node3", "--json"]
    for slot_bytes, shares in (("1048576", "even"), ("262144", "uneven")):
        done = CliRunner().invoke(
            main, arguments, env={"R2CCL_SLOT_BYTES": slot_bytes}, catch_exceptions=False
        )
        assert json.loads(done.output)["shares"] == shares


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--bytes", "64 mega"], "must be bytes, KiB, MiB or GiB"),
        (["--lost", "rail9@node0"], "must be rail<i>@node<j>"),
    ],
)
def test_the_command_refuses_wrong_values(arguments: list[str], text: str) -> None:
    done = CliRunner().invoke(main, ["plan", *arguments])
    assert done.exit_code != 0
    assert text in done.output


def test_times_and_bytes_have_units() -> None:
    shown = [plan.show_time(each) for each in (None, 2.0, 0.00134, 12e-6)]
    assert shown == ["-", "2 s", "1.34 ms", "12 us"]
    counts = [plan.show_bytes(each) for each in (12, 4096, 3 * MIB / 2, 1 << 30)]
    assert counts == ["12 B", "4 KiB", "1.5 MiB", "1 GiB"]
