"""Graphs of a communicator's calls, on a GPU and with a driver that needs none."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from r2serve.device import DeviceCommunicator

HAS_GPU = torch.cuda.is_available()


class Captured:
    """What a rank put into a stream, to be done again and again."""

    def __init__(self, communicator: DeviceCommunicator, driver: str, body: Any) -> None:
        if HAS_GPU:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(
                graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
            ):
                body()
            self.replay = graph.replay
            self.synchronise = torch.cuda.current_stream().synchronize
            return
        cuda = ctypes.CDLL(driver)
        stream, graph_made, executable = (ctypes.c_void_p() for _ in range(3))
        assert cuda.cuStreamCreate(ctypes.byref(stream), 0) == 0
        communicator._core._stream = lambda: stream.value
        assert cuda.cuStreamBeginCapture_v2(stream, 0) == 0
        body()
        assert cuda.cuStreamEndCapture(stream, ctypes.byref(graph_made)) == 0
        instantiate = cuda.cuGraphInstantiateWithFlags
        assert instantiate(ctypes.byref(executable), graph_made, ctypes.c_ulonglong(0)) == 0
        self.replay = lambda: cuda.cuGraphLaunch(executable, stream)
        self.synchronise = lambda: cuda.cuStreamSynchronize(stream)
