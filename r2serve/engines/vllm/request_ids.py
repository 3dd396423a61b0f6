"""Ids of requests: vLLM's, and the client's inside them."""

from __future__ import annotations

import re

# Beginnings of vLLM's ids. Ids of the Responses API have none if the client chooses them.
_KIND = (
    r"(?:cmpl|chatcmpl|generate-tokens|generative-scoring|decision|embd|classify|score|rerank|"
    r"pooling|transcribe|translate|rt)-"
)
# vLLM's request id is ``[NUMBER_]CLIENT-HEX``: the index of a sample (for n > 1), the client's id,
# eight hexadecimal digits.  The client chooses the id, line breaks included. A request of
# :class:`vllm.LLM` has a number as its id.
_INTERNAL_ID = re.compile(rf"(?:\d+_(?={_KIND}|\d+-[0-9a-f]{{8}}\Z))?(.+)-[0-9a-f]{{8}}", re.DOTALL)
# vLLM appends the index of the prompt to the id of a completion.
_COMPLETION_ID = re.compile(r"(cmpl-.*)-\d+", re.DOTALL)
# A beam search has a request for each beam and token: ``CLIENT-HEX-beam-NUMBER``.
_BEAM_ID = re.compile(r"((?:chat)?cmpl-.*)-[0-9a-f]{16,32}-beam-\d+", re.DOTALL)
# The Responses API has a request for each turn with its tools: ``CLIENT_NUMBER``.
_RESPONSE_ID = re.compile(rf"(?!{_KIND})(.+)_\d+", re.DOTALL)


def client_name(identity: str) -> str:
    """Returns the client's id of a request, as in the answer.

    VLLM_DISABLE_REQUEST_ID_RANDOMIZATION makes the engine use the client's id. Then an id ending
    in a hyphen and eight hexadecimal digits is cut by mistake.
    """
    found = _INTERNAL_ID.fullmatch(identity)
    return answer_name(found[1] if found else identity)


def answer_name(identity: str) -> str:
    """Returns the id in the answer for a request id of vLLM's statistics.

    The answer to a completion of several prompts has a single id, so its requests have one name, as
    have the requests of a beam search and the turns of a response. A chat's id that a client ends
    like a beam's is cut by mistake.
    """
    for pattern in (_BEAM_ID, _COMPLETION_ID, _RESPONSE_ID):
        if found := pattern.fullmatch(identity):
            return found[1]
    return identity
