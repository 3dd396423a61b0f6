"""Going on with a matrix where a run was stopped: its JSON file is written after every setting."""

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
    """Adds every setting that is not ``done`` to ``result``, which is written after each of them.

    Settings that ``minutes`` leave no time to begin are listed in ``result.pending``.
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
    """The matrix as JSON: its options, and the settings that are measured by now."""
    return {
        "options": json.loads(json.dumps(asdict(options))),
        "done": [asdict(setting) for setting in done],
    }


def resume(
    path: Path, options: MatrixOptions, result: CollectivesReport, progress: Progress
) -> list[Setting]:
    """Takes the rows of ``path`` over into ``result``; returns the settings that they are of.

    None of it where there is no such file yet, or one of another commit. Raises OptionError for one
    that was measured with other options, or that is none of this benchmark's.
    """
    if not path.exists():
        return []
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["commit"] != result.metadata["commit"]:  # and perhaps of another form
            progress(f"{path} is of another commit, {found['commit']}: all anew")
            return []
        matrix = found["matrix"]
        done = [Setting(**setting) for setting in matrix["done"]]
        names = {field.name for field in fields(LatencyRow)}
        rows = [LatencyRow(**{name: row[name] for name in names}) for row in found["rows"]]
        skipped = [Skipped(entry["what"], entry["reason"]) for entry in found["skipped"]]
    except (ValueError, KeyError, TypeError) as error:
        raise OptionError(f"--resume: {path} has no matrix to go on with: {error!r}") from error
    wanted = describe(options, [])["options"]
    for name, value in wanted.items():
        if matrix["options"].get(name) != value:
            raise OptionError(
                f"--resume: {path} was measured with {name} {matrix['options'].get(name)}, "
                f"not {value}"
            )
    result.rows, result.skipped, result.matrix = rows, skipped, matrix
    return done
