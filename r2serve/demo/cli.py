"""`r2serve demo`."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from types import FrameType

import click
from rich.console import Console

from r2serve.demo.flow import Options, run_demo
from r2serve.demo.progress import Progress
from r2serve.demo.report import render

INTERRUPTED = 130
PLAIN_WIDTH = 160


def _interrupt(number: int, frame: FrameType | None) -> None:
    # Taking everything down takes moments; a second Ctrl-C must not cut that short.
    for other in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(other, signal.SIG_IGN)
    raise KeyboardInterrupt


@click.command(name="demo")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the report here.")
@click.option("--baseline", is_flag=True, help="Also show vLLM's stock communicator.")
@click.option(
    "--requests", type=click.IntRange(1, 64), default=8, show_default=True, help="Streams at once."
)
@click.option(
    "--tokens",
    type=click.IntRange(0, 16000),
    default=0,
    help="Tokens a request; 0: as many as the faults need.",
)
@click.option(
    "--keep-logs", type=click.Path(file_okay=False, path_type=Path), help="Copy the logs here."
)
@click.option(
    "--namespaces/--no-namespaces",
    default=True,
    help="Nodes in network namespaces, or both on this machine with faults inside the engine.",
)
def command(
    json_path: Path | None,
    baseline: bool,
    requests: int,
    tokens: int,
    keep_logs: Path | None,
    namespaces: bool,
) -> None:
    """Serve a tiny model over two nodes and take rails away while it decodes.

    Streams greedy requests undisturbed, then again while one rail loses its carrier and the other
    becomes a black hole. Exit status 0 only if no request was lost and every token is the same.
    """
    options = Options(
        requests=requests,
        tokens=tokens,
        baseline=baseline,
        namespaces=namespaces,
        keep_logs=keep_logs,
    )
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    # Without a terminal there is no width to fit into, and a wrapped table is hard to read.
    console = Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)
    try:
        report = run_demo(options, Progress(console))
    except KeyboardInterrupt:
        console.print("interrupted; everything that the demo made is gone")
        sys.exit(INTERRUPTED)
    render(report, console)
    if json_path is not None:
        json_path.write_text(json.dumps(report.to_json(), indent=2) + "\n", encoding="utf-8")
    sys.exit(0 if report.passed else 1)
