"""Makes `vllm serve` a fork if a test asks for it; see tests/forked.py.

Every interpreter with this folder on PYTHONPATH imports this module.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

PATH = os.environ.get("R2SERVE_TEST_FORKS")
COMMAND = sys.orig_argv[1:3]
LOOKS_AT_MODELS = ["-m", "vllm.model_executor.models.registry"]


def wanted() -> bool:
    serves = len(COMMAND) == 2 and Path(COMMAND[0]).name == "vllm" and COMMAND[1] == "serve"
    return serves or COMMAND == LOOKS_AT_MODELS


if PATH and wanted():
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from forked import stand_in

    stand_in(PATH)
