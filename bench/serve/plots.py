"""Pictures of runs. Needs the extra ``[bench]``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from r2serve.bench.serve.contenders import CONTENDERS
from r2serve.bench.serve.impact import AGREE_MS, AGREE_PART
from r2serve.bench.serve.store import TokenTimes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]

DPI = 110
LEAST_MS = 0.1


def draw(
    rows: Sequence[Row], times_of: Callable[[Row], TokenTimes | None], folder: Path
) -> dict[str, Path]:
    """Writes all pictures with data; returns the paths by title."""
    pictures: dict[str, Path] = {}
    able = [row for row in rows if "not_run" not in row]
    for scenario in dict.fromkeys(row["scenario"] for row in able):
        here = [row for row in able if row["scenario"] == scenario]
        seen = [(row, times) for row in here if row["pair"] == 0 and (times := times_of(row))]
        name = _file_name(scenario)
        if seen:
            title = f"{scenario}: time between tokens, measured by clients"
            pictures[title] = _save(timeline(seen), folder / f"serve-{name}-timeline.png")
        title = f"{scenario}: distribution of latencies over requests"
        pictures[title] = _save(distributions(here), folder / f"serve-{name}-cdf.png")
    impacts = {
        row["scenario"]: row["impact"]["requests"]
        for row in able
        if row.get("impact", {}).get("requests")
    }
    if impacts:
        title = "delay of requests by rail events: the sidecar's figure and the clients' figure"
        pictures[title] = _save(agreement(impacts), folder / "serve-impact.png")
    return pictures


def timeline(seen: Sequence[tuple[Row, TokenTimes]]) -> Figure:
    """Draws a strip per contender with a dot per token; the time of a fault is shaded."""
    figure, strips = _subplots(len(seen), 1, (11, 1.1 + 1.7 * len(seen)), sharex=True, sharey=True)
    for axes, (row, times) in zip(strips, seen, strict=True):
        points = [
            (after / 1e3, max(after - before, LEAST_MS))
            for sent, arrivals in times.requests
            for before, after in zip((sent, *arrivals), arrivals, strict=False)
        ]
        end_s = max((at_s for at_s, _ in points), default=0.0)
        axes.scatter(
            [at_s for at_s, _ in points],
            [gap_ms for _, gap_ms in points],
            s=3,
            color=_color(row["contender"]),
            linewidths=0,
        )
        for fault in row["faults"]:
            healed = fault["healed_at_s"]
            until_s = end_s if healed is None else healed
            axes.axvspan(fault["at_s"], until_s, color="0.88", zorder=0)  # behind the dots
        lost = row["requests"]["failed"]
        axes.set(yscale="log", ylabel="ms")
        axes.set_title(
            f"{row['contender']}" + (f": {lost} requests lost" if lost else ""),
            loc="left",
            fontsize="medium",
        )
        axes.grid(alpha=0.3)
    strips[-1].set_xlabel("s since the first request; grey: duration of the fault")
    return figure


def distributions(rows: Sequence[Row]) -> Figure:
    """Draws TTFT and TPOT: the percentage of all requests with at most the given time."""
    figure, pair = _subplots(1, 2, (11, 4))
    for axes, name, title in zip(
        pair, ("ttft_ms", "tpot_ms"), ("time to first token", "mean time per token"), strict=True
    ):
        for contender in dict.fromkeys(row["contender"] for row in rows):
            mine = [row for row in rows if row["contender"] == contender]
            values = sorted(value for row in mine for value in row["samples"][name])
            asked = sum(row["requests"]["sent"] + row["requests"]["never_sent"] for row in mine)
            part = [100 * (index + 1) / asked for index in range(len(values))]
            axes.step(values, part, where="post", label=contender, color=_color(contender))
        axes.set(title=title, xscale="log", xlabel="ms", ylim=(0, 101))
        axes.grid(alpha=0.3, which="both")
    pair[0].set_ylabel("% of the requests")
    pair[0].legend()
    return figure


def agreement(impacts: Mapping[str, Sequence[Mapping[str, float]]]) -> Figure:
    """Draws a dot per request; between the lines, both figures agree to 5 ms or 5 %."""
    figure, (axes,) = _subplots(1, 1, (6, 5.5))
    largest = 10.0
    for scenario, requests in impacts.items():
        sidecar = [each["sidecar_ms"] for each in requests]
        client = [each["client_ms"] for each in requests]
        largest = max(largest, *sidecar, *client)
        axes.scatter(sidecar, client, s=16, alpha=0.7, label=scenario)
    ends = [LEAST_MS * 1.2**step for step in range(120) if LEAST_MS * 1.2**step <= 2 * largest]
    for sign in (-1, 1):
        line = [at + sign * max(AGREE_MS, AGREE_PART * at) for at in ends]
        axes.plot(ends, line, color="0.5", linewidth=0.8)
    axes.set_xscale("symlog", linthresh=10)
    axes.set_yscale("symlog", linthresh=10)
    axes.set(xlabel="delay by the sidecar, ms", ylabel="delay by the client, ms")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return figure


def _subplots(
    rows: int, columns: int, size: tuple[float, float], **options: Any
) -> tuple[Figure, list[Axes]]:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        rows, columns, figsize=size, squeeze=False, layout="constrained", **options
    )
    return figure, list(axes.flat)


def _save(figure: Figure, path: Path) -> Path:
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)
    pyplot.close(figure)
    return path


def _color(contender: str) -> str:
    known = list(CONTENDERS)
    return f"C{known.index(contender) if contender in known else len(known)}"


def _file_name(scenario: str) -> str:
    return "".join(each if each.isalnum() else "-" for each in scenario)
