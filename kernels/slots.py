"""Peer slots inside kernels: their sum in rank order."""

from __future__ import annotations

import triton.language as tl

from r2serve.kernels.formats import widen
from r2serve.kernels.jit import jit


@jit
def sum_slots(
    first: tl.tensor,
    peer_stride: tl.tensor,
    offsets: tl.tensor,
    mask: tl.tensor,
    PEERS: tl.constexpr,
) -> tl.tensor:
    """Elements ``offsets`` of the slots at ``first + peer * peer_stride``, added in fp32.

    The sum starts from rank 0's slot, not from zero, which would turn its -0 into 0.
    """
    # Slots are read once, and other devices write them: .cg leaves them out of the L1 cache.
    total = widen(tl.load(first + offsets, mask=mask, other=0.0, cache_modifier=".cg"))
    slot = first
    for _ in tl.static_range(1, PEERS):
        slot += peer_stride  # a pointer, so that no 32-bit product can overflow
        total += widen(tl.load(slot + offsets, mask=mask, other=0.0, cache_modifier=".cg"))
    return total
