"""Runs PyTorch's own tests of torch.distributed on the backend r2ccl; started by pytest.

The suite chooses tests and expectations by the backend's name, and does not know r2ccl. So the
suite runs under 3 names: 2 backends known to the suite, and r2ccl. Under each name, r2ccl carries
the collectives. A run is limited to the tests skipped under the names before.

Prints a line of JSON: the passed tests, the failed tests, and the skipped tests with reasons.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import unittest
from typing import Any

ADDRESSES = "127.0.0.2,127.0.0.3"
# Tests left out under the names gloo and mpi: details of these backends, and features not in r2ccl.
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
            # Forked processes, so that torch is imported once instead of 4 times in each test.
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
