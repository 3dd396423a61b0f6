"""The fused all-reduce, addition and norm in real vLLM."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from answers import FLAG, PROMPTS, RAILS
from vllm_jobs import run_ranks

if TYPE_CHECKING:
    from conftest import Answers, Engine

# Compiled code rounds differently from eager code, and the model computes in bfloat16. Logprobs of
# wrong results differ by several units.
CLOSE = 0.5
CLOSE_ON_AVERAGE = 0.1


@pytest.mark.long
def test_a_compiled_model_answers_the_same_with_the_fused_operation(
    start_engine: Callable[..., Engine],
    eager_answers: Answers,
    show: Callable[[str], None],
    tmp_path: Path,
) -> None:
    # The caches are disabled: a compiled graph from a cache would skip the compiler passes.
    caches = {
        "VLLM_CACHE_ROOT": f"{tmp_path}/vllm",
        "VLLM_DISABLE_COMPILE_CACHE": "1",
        "TORCHINDUCTOR_CACHE_DIR": f"{tmp_path}/torch",
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
    }
    environment = RAILS | {"R2CCL_NODE": "per-rank"} | caches
    fused = start_engine(2, FLAG, [environment | {"R2CCL_FUSE": "on"}], eager=False)
    texts = [prompt + text for prompt, text in zip(PROMPTS, eager_answers.texts, strict=True)]
    got = [fused.logprobs(text) for text in texts]
    apart = [
        abs(one - other)
        for mine, theirs in zip(got, eager_answers.logprobs, strict=True)
        for one, other in zip(mine, theirs, strict=True)
    ]
    found = re.findall(r"Worker_TP(\d).*one operation at (\d+) places", fused.nodes[0].log)
    places = [[int(n) for rank, n in found if rank == mine] for mine in "01"]
    show(
        f"one operation in place of three at {places} places of the graphs of two workers; "
        f"logprobs of {len(apart)} tokens at most {max(apart):.3f} from eager's, "
        f"{statistics.mean(apart):.3f} on average"
    )
    assert max(apart) < CLOSE
    assert statistics.mean(apart) < CLOSE_ON_AVERAGE
    # The 3 graphs lie before the first attention, between the two attentions, and after the second.
    assert places == [[0, 2, 2]] * 2


def test_the_fused_operation_equals_the_replaced_operations(fake_cuda: Path) -> None:
    for case in ("fused", "gpu_fused"):
        done = run_ranks(
            case,
            "per-rank",
            "per-rank",
            R2CCL_CUDA_LIBRARY=str(fake_cuda),
            R2CCL_GPU_STAGING_BYTES=str(1024**2),
            TRITON_INTERPRET="1",
        )
        assert done.returncode == 0, done.stdout
