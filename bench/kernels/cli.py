"""``r2serve bench kernels``: times the Triton kernels on a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.table import Table

from r2serve.bench.collectives import machine as host
from r2serve.bench.kernels import replay, runner, timing
from r2serve.bench.kernels.rows import KernelRow
from r2serve.config import Config

NO_DEVICE = 77  # exit status of a skipped test in common test drivers


@click.command(name="kernels")
@click.option(
    "--kernel",
    "names",
    multiple=True,
    type=click.Choice(list(runner.KERNELS)),
    help="Measure only this kernel; may be repeated.  [default: all]",
)
@click.option("--jsonl", "jsonl_path", type=click.Path(dir_okay=False, path_type=Path))
def kernels(names: tuple[str, ...], jsonl_path: Path | None) -> None:
    """Measure Triton kernels beside an empty kernel, a copy, PyTorch eager and torch.compile.

    Times are medians over replayed CUDA graphs. Without a GPU nothing is measured, and the exit
    status is 77.
    """
    if not torch.cuda.is_available():
        click.echo("no CUDA device here: the kernels were not measured", err=True)
        sys.exit(NO_DEVICE)
    device = torch.device("cuda", torch.cuda.current_device())
    progress = Console(stderr=True, log_path=False)
    timer = timing.GraphTimer()
    measured = runner.measure_machine(timer, device)
    progress.log(
        f"empty kernel {measured.empty_us:.2f} us, copy {measured.copy_bytes_per_us / 1e6:.2f} TB/s"
    )
    rows: list[KernelRow] = []
    for name in names or runner.KERNELS:
        for row in runner.run(runner.KERNELS[name](), timer, device, measured):
            progress.log(f"{row.kernel} {row.shape} x{row.peers}: {row.median_us:.2f} us")
            rows.append(row)
    show(rows, Console())
    replays: list[replay.ReplayRow] = []
    if not names:
        library = Config.from_env().cuda_library
        replays.append(replay.measure(library, device, replay.capture_on_gpu))
        for each in replays:
            click.echo(
                f"16 KiB all_reduce in a replayed graph: {each.replay_us:.1f} us; on the host: "
                f"{each.host_us:.1f} us; stall after a lost rail: {each.stall_p50_ms:.1f} ms (p99 "
                f"{each.stall_p99_ms:.1f} ms); next replays / replays on a single healthy rail: "
                f"{each.after_ratio:.2f}"
            )
    if jsonl_path is not None:
        metadata = {**host.describe(sys.argv[1:]), "gpu": torch.cuda.get_device_name(device)}
        runner.write_jsonl(jsonl_path, metadata, [*rows, *replays])


def show(rows: list[KernelRow], console: Console) -> None:
    table = Table(title="Kernels, medians in us", caption="target: value / least value to reach")
    for title in ("kernel", "shape", "dtype", "peers", "waits"):
        table.add_column(title)
    for title in ("kernel us", "empty", "moved", "eager", "compiled"):
        table.add_column(title, justify="right")
    table.add_column("targets")
    for row in rows:
        times = (row.median_us, row.empty_us, row.moved_us, row.eager_us, row.compiled_us)
        targets = (
            f"{one.name} {one.value:.2f}/{one.least:.2f}{'' if one.reached else ' missed'}"
            for one in row.targets
        )
        table.add_row(
            row.kernel,
            "x".join(map(str, row.shape)),
            row.dtype,
            str(row.peers),
            "yes" if row.waits else "no",
            *(f"{time:.2f}" for time in times),
            ", ".join(targets),
        )
    console.print(table)
