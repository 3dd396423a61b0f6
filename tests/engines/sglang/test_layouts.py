"""`sglang serve` over two nodes with other layouts than TP=2: a fault changes no token."""

from __future__ import annotations

import pytest
from served_stage import Stage, tokens_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    ("tensor", "pipeline", "groups"),
    [(4, 1, {"world", "tp"}), (1, 2, {"world", "pp"})],
    ids=["TP=4 on 2 nodes", "PP=2"],
)
def test_a_black_hole_changes_no_token(
    stage: Stage, tensor: int, pipeline: int, groups: set[str]
) -> None:
    with stage.server(tensor_parallel=tensor, pipeline_parallel=pipeline) as server:
        server.wait_until_ready(lambda _: None)
        reference = tokens_of(stage.run(server, "undisturbed"))
        struck = stage.struck_run(server, "struck", "black_hole", 0, 0)
        assert tokens_of(struck) == reference
        log = server.log_path(0).read_text(errors="replace")
    for name in groups:
        assert f"group {name}:0: {tensor * pipeline} ranks on 2 nodes, carried by r2ccl" in log
