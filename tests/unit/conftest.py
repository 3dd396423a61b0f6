from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pairs import Pair


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    for rail in (0, 1):
        made.wait_for_state(rail, "UP")
    yield made
    made.close()
