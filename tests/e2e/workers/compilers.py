"""A rank with compile pools of torch and vLLM beside its collectives."""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor

import torch
from forks import ME, RANKS, exact
from parent import ARGUMENTS, hear, say
from torch._inductor import config as inductor
from torch._inductor.async_compile import AsyncCompile, shutdown_compile_workers
from torch._inductor.utils import fresh_cache
from vllm.utils.platform_utils import cuda_get_device_properties

from r2serve import Communicator


class Properties:
    """Stands for the properties of a GPU."""

    total_memory = 80


def pools(communicator: Communicator) -> None:
    """Compile pools of torch, of either kind, and vLLM's forked query live during collectives."""
    for method in ("fork", "subprocess"):
        inductor.worker_start_method, inductor.compile_threads = method, 2
        pool = AsyncCompile.process_pool()
        jobs = [pool.submit(math.factorial, number) for number in range(32)]
        exact(communicator, 100)
        assert [job.result() for job in jobs] == [math.factorial(number) for number in range(32)]
        shutdown_compile_workers()
    exact(communicator, 100)
    torch.cuda.get_device_properties = lambda _: Properties  # type: ignore[assignment]
    for _ in range(4):
        assert cuda_get_device_properties(0, ["total_memory"]) == (Properties.total_memory,)
        exact(communicator, 100)
    say("exact")


def curve(data: torch.Tensor) -> torch.Tensor:
    return torch.sin(data) * 2 + data


def compiled(communicator: Communicator) -> None:
    """torch.compile runs its compiler, once by threads and once alone, during collectives."""
    for threads in (1, 2):
        inductor.compile_threads = threads
        torch.compiler.reset()
        data = torch.linspace(0, 1, 4096)
        with ThreadPoolExecutor(1) as executor, fresh_cache():
            job = executor.submit(torch.compile(curve), data)
            calls = 0
            while True:
                exact(communicator, 100)
                calls += 100
                ended = communicator.all_reduce(torch.tensor([float(job.done())]))
                if int(ended) == RANKS:
                    break
            assert torch.allclose(job.result(), curve(data))
        say({"threads": threads, "calls": calls})
    say("exact")


def main() -> None:
    communicator = Communicator.standalone(ARGUMENTS["host"], ARGUMENTS["port"], ME, RANKS)
    exact(communicator, 50)
    say("ready")
    hear()
    works = (pools, compiled)
    next(work for work in works if work.__name__ == ARGUMENTS["work"])(communicator)
    communicator.close()
    os._exit(0)


if __name__ == "__main__":
    main()
