"""The backend ``r2ccl`` of torch.distributed: any PyTorch program's collectives outlive a rail.

``import r2serve.engines.torch`` registers it; then ``init_process_group("r2ccl")`` as with any
backend.  Collectives of a GPU's tensors are put into its stream.
"""

from __future__ import annotations

import torch.distributed as dist

from r2serve.engines.torch.group import R2cclGroup, use_management_address

__all__ = ["BACKEND", "register", "use_management_address"]

BACKEND = "r2ccl"


def register() -> None:
    """Make the backend known to torch.distributed.  Idempotent."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            BACKEND, R2cclGroup.create, extended_api=True, devices=["cpu", "cuda"]
        )


register()
