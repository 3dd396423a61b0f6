"""What was measured, in files: a row a run, and beside it when each token came."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r2serve.lab.serving.client import Run

Row = dict[str, Any]


@dataclass(frozen=True)
class TokenTimes:
    """Of each request that was sent: when, and when each of its tokens came; in ms of the run."""

    requests: tuple[tuple[float, tuple[float, ...]], ...]

    @classmethod
    def of(cls, run: Run) -> TokenTimes:
        """The run's clock is 0 at its first request."""
        sent = [request for request in run.requests if request.sent_ns]
        begun_ns = min((request.sent_ns for request in sent), default=0)

        def ms(time_ns: int) -> float:
            return round((time_ns - begun_ns) / 1e6, 3)

        return cls(tuple((ms(r.sent_ns), tuple(map(ms, r.times_ns))) for r in sent))


class Rows:
    """Rows of a run, in a file where there is one: a line each, written as soon as it is known.

    What the file has of the same commit, key and label is not measured again; its other rows stay
    until newer ones of the same label, scenario and contender take their place.

    label: what is measured, where a file has several things. folder: where the times go, None:
    nowhere. Raises ValueError where the file is none of rows.
    """

    def __init__(
        self,
        path: Path | None,
        metadata: Mapping[str, Any],
        *,
        label: str = "",
        folder: Path | None = None,
    ) -> None:
        self._path = path
        self._folder = folder
        self._common = {
            "label": label,
            "commit": metadata["commit"],
            "date": metadata["date"],
            "command": metadata["command"],
            "machine": metadata["machine"],
        }
        self._all = [] if path is None else read(path)

    def find(self, key: str, scenario: str, contender: str, pair: int) -> Row | None:
        """The row of a run that was measured; what could not run then is tried again."""
        names = ("commit", "label", "key", "scenario", "contender", "pair")
        wanted = [self._common["commit"], self._common["label"], key, scenario, contender, pair]
        for row in reversed(self._all):
            if [row[name] for name in names] == wanted and "not_run" not in row:
                return row if self._folder is None or self._place(row).exists() else None
        return None

    def add(self, row: Mapping[str, Any], times: TokenTimes | None = None) -> Row:
        """Keeps a row, which has ``key``, ``scenario``, ``contender`` and ``pair``."""
        whole = {**row, **self._common}
        self._all.append(whole)
        if self._folder is not None and times is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._place(whole).write_text(json.dumps(times.requests) + "\n", encoding="utf-8")
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(whole) + "\n")
        return whole

    def times(self, row: Mapping[str, Any]) -> TokenTimes | None:
        """Of a run; None where they are not kept."""
        if self._folder is None or not self._place(row).exists():
            return None
        kept = json.loads(self._place(row).read_text(encoding="utf-8"))
        return TokenTimes(tuple((sent, tuple(times)) for sent, times in kept))

    def _place(self, row: Mapping[str, Any]) -> Path:
        assert self._folder is not None
        name = "-".join(
            str(row[part]).replace("/", "_")
            for part in ("label", "scenario", "contender", "pair", "key")
        )
        return self._folder / f"{name}.json"

    def tidy(self, rows: Sequence[Row]) -> list[Row]:
        """Keeps what is newest in the file; returns what is kept there besides ``rows``."""
        self._all = latest(self._all)
        if self._path is not None:
            fresh = self._path.with_name(self._path.name + ".new")
            fresh.write_text("".join(json.dumps(r) + "\n" for r in self._all), encoding="utf-8")
            fresh.replace(self._path)
        mine = {_name(row) for row in rows}
        return [row for row in self._all if _name(row) not in mine]


def read(path: Path) -> list[Row]:
    """The rows of a file; none where it is not there. Raises ValueError, naming file and line."""
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            missing = {"key", "commit", "label", "contender", "scenario", "pair"} - set(row)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: line {number} is no row: {error}") from error
        if missing:
            raise ValueError(f"{path}: line {number} is no row: {', '.join(sorted(missing))}?")
        rows.append(row)
    return rows


def latest(rows: Sequence[Row]) -> list[Row]:
    """Of each label, scenario and contender the rows of the key and commit that came last."""
    last = {_about(row): (row["key"], row["commit"]) for row in rows}
    kept = {_name(row): row for row in rows if last[_about(row)] == (row["key"], row["commit"])}
    return list(kept.values())


def _about(row: Row) -> tuple[str, str, str]:
    return row["label"], row["scenario"], row["contender"]


def _name(row: Row) -> tuple[str, str, str, int]:
    return (*_about(row), row["pair"])
