"""Continues an interrupted run of the matrix; the JSON file is written after every setting."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from r2serve.bench.collectives import runner
from r2serve.bench.collectives.matrix import MatrixOptions, OptionError, Setting
from r2serve.bench.collectives.report import CollectivesReport
from r2serve.bench.collectives.runner import Progress, Skipped
from r2serve.bench.collectives.statistics import LatencyRow


def measure(
    options: MatrixOptions,
    result: CollectivesReport,
    done: Sequence[Setting],
    progress: Progress,
    json_path: Path | None = None,
    minutes: float | None = None,
) -> None:
    """Measures every setting outside ``done`` and adds the rows to ``result``.

    ``result`` is written to ``json_path`` after each setting. Settings not started within
    ``minutes`` are listed in ``result.pending``.
    """
    end = None if minutes is None else time.monotonic() + minutes * 60
    measured = list(done)
    for setting in options.settings():
        if setting in done:
            continue
        if end is not None and time.monotonic() > end:
            result.pending.append(setting.where)
            continue
        found = runner.Results()
        runner.measure(options, setting, found, progress)
        result.rows += found.rows
        result.skipped += found.skipped
        measured.append(setting)
        result.matrix = describe(options, measured)
        if json_path is not None:
            result.write_json(json_path)


def describe(options: MatrixOptions, done: Sequence[Setting]) -> dict[str, Any]:
    """Returns the matrix as JSON: the options, and the settings measured so far."""
    return {
        "options": json.loads(json.dumps(asdict(options))),
        "done": [asdict(setting) for setting in done],
    }


def resume(
    path: Path, options: MatrixOptions, result: CollectivesReport, progress: Progress
) -> list[Setting]:
    """Copies the rows of ``path`` into ``result``; returns the settings already measured.

    Returns an empty list when the file does not exist, or belongs to another commit. Raises
    OptionError when the file was measured with other options, or is not a file of this benchmark.
    """
    if not path.exists():
        return []
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["commit"] != result.metadata["commit"]:  # the format may differ as well
            progress(f"{path} is of another commit, {found['commit']}: measuring everything again")
            return []
        matrix = found["matrix"]
        done = [Setting(**setting) for setting in matrix["done"]]
        names = {field.name for field in fields(LatencyRow)}
        rows = [LatencyRow(**{name: row[name] for name in names}) for row in found["rows"]]
        skipped = [Skipped(entry["what"], entry["reason"]) for entry in found["skipped"]]
    except (ValueError, KeyError, TypeError) as error:
        raise OptionError(f"--resume: {path} has no matrix to continue: {error!r}") from error
    wanted = describe(options, [])["options"]
    for name, value in wanted.items():
        if matrix["options"].get(name) != value:
            raise OptionError(
                f"--resume: {path} was measured with {name} {matrix['options'].get(name)}, "
                f"not {value}"
            )
    result.rows, result.skipped, result.matrix = rows, skipped, matrix
    return done
