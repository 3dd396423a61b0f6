"""The sum of peer slots in rank order, inside kernels."""

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
    """Adds elements ``offsets`` of the slots at ``first + peer * peer_stride``, in fp32.

    The sum starts from rank 0's slot, because a start from zero would turn -0 into 0.
    """
    # Slots are read once and written by other devices.  The modifier .cg bypasses the L1 cache.
    total = widen(tl.load(first + offsets, mask=mask, other=0.0, cache_modifier=".cg"))
    slot = first
    for _ in tl.static_range(1, PEERS):
        slot += peer_stride  # advancing a pointer avoids an overflow of a 32-bit product
        total += widen(tl.load(slot + offsets, mask=mask, other=0.0, cache_modifier=".cg"))
    return total
