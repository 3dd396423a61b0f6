"""A rank of three in SGLang's environment: node a has ranks 0 and 1, node b has rank 2.

Prints a JSON object with what each group is, and raises for a wrong result.
"""

from __future__ import annotations

import json
import os
import sys

RANKS = 3
NODES = ("a", "a", "b")


def main() -> None:
    rank, port = int(sys.argv[1]), int(sys.argv[2])
    os.environ["R2CCL_NODE"] = NODES[rank]
    from sglang.srt.plugins import load_plugins

    load_plugins()
    import torch
    import torch.distributed as dist
    from sglang.srt.distributed import parallel_state

    backend = parallel_state.get_default_distributed_backend("cpu")
    parallel_state.init_distributed_environment(
        world_size=RANKS,
        rank=rank,
        distributed_init_method=f"tcp://127.0.0.1:{port}",
        local_rank=rank,
        backend=backend,
    )

    def made(name: str, *ranks: list[int]) -> parallel_state.GroupCoordinator:
        return parallel_state.init_model_parallel_group(
            list(ranks), rank, backend, group_name=name, use_custom_allreduce=False
        )

    spanning, inside = made("tp", [0, 1, 2]), made("moe_tp", [0, 1], [2])
    dist.monitored_barrier(group=spanning.cpu_group)
    total = spanning.all_reduce(torch.arange(4.0) + rank)
    assert total.tolist() == [3.0, 6.0, 9.0, 12.0], total
    joined = spanning.all_gather(torch.full((2, 1), float(rank)), dim=1)
    assert joined.tolist() == [[0.0, 1.0, 2.0]] * 2, joined
    said = spanning.broadcast_object({"from": 0} if rank == 0 else None)
    assert said == {"from": 0}, said
    parts = torch.empty(RANKS)
    spanning.all_gather_into_tensor(parts, torch.tensor([float(rank)]))
    assert parts.tolist() == [0.0, 1.0, 2.0], parts
    of_node = inside.all_reduce(torch.ones(2))
    assert of_node.tolist() == [NODES.count(NODES[rank])] * 2, of_node
    communicator = spanning.r2serve_communicator
    facts = {
        "world": dist.get_backend(),
        "spanning": [dist.get_backend(spanning.device_group), dist.get_backend(spanning.cpu_group)],
        "inside": [dist.get_backend(inside.device_group), dist.get_backend(inside.cpu_group)],
        "nodes": list(communicator.nodes),
        "inside communicator": inside.r2serve_communicator is not None,
    }
    sys.stdout.write(json.dumps(facts) + "\n")
    dist.barrier()


if __name__ == "__main__":
    main()
