"""Tensors for kernel tests: random numbers, hard numbers, and the device of the tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from r2serve.kernels.arrival import Arrival
from r2serve.kernels.jit import INTERPRETED
from r2serve.kernels.reference import bits

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)

# Hard numbers as bit patterns, by dtype: zeros, denormals, 1 and the neighbours of 1, the largest
# number, infinity, and NaNs with sign and payload, including signalling NaNs.
HARD_BITS = {
    torch.float16: (
        *(0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x3C00, 0x3C01, 0xBC00, 0x1000),
        *(0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0xFE01, 0x7C01, 0x4C01, 0x2C00),
    ),
    torch.bfloat16: (
        *(0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x0080, 0x3F80, 0x3F81, 0xBF80, 0x3B80),
        *(0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F81, 0x4001, 0x3C00),
    ),
    torch.float32: (
        *(0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x3F800000),
        *(0x3F800001, 0xBF800000, 0x33800000, 0x33800001, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000),
        *(0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001, 0x4B000001),
    ),
}


def from_bits(patterns: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    whole = torch.tensor(patterns, dtype=torch.int64)
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    return whole.to(integer).view(dtype).to(DEVICE)


def hard_pairs(dtype: torch.dtype) -> torch.Tensor:
    """Returns two peers' slots, (2, pairs); the elements form every pair of hard numbers."""
    hard = from_bits(HARD_BITS[dtype], dtype)
    return torch.stack([hard.repeat_interleave(len(hard)), hard.repeat(len(hard))])


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Returns uniformly random bit patterns, including NaN and denormals."""
    integer = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    information = torch.iinfo(integer)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(
        information.min, information.max + 1, shape, generator=generator, dtype=torch.int64
    )
    return drawn.to(integer).view(dtype).to(DEVICE)


def normal(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and torch.equal(bits(left), bits(right))
    )


def word(value: int, mapped: bool = False) -> torch.Tensor:
    """Returns an int32 tensor with an unsigned 32-bit number, in device or mapped host memory."""
    wrapped = (value + 2**31) % 2**32 - 2**31
    made = torch.tensor([wrapped], dtype=torch.int32)
    if DEVICE.type == "cpu":
        return made
    return made.pin_memory() if mapped else made.to(DEVICE)


def publish(arrived: torch.Tensor, number: int) -> None:
    """Writes a mapped word from the host, without a device operation.

    A copy by the device would queue behind the kernel, and the kernel waits for this word.
    """
    arrived[0] = (number + 2**31) % 2**32 - 2**31


@contextmanager
def own_stream() -> Iterator[None]:
    """Runs the block in a separate stream, and synchronises the stream at the end."""
    if DEVICE.type == "cpu":
        yield
        return
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def arrival(sequence: int, arrived: int, abort: int = 0) -> Arrival:
    return Arrival(word(sequence), word(arrived, mapped=True), word(abort, mapped=True))
