"""Tensors of more than 2^31 and 2^32 bytes arrive whole."""

from __future__ import annotations

from typing import Any

import psutil
import pytest


@pytest.mark.alone
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [2**31 + 4097, 2**32 + 4097], ids=["31 bits", "32 bits"])
def test_a_tensor_beyond_the_range_of_a_number_arrives(jobs: Any, number: int) -> None:
    needed = 2 * number + 2**31
    if psutil.virtual_memory().available < needed:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of free memory")
    ranks = jobs.start("huge.py", 2, bytes=number)
    for rank in ranks:
        assert rank.hear(600)["wrong"] == {"all_reduce": 0, "broadcast": 0, "send": 0}
    for rank in ranks:
        rank.wait(60)
