"""Arrival of a collective's slots: kernels wait for the slots and find the ring entry.

Slots form a ring in device memory: collective number ``s`` uses entry ``s % ring``.  Kernels read
the number from device memory at run time, so a captured CUDA graph finds the right entry at every
replay.  Numbers are unsigned 32-bit counters in int32 tensors, and wrap around.  Kernels compare
numbers by the sign of the wrapped difference.  ``ring`` is a power of two, so the entry stays
correct when the counter wraps.

Writers of the words:

* ``sequence``: the stream, before the kernel (``arrival.sequence.add_(1)`` may be captured);
* ``arrived``: the proxy thread, with release order, when every chunk of a collective is visible to
  the device; with GPUDirect, a flush of the NIC's writes comes first;
* ``abort``: any thread, once; the word is never reset.

A waiting program occupies the device, so few programs may wait.  A grid of up to
``WAITING_PROGRAMS`` programs waits in every program.  A larger grid runs after a separate waiting
program.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton.language as tl

from r2serve.errors import InvalidArgumentError
from r2serve.kernels.jit import INTERPRETED, jit

# Must be lower than the number of multiprocessors of supported GPUs (A100: 108, H200: 132).  Other
# kernels, such as a kernel that sends, then always find a free multiprocessor.
WAITING_PROGRAMS = 64

# How a kernel waits for complete slots.
AT_ONCE = tl.constexpr(0)  # no wait: the slots are complete
BY_ITSELF = tl.constexpr(1)  # every program polls
BEFORE = tl.constexpr(2)  # wait_for_arrival runs before the kernel

_ARRIVED = tl.constexpr(1)
_ABORTED = tl.constexpr(2)

Waiting = tuple[
    torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, int
]


@dataclass(frozen=True, eq=False)
class Arrival:
    """The words read by a waiting kernel: three int32 tensors with a single element each.

    ``sequence`` is in device memory: the number of the collective to consume.  ``arrived`` and
    ``abort`` are in mapped pinned host memory (or on the device).  ``arrived`` is the number of the
    last collective with all chunks arrived.  A non-zero ``abort`` makes kernels give up.  Raises
    InvalidArgumentError.

    A kernel returns without writing the outputs if ``abort`` is set.  Programs of a grid read the
    words at different times.  If an abort and the arrival coincide, some rows may be written and
    others not.  Outputs are therefore invalid once ``abort`` is set.
    """

    sequence: torch.Tensor
    arrived: torch.Tensor
    abort: torch.Tensor
    # Device memory: decision of the waiting program, read by the grid after the program.
    gave_up: torch.Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        device = self.sequence.device
        for name in ("sequence", "arrived", "abort"):
            tensor = getattr(self, name)
            if tensor.dtype != torch.int32 or tensor.numel() != 1:
                raise InvalidArgumentError(
                    f"{name}: {tuple(tensor.shape)} of {tensor.dtype}; it must be one int32"
                )
            mapped = tensor.device.type == "cpu" and tensor.is_pinned()
            if tensor.device != device and not mapped:
                raise InvalidArgumentError(
                    f"{name}: is on {tensor.device}, not pinned; it must be on {device} or in "
                    "pinned host memory"
                )
        object.__setattr__(self, "gave_up", torch.zeros(1, dtype=torch.int32, device=device))


@jit
def _poll(
    wanted: tl.tensor, arrived: tl.tensor, abort: tl.tensor, THREADS: tl.constexpr
) -> tl.tensor:
    """Reads both words once; returns 0 or a sum of _ARRIVED and _ABORTED, equal in every thread.

    Thread 0 reads ``arrived``, and thread 1 reads ``abort``.  A read of host memory takes about
    1 us; reads by the other threads would only load the bus.  The sum carries the result to all
    threads through a barrier.  All threads therefore leave the loop together, ordered after the
    acquire of thread 0.

    An atomic addition of 0 would be shorter, but unsafe: on most machines, PCIe does not make a
    device's read-modify-write of host memory atomic.  The addition could overwrite a new number of
    the proxy thread with an old number.
    """
    thread = tl.arange(0, THREADS)
    if INTERPRETED:
        word = tl.where(thread == 0, tl.load(arrived), tl.load(abort))
    else:
        word = tl.inline_asm_elementwise(
            """{
            .reg .pred reads;
            setp.lt.s32 reads, $2, 2;
            mov.b32 $0, 0;
            @reads ld.acquire.sys.global.b32 $0, [$1];
            }""",
            "=&r,l,r",
            [tl.where(thread == 0, arrived.to(tl.int64), abort.to(tl.int64)), thread],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    ahead = (word.to(tl.int64) - wanted).to(tl.int32)
    has_arrived = (thread == 0) & (ahead >= 0)
    is_aborted = (thread == 1) & (word != 0)
    found = tl.where(has_arrived, _ARRIVED, 0) + tl.where(is_aborted, _ABORTED, 0)
    return tl.sum(found, axis=0)


@jit
def await_arrival(
    sequence: tl.tensor, arrived: tl.tensor, abort: tl.tensor, THREADS: tl.constexpr
) -> tl.tensor:
    """Waits for the arrival or abort of the collective; returns false for an abort.

    ``THREADS`` is the number of threads of the program: a tensor has an element for each thread.
    """
    wanted = tl.load(sequence).to(tl.int64)
    found = _poll(wanted, arrived, abort, THREADS)
    while found == 0:
        found = _poll(wanted, arrived, abort, THREADS)
    tl.debug_barrier()  # no thread reads slots before the acquire of thread 0, even in a warp
    return found < _ABORTED


@jit
def ring_offset(
    sequence: tl.tensor, ring_stride: tl.tensor, RING: tl.constexpr, WAIT: tl.constexpr
) -> tl.tensor:
    """Returns the offset of the collective's ring entry, in elements."""
    if WAIT == AT_ONCE:
        return 0
    else:
        return (tl.load(sequence) & (RING - 1)).to(tl.int64) * ring_stride


@jit
def _wait_kernel(
    sequence: tl.tensor, arrived: tl.tensor, abort: tl.tensor, gave_up: tl.tensor
) -> None:
    has_arrived = await_arrival(sequence, arrived, abort, 32)
    tl.store(gave_up, tl.where(has_arrived, 0, 1))


def wait_for_arrival(arrival: Arrival) -> None:
    """Blocks the stream until the arrival or abort of the collective, by a program of 1 warp.

    Writes 1 into ``arrival.gave_up`` for an abort, else 0.  Wrappers of kernels with many programs
    call this function.
    """
    _wait_kernel[(1,)](
        arrival.sequence, arrival.arrived, arrival.abort, arrival.gave_up, num_warps=1
    )


def waiting(arrival: Arrival | None, programs: int) -> Waiting:
    """Returns a kernel's arguments sequence, arrived, abort, gave_up and WAIT.

    Launches the waiting program if a grid of ``programs`` programs is too large to wait.
    """
    if arrival is None:
        return None, None, None, None, 0
    if programs <= WAITING_PROGRAMS:
        return arrival.sequence, arrival.arrived, arrival.abort, None, 1
    wait_for_arrival(arrival)
    return arrival.sequence, None, None, arrival.gave_up, 2
