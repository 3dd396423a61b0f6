"""docs/quickstart.md, followed with SGLang; see :mod:`page_reader`."""

from __future__ import annotations

import os

import pytest
from page_reader import PageEngine, a_reader, follow_the_page
from sglang_environment import BIN, python

from r2serve.ports.management_address import VARIABLES

SGLANG = PageEngine(
    "sglang",
    BIN,
    # On CPUs, SGLang takes most of the memory, and needs a name for a kernel of attention.
    "--dtype float32 --device cpu --attention-backend torch_native --context-length 4096 "
    "--max-running-requests 4 --max-total-tokens 16384 --mem-fraction-static 0.2 "
    "--skip-server-warmup",
    host_ip=VARIABLES[1],
    variables={
        "SGLANG_USE_CPU_ENGINE": "1",
        # An entry for each rank; SGLang otherwise wants a NUMA node for each rank.
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join([f"0-{(os.cpu_count() or 1) - 1}"] * 2),
    },
)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_page_leads_to_a_server_that_survives_a_lost_cable() -> None:
    try:
        python()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    with a_reader(SGLANG) as reader:
        follow_the_page(reader)
