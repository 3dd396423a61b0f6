"""The address of SGLang's own traffic, on the management NIC.

The command line uses this module, too, so SGLang is imported only inside functions.
"""

from __future__ import annotations

import functools
import os


def named_address() -> str | None:
    """Returns the address in ``SGLANG_HOST_IP`` or ``HOST_IP``; None: SGLang looks for one."""
    return os.environ.get("SGLANG_HOST_IP") or os.environ.get("HOST_IP") or None


def management_address() -> str | None:
    """Returns this node's address as SGLang would announce it; None: no address was found."""
    return named_address() or _found_address()


@functools.cache
def _found_address() -> str | None:
    from sglang.srt.utils.network import get_local_ip_auto

    try:
        found: str = get_local_ip_auto()
    except ValueError:  # no address at all
        return None
    return found
