"""Captures graphs of a communicator's calls, and checks the results of replays."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from r2serve.bench.kernels.replay import capture_on_gpu
from r2serve.device import DeviceCommunicator

HAS_GPU = torch.cuda.is_available()


class Captured:
    """Captures the calls of a rank in a graph for repeated replay.

    ``beside``: another graph of the rank; both replay on the same stream, like other calls.
    """

    def __init__(
        self,
        communicator: DeviceCommunicator,
        driver: str,
        body: Any,
        beside: Captured | None = None,
    ) -> None:
        if HAS_GPU:
            graph = capture_on_gpu(communicator, body)
            self.replay, self.synchronise = graph.replay, graph.synchronise
            return
        cuda = ctypes.CDLL(driver)
        stream, graph_made, executable = (ctypes.c_void_p() for _ in range(3))
        if beside is not None:
            stream = beside.stream
        else:
            assert cuda.cuStreamCreate(ctypes.byref(stream), 0) == 0
        self.stream = stream
        communicator._stream = communicator._core._stream = lambda: stream.value
        assert cuda.cuStreamBeginCapture_v2(stream, 0) == 0
        body()
        assert cuda.cuStreamEndCapture(stream, ctypes.byref(graph_made)) == 0
        instantiate = cuda.cuGraphInstantiateWithFlags
        assert instantiate(ctypes.byref(executable), graph_made, ctypes.c_ulonglong(0)) == 0
        self.replay = lambda: cuda.cuGraphLaunch(executable, stream)
        self.synchronise = lambda: cuda.cuStreamSynchronize(stream)


class Looks:
    """Compares results on the device in every turn, and reads the outcome every 100 turns.

    Reading waits for the device, so reading in each turn would cost more than the turn.
    """

    EVERY = 100

    def __init__(self, device: torch.device) -> None:
        self._wrong = torch.zeros(self.EVERY, dtype=torch.bool, device=device)
        self._turns = 0

    def compare(self, got: torch.Tensor, expected: torch.Tensor) -> None:
        self._wrong[self._turns % self.EVERY] |= (got != expected).any()

    def end_turn(self) -> None:
        self._turns += 1
        if self._turns % self.EVERY == 0:
            self.look()

    def look(self) -> None:
        """Raises for wrong turns since the last call; also to be called after the last turn."""
        wrong = self._wrong.nonzero().flatten().tolist()
        first = (self._turns - 1) // self.EVERY * self.EVERY
        assert not wrong, f"wrong results in turns {[first + each for each in wrong]}"
