"""The address that vLLM uses for its own traffic; its NIC is the management NIC.

The command line asks, too, so nothing here imports vLLM before it is needed.
"""

from __future__ import annotations

import functools
import os


def named_address() -> str | None:
    """The address that ``VLLM_HOST_IP`` names; None: vLLM is to find one."""
    return os.environ.get("VLLM_HOST_IP") or None


def host_address() -> str | None:
    """The address of this node that vLLM gives to others; None: it has no route."""
    return named_address() or _found_address()


@functools.cache
def _found_address() -> str | None:
    """The address of the default route, as vLLM would find it again at every call."""
    from vllm.utils.network_utils import get_ip

    found: str = get_ip()
    return None if found == "0.0.0.0" else found  # vLLM's answer where there is no route either
