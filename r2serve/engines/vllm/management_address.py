"""The address of vLLM's own traffic, on the management NIC.

The command line uses this module, too, so vLLM is imported only inside functions.
"""

from __future__ import annotations

import functools
import os

from r2serve.variables import MANAGEMENT


def named_address() -> str | None:
    """Returns the real address of this node, else ``VLLM_HOST_IP``; None: vLLM chooses an address.

    Behind a relay ``VLLM_HOST_IP`` is a virtual address.
    """
    return os.environ.get(MANAGEMENT) or os.environ.get("VLLM_HOST_IP") or None


def management_address() -> str | None:
    """Returns the address of this node announced by vLLM; None: no route."""
    return named_address() or _found_address()


@functools.cache
def _found_address() -> str | None:
    """Returns the address on the default route; cached, because vLLM's function always searches."""
    from vllm.utils.network_utils import get_ip

    found: str = get_ip()
    return None if found == "0.0.0.0" else found  # 0.0.0.0: vLLM found no route
