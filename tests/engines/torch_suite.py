"""PyTorch's own tests of torch.distributed, on the backend r2ccl: a program, run by pytest.

The suite decides by the backend's name what to run and what to expect, and knows none but its own.
So it is run under three names: those of two backends that it expects something of, and ours; what
they name, in this program, is r2ccl.  Only tests run that were skipped under the names before.

Says, in a line of JSON, which tests passed, failed and were skipped, and why.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import unittest
from typing import Any

ADDRESSES = "127.0.0.2,127.0.0.3"
# Of what a test would run if its backend was gloo, or mpi: what is of that backend itself, and what
# r2ccl has not.
NOT_OURS = {
    "Backend": "asks for the backend's name",
    "monitored_barrier": "monitored_barrier is gloo's alone",
    "sparse": "sparse tensors are not carried",
    "any_source": "receiving from any rank is not offered",
    "timeout": "expects the text of gloo's error",
}


def main(name: str, folder: str, only: list[str]) -> None:
    os.environ.update(BACKEND=name, WORLD_SIZE="4", TEMP_DIR=folder, MASTER_ADDR="127.0.0.1")
    os.environ.update(R2CCL_RAILS=ADDRESSES, R2CCL_NODE="per-rank")

    import torch
    import torch.distributed as dist
    from torch.testing._internal.common_distributed import DistTestCases

    import r2serve.engines.torch

    if name == r2serve.engines.torch.BACKEND:
        for feature in ("ddp", "subgroup"):
            DistTestCases.backend_feature[feature].add(name)
        DistTestCases.skip_collective["sendrecv anysource"].add(name)
    from torch.testing._internal.distributed import distributed_test as theirs

    init_process_group = dist.init_process_group

    def init(*args: Any, **kwargs: Any) -> None:
        kwargs["backend"] = r2serve.engines.torch.BACKEND
        init_process_group(*args, **kwargs)

    dist.init_process_group = init

    class Suite(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            # Forked: torch is imported once, not four times a test.
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    loader = unittest.TestLoader()
    names = [each for each in loader.getTestCaseNames(Suite) if not only or each in only]
    excluded = {}
    if name != r2serve.engines.torch.BACKEND:
        excluded = {
            each: why
            for each in names
            for word, why in NOT_OURS.items()
            if word.lower() in each.lower()
        }
    suite = unittest.TestSuite(Suite(each) for each in names if each not in excluded)
    result = unittest.TextTestRunner(stream=sys.stderr, verbosity=2).run(suite)
    failed = {case.id().rpartition(".")[2]: text for case, text in result.failures + result.errors}
    skipped = {case.id().rpartition(".")[2]: why for case, why in result.skipped} | excluded
    passed = [each for each in names if each not in failed and each not in skipped]
    print(json.dumps({"passed": passed, "failed": failed, "skipped": skipped}))  # noqa: T201


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        main(sys.argv[1], made, json.loads(sys.argv[2]) if len(sys.argv) > 2 else [])
