"""The backend ``r2ccl`` of torch.distributed: collectives of PyTorch programs with rail failover.

``import r2serve.engines.torch`` registers the backend for ``init_process_group("r2ccl")``.
Collectives of GPU tensors run on the tensors' stream.
"""

from __future__ import annotations

import torch.distributed as dist

from r2serve.engines.torch.group import R2cclGroup, use_config, use_management_address

__all__ = ["BACKEND", "register", "use_config", "use_management_address"]

BACKEND = "r2ccl"


def register() -> None:
    """Registers the backend with torch.distributed. Idempotent."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            BACKEND, R2cclGroup.create, extended_api=True, devices=["cpu", "cuda"]
        )


register()
