"""When the slots of a collective may be read, and which entry of their ring they are.

Slots are a ring in device memory: collective number ``s`` lies in entry ``s % ring``.  The number
is read from device memory at run time, so a captured CUDA graph finds the right entry at every
replay.  Numbers are unsigned 32-bit counters that wrap, held in int32 tensors; they are compared
by the sign of their wrapped difference, and ``ring`` is a power of two, so that nothing happens
at the wrap.

Who writes what:

* ``sequence``: the stream, before the kernel (``arrival.sequence.add_(1)`` may be captured);
* ``arrived``: the proxy thread, with release order, once every chunk of a collective is visible
  to the device: behind GPUDirect that needs a flush of its writes first;
* ``abort``: anyone, once; it is never taken back.

A waiting program holds its place on the device, so only few may wait: a grid of up to
``WAITING_PROGRAMS`` waits itself, and a larger one runs after one program that waited for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton.language as tl

from r2serve.errors import InvalidArgumentError
from r2serve.kernels.jit import INTERPRETED, jit

# Fewer than the multiprocessors of the GPUs that this is for (A100: 108, H200: 132), so that what
# they wait for, a kernel that sends included, always finds free ones.
WAITING_PROGRAMS = 64

# How a kernel learns that its slots are complete.
AT_ONCE = tl.constexpr(0)  # they are: there is no arrival
BY_ITSELF = tl.constexpr(1)  # every program polls
BEFORE = tl.constexpr(2)  # wait_for_arrival ran before it

_ARRIVED = tl.constexpr(1)
_ABORTED = tl.constexpr(2)

Waiting = tuple[
    torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, int
]


@dataclass(frozen=True, eq=False)
class Arrival:
    """What a kernel waits for: three int32 tensors of one element.

    ``sequence`` is in device memory: the number of the collective to consume.  ``arrived`` and
    ``abort`` are in mapped pinned host memory (or on the device): the number of the last collective
    of which all chunks have arrived, and non-zero to give up.  Raises InvalidArgumentError.

    A kernel that finds ``abort`` set returns without touching its outputs.  Programs of one grid
    look at different times: when a collective is aborted just as it arrives, some rows may be
    written and others not, so outputs are void once ``abort`` is set.
    """

    sequence: torch.Tensor
    arrived: torch.Tensor
    abort: torch.Tensor
    # Device memory: what the waiting program decided, for the grid that runs after it.
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
    """One look at both words: 0 or a sum of _ARRIVED and _ABORTED, the same in every thread.

    Thread 0 reads ``arrived`` and thread 1 ``abort``: host memory is a microsecond away, and the
    other threads would only load the bus.  The sum carries the answer to them through a barrier,
    so that all leave the loop together, and with it the order of thread 0's acquire.

    An atomic addition of 0 would be shorter, but on most machines PCIe does not make a device's
    read-modify-write of host memory atomic: it could put an old number over the proxy's new one.
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
    """Wait until the collective has arrived or is given up; true unless it is.

    ``THREADS`` is the number of threads of the program: one element of a tensor for each.
    """
    wanted = tl.load(sequence).to(tl.int64)
    found = _poll(wanted, arrived, abort, THREADS)
    while found == 0:
        found = _poll(wanted, arrived, abort, THREADS)
    tl.debug_barrier()  # no thread reads slots before thread 0's acquire, even in a single warp
    return found < _ABORTED


@jit
def ring_offset(
    sequence: tl.tensor, ring_stride: tl.tensor, RING: tl.constexpr, WAIT: tl.constexpr
) -> tl.tensor:
    """Elements from the first entry of the ring to the one to read."""
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
    """Hold the stream until the collective has arrived or is aborted: one program of one warp.

    Leaves in ``arrival.gave_up`` whether it is aborted.  Kernels with many programs launch it
    themselves.
    """
    _wait_kernel[(1,)](
        arrival.sequence, arrival.arrived, arrival.abort, arrival.gave_up, num_warps=1
    )


def waiting(arrival: Arrival | None, programs: int) -> Waiting:
    """How a grid of ``programs`` waits: a kernel's sequence, arrived, abort, gave_up and WAIT.

    Launches the waiting program where the grid may not wait itself.
    """
    if arrival is None:
        return None, None, None, None, 0
    if programs <= WAITING_PROGRAMS:
        return arrival.sequence, arrival.arrived, arrival.abort, None, 1
    wait_for_arrival(arrival)
    return arrival.sequence, None, None, arrival.gave_up, 2
