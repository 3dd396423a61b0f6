"""Ranks with different calls get an error with both calls; other communicators are unaffected."""

from __future__ import annotations

import pytest

# Parts of the error text: the wrong call, and the call of the other ranks.
WORDS = {
    "other_operation": ("all_reduce(max", "all_reduce(sum"),
    "other_size": ("9 elements", "8 elements"),
    "other_large_size": ("2000001 elements", "2000000 elements"),
    "other_dtype": ("int32", "float32"),
    "other_root": ("broadcast(", "root "),  # a rank that acts as root may be at the barrier
    "other_collective": ("all_gather", "all_reduce"),
    "other_algorithm": ("elements, two_shot)", "elements, one_shot)"),
    "one_call_more": ("barrier", "all_reduce"),
    "other_parts": ("reduce_scatter", "bytes"),
}


@pytest.mark.case("12", "ranks whose programs part got a mixed sum, or waited")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_gets_an_error_with_both_calls(jobs, free_ports, ranks: int) -> None:
    started = jobs.start("mistaken.py", ranks, ports=free_ports(len(WORDS)))
    for case, words in WORDS.items():
        for said in [rank.hear(60) for rank in started]:
            assert said["case"] == case
            assert said["error"] == "OrderMismatchError", said
            assert f"rank {ranks - 1}" in said["text"], said
            assert any(f"rank {other}" in said["text"] for other in range(ranks - 1)), said
            for word in words:
                assert word in said["text"], said
            assert said["others"] == ranks
    for rank in started:
        rank.wait(60)


@pytest.mark.timeout(300)
def test_communicators_share_links_and_work_from_several_threads(jobs, free_ports) -> None:
    ranks = jobs.start("two_threads.py", 3, steps=200, ports=free_ports(3))
    for rank in ranks:
        said = rank.hear(100)
        assert said["wrong"] == []
        peers = [f"rank {other}" for other in range(3) if other != rank.number]
        wanted = [[peer, f"rail{i}@node{rank.number}"] for peer in peers for i in (0, 1)]
        assert said["rails"] == wanted
        assert said["same"]
        rank.wait(60)
