"""Ids of requests: vLLM's, and the client's inside them."""

from __future__ import annotations

import re

# vLLM's request id is ``[NUMBER_]CLIENT-HEX``: the index of a sample (for n > 1), the client's id,
# eight hexadecimal digits.
_INTERNAL_ID = re.compile(r"(?:\d+_)?(.+)-[0-9a-f]{8}")


def client_name(identity: str) -> str:
    """Returns the client's id of a request.

    VLLM_DISABLE_REQUEST_ID_RANDOMIZATION makes the engine use the client's id. Then an id ending
    in a hyphen and eight hexadecimal digits is cut by mistake.
    """
    found = _INTERNAL_ID.fullmatch(identity)
    return found[1] if found else identity
