"""Ids of requests: vLLM's, and the client's inside them."""

from __future__ import annotations

import re

# vLLM's request id is ``[NUMBER_]CLIENT-HEX``: the index of a sample (for n > 1), the client's id,
# eight hexadecimal digits.  The client chooses the id, line breaks included.
_INTERNAL_ID = re.compile(r"(?:\d+_)?(.+)-[0-9a-f]{8}", re.DOTALL)
# vLLM appends the index of the prompt to the id of a completion.
_COMPLETION_ID = re.compile(r"(cmpl-.+)-\d+", re.DOTALL)


def client_name(identity: str) -> str:
    """Returns the client's id of a request, as in the answer.

    VLLM_DISABLE_REQUEST_ID_RANDOMIZATION makes the engine use the client's id. Then an id ending
    in a hyphen and eight hexadecimal digits is cut by mistake.
    """
    found = _INTERNAL_ID.fullmatch(identity)
    return answer_name(found[1] if found else identity)


def answer_name(identity: str) -> str:
    """Returns the id in the answer for a request id of vLLM's statistics.

    The answer to a completion of several prompts has a single id, so its requests have one name.
    """
    found = _COMPLETION_ID.fullmatch(identity)
    return found[1] if found else identity
