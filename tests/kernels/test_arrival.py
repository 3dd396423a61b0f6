"""Kernels read the right ring entry after the arrival, and give up on abort."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import inputs
import pytest
import torch
from inputs import DEVICE, arrival, normal, own_stream, publish, same_bits, word

from r2serve.errors import InvalidArgumentError
from r2serve.kernels import arrival as arrivals
from r2serve.kernels.arrival import Arrival
from r2serve.kernels.quantize_chunks import quantize_chunks
from r2serve.kernels.reduce_add_rms_norm import reduce_add_rms_norm
from r2serve.kernels.reduce_add_rms_norm_fp8 import reduce_add_rms_norm_fp8
from r2serve.kernels.reduce_chunks import BLOCK, reduce_chunks
from r2serve.kernels.reduce_quantized_chunks import reduce_quantized_chunks

HIDDEN = 8
# Seconds.  If a kernel hangs, pytest-timeout ends the process, and later tests do not run.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]


@dataclass
class Call:
    """A kernel call over a number of programs, with a separate ring of slots and given outputs.

    expected: returns the expected outputs for a ring entry.
    """

    slots: torch.Tensor
    outputs: list[torch.Tensor]
    run: Callable[[Arrival], object]
    expected: Callable[[int], list[torch.Tensor]]

    def poison(self) -> list[torch.Tensor]:
        for output in self.outputs:
            output.view(torch.uint8).fill_(0x55)
        return [output.clone() for output in self.outputs]


def chunks(ring: int, programs: int) -> Call:
    slots = normal((ring, 2, programs * BLOCK - 5), torch.bfloat16)
    out = torch.empty(slots.shape[2:], dtype=slots.dtype, device=DEVICE)
    return Call(
        slots,
        [out],
        lambda given: reduce_chunks(slots, out=out, arrival=given),
        lambda entry: [reduce_chunks(slots[entry : entry + 1])],
    )


def norm(ring: int, programs: int) -> Call:
    slots = normal((ring, 2, programs, HIDDEN), torch.bfloat16)
    residual, weight = normal((programs, HIDDEN), torch.bfloat16, 1), torch.ones(HIDDEN).to(DEVICE)
    out, residual_out = torch.empty_like(residual), torch.empty_like(residual)
    return Call(
        slots,
        [out, residual_out],
        lambda given: reduce_add_rms_norm(
            slots, residual, weight, 1e-5, out=out, residual_out=residual_out, arrival=given
        ),
        lambda entry: list(reduce_add_rms_norm(slots[entry : entry + 1], residual, weight, 1e-5)),
    )


def norm_fp8(ring: int, programs: int) -> Call:
    slots = normal((ring, 2, programs, HIDDEN), torch.bfloat16)
    residual, weight = normal((programs, HIDDEN), torch.bfloat16, 1), torch.ones(HIDDEN).to(DEVICE)
    out = torch.empty(residual.shape, dtype=torch.float8_e4m3fn, device=DEVICE)
    scales = torch.empty(programs, 1, device=DEVICE)
    residual_out = torch.empty_like(residual)
    return Call(
        slots,
        [out, scales, residual_out],
        lambda given: reduce_add_rms_norm_fp8(
            slots,
            residual,
            weight,
            1e-5,
            out=out,
            scales_out=scales,
            residual_out=residual_out,
            arrival=given,
        ),
        lambda entry: list(
            reduce_add_rms_norm_fp8(slots[entry : entry + 1], residual, weight, 1e-5)
        ),
    )


def quantised(ring: int, programs: int) -> Call:
    count = programs * 1024 - 5
    made = [quantize_chunks(normal((count,), torch.float32, seed)) for seed in range(2 * ring)]
    slots = torch.stack([codes for codes, _ in made]).view(ring, 2, count)
    scales = torch.stack([scales for _, scales in made]).view(ring, 2, -1)
    out = torch.empty(count, dtype=torch.float16, device=DEVICE)
    return Call(
        slots,
        [out],
        lambda given: reduce_quantized_chunks(slots, scales, torch.float16, out=out, arrival=given),
        lambda entry: [
            reduce_quantized_chunks(
                slots[entry : entry + 1], scales[entry : entry + 1], torch.float16
            )
        ],
    )


KERNELS = {"chunks": chunks, "norm": norm, "norm_fp8": norm_fp8, "quantised": quantised}
# Tests lower the limit between small and large grids to FEW, because the interpreter is slow.
LIMIT = arrivals.WAITING_PROGRAMS
FEW, MANY = 2, 3


@pytest.fixture(autouse=True)
def _few_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "WAITING_PROGRAMS", FEW)


def all_same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(same_bits(one, other) for one, other in zip(left, right, strict=True))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("sequence", [0, 1, 7, 2**31 - 1, 2**31, 2**32 - 1])
def test_the_collective_number_selects_the_ring_entry(kernel: str, sequence: int) -> None:
    call = KERNELS[kernel](4, FEW)
    call.poison()
    call.run(arrival(sequence, arrived=sequence))
    assert all_same(call.outputs, call.expected(sequence % 4))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_large_grid_runs_behind_one_program_that_waits(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[Arrival] = []
    wait = arrivals.wait_for_arrival
    monkeypatch.setattr(
        arrivals, "wait_for_arrival", lambda given: (waited.append(given), wait(given))
    )
    few, many = KERNELS[kernel](2, FEW), KERNELS[kernel](2, MANY)
    here = arrival(3, arrived=3)
    few.run(here)
    assert waited == []
    assert all_same(few.outputs, few.expected(1))
    many.run(here)
    assert waited == [here]
    assert all_same(many.outputs, many.expected(1))


def test_sixty_four_programs_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LIMIT == 64
    monkeypatch.setattr(arrivals, "WAITING_PROGRAMS", LIMIT)
    here = arrival(0, 0)
    assert arrivals.waiting(here, 64)[3:] == (None, 1)
    assert arrivals.waiting(here, 65)[3:] == (here.gave_up, 2)
    assert arrivals.waiting(None, 65) == (None, None, None, None, 0)


@pytest.mark.parametrize(
    ("sequence", "arrived"), [(5, 5), (5, 6), (2**31, 2**31 + 2), (2**32 - 1, 0), (2**32 - 2, 3)]
)
def test_a_kernel_does_not_wait_for_an_arrived_collective(sequence: int, arrived: int) -> None:
    call = chunks(2, 1)
    call.run(arrival(sequence, arrived))
    assert all_same(call.outputs, call.expected(sequence % 2))


def settle() -> None:
    """Waits for all streams of the device."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


class Later:
    """Runs an action in another thread, like the proxy thread, while a kernel waits."""

    def __init__(self, action: Callable[[], object], after_s: float = 0.05) -> None:
        self.done_at = 0.0

        def act() -> None:
            time.sleep(after_s)
            self.done_at = time.monotonic()
            action()

        self.thread = threading.Thread(target=act)

    def __enter__(self) -> Later:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.thread.join()
        settle()


@pytest.mark.parametrize("programs", [FEW, MANY])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("sequence", "arrived"), [(9, 8), (2**31, 2**31 - 1), (0, 2**32 - 1), (2, 2**32 - 3)]
)
def test_a_kernel_waits_for_a_collective_still_to_arrive(
    kernel: str, programs: int, sequence: int, arrived: int
) -> None:
    call = KERNELS[kernel](2, programs)
    here = arrival(sequence, arrived)
    settle()  # waits for the inputs, made in the default stream
    with Later(lambda: publish(here.arrived, sequence)) as later:
        with own_stream():
            call.run(here)
        assert later.done_at > 0
    assert all_same(call.outputs, call.expected(sequence % 2))


@pytest.mark.parametrize("programs", [FEW, MANY])
@pytest.mark.parametrize("kernel", KERNELS)
def test_an_abort_during_the_wait_leaves_outputs_unchanged(kernel: str, programs: int) -> None:
    call = KERNELS[kernel](2, programs)
    before = call.poison()
    here = arrival(1, arrived=0)
    settle()
    with Later(lambda: publish(here.abort, 1)), own_stream():
        call.run(here)
    assert all_same(call.outputs, before)


@pytest.mark.parametrize("programs", [FEW, MANY])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("abort", [1, -1])
def test_an_abort_stays_in_effect_for_later_kernels(kernel: str, programs: int, abort: int) -> None:
    call = KERNELS[kernel](2, programs)
    before = call.poison()
    here = arrival(1, arrived=1, abort=abort)
    call.run(here)
    assert all_same(call.outputs, before)


def test_a_large_grid_ignores_the_decision_of_an_earlier_grid() -> None:
    call = chunks(2, MANY)
    call.run(arrival(1, arrived=1, abort=1))
    here = arrival(1, arrived=1)
    here.gave_up.fill_(1)  # a possible leftover of an earlier use
    call.run(here)
    assert all_same(call.outputs, call.expected(1))


@pytest.mark.parametrize("programs", [FEW, MANY])
def test_slots_are_read_only_after_publication(programs: int) -> None:
    """Slots are written in pieces, and the number after all pieces: no sum mixes two rounds."""
    call = chunks(2, programs)
    sequence, rounds = word(2**32 - 3), 6 if programs == FEW else 2
    here = Arrival(sequence, word(2**32 - 4, mapped=True), word(0, mapped=True))
    consumed = threading.Semaphore(1)

    def fill_and_publish() -> None:
        for number in range(2**32 - 3, 2**32 - 3 + rounds):
            if not consumed.acquire(timeout=300):
                return  # no reader is left: the test has failed
            with own_stream():
                for peer in range(2):
                    for piece in call.slots[number % 2, peer].chunk(3):
                        time.sleep(0.01)
                        piece.fill_(float(number % 100))
            publish(here.arrived, number)

    settle()
    with Later(fill_and_publish, after_s=0.0):
        for number in range(2**32 - 3, 2**32 - 3 + rounds):
            with own_stream():
                call.run(here)
                total = call.outputs[0].float().unique().tolist()
                sequence.add_(1)  # wraps around like the device's counter
            consumed.release()
            assert total == [2.0 * (number % 100)]


def test_publishing_needs_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy by the device would wait for the kernel, and the kernel for the word: a deadlock."""
    here = arrival(2**32 - 1, arrived=0)
    monkeypatch.setattr(inputs, "DEVICE", torch.device("meta"))  # copies from "meta" fail
    with pytest.raises(NotImplementedError):
        here.arrived.copy_(word(2**32 - 1))
    publish(here.arrived, 2**32 - 1)
    assert here.arrived.tolist() == [-1]


def test_the_waiting_program_records_an_abort() -> None:
    for abort in (0, 1):
        here = arrival(4, arrived=4, abort=abort)
        arrivals.wait_for_arrival(here)
        assert here.gave_up.item() == abort


WRONG = {
    "dtype": (
        lambda: Arrival(word(0).long(), word(0), word(0)),
        r"sequence: \(1,\) of torch.int64; it must be one int32",
    ),
    "size": (
        lambda: Arrival(word(0), torch.zeros(2, dtype=torch.int32), word(0)),
        r"arrived: \(2,\) of torch.int32; it must be one int32",
    ),
    "place": (
        lambda: Arrival(word(0), word(0), torch.zeros(1, dtype=torch.int32, device="meta")),
        "abort: is on meta, not pinned; it must be on",
    ),
    "ring": (
        lambda: reduce_chunks(torch.zeros(3, 2, 8, device=DEVICE), arrival=arrival(0, 0)),
        r"slots: shape \(3, 2, 8\) has a ring of 3; it must be a power of two",
    ),
    "no ring": (
        lambda: reduce_chunks(torch.zeros(0, 2, 8, device=DEVICE), arrival=arrival(0, 0)),
        "has a ring of 0; it must be a power of two",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused(name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises(InvalidArgumentError, match=message):
        call()
