"""docs/quickstart.md, followed with vLLM; see :mod:`page_reader`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from page_reader import PageEngine, a_reader, follow_the_page

VLLM = PageEngine(
    "vllm",
    Path(sys.executable).parent,
    "--dtype float32 --enforce-eager --max-model-len 4096 --max-num-seqs 4",
    variables={
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    },
)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_page_leads_to_a_server_that_survives_a_lost_cable() -> None:
    with a_reader(VLLM) as reader:
        follow_the_page(reader)
