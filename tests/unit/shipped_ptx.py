"""The PTX text embedded in the core."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from ptx.text import Text, embedded

from r2serve import _core


@cache
def text() -> Text:
    """Returns the text; skips the test if the core was built without kernels."""
    found = embedded(Path(_core.__file__))
    if found is None:
        pytest.skip("no nvcc when r2serve was installed")
    return found
