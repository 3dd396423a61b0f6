"""Asks the workers of this node for drills."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from r2serve.drills.order import ENGINE, DrillError, Order
from r2serve.drills.service import PATTERN, PEER_CREDENTIALS
from r2serve.faults import DATA_RAILS, canonical

_TALK_S = 5.0
_LIST_S = 1.0


@dataclass(frozen=True)
class WorkerEnd:
    """A worker that takes drills, and those of its rails that have the name that was asked for."""

    socket: Path
    rails: Sequence[dict[str, Any]]

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Raises DrillError where it refuses, OSError where it does not answer."""
        return ask(self.socket, request)


def ask(path: Path, request: dict[str, Any], timeout_s: float = _TALK_S) -> dict[str, Any]:
    """One request of one worker.

    Raises:
        DrillError: it refuses, and says why.
        OSError: it does not answer.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as talk:
        talk.settimeout(timeout_s)
        talk.connect(str(path))
        _check_owner(talk, path)
        talk.sendall(json.dumps(request).encode() + b"\n")
        with talk.makefile("rb") as answers:
            line = answers.readline()
    if not line:
        raise ConnectionError(f"{path.name} ended without an answer")
    answer: dict[str, Any] = json.loads(line)
    if "error" in answer:
        raise DrillError(str(answer["error"]))
    return answer


def sockets(folder: Path) -> list[Path]:
    """Of the workers of a folder that take drills; some may have ended."""
    return sorted(folder.glob(PATTERN))


def key_of(path: Path) -> str:
    """The key of the worker whose socket that is, as in other answers about it."""
    return path.name.removeprefix("r2ccl-").removesuffix(".drills")


def find(folder: Path, rail: str) -> list[WorkerEnd]:
    """The workers that have an end of that rail.

    Raises:
        DrillError: no worker takes drills, or none has such a rail.
    """
    found, names, silent = [], set(), []
    for path in sockets(folder):
        try:
            rails = ask(path, {"do": "rails"})["rails"]
        except OSError as error:
            silent.append(f"{path.name}: {error}")
            continue
        ends = [one for one in rails if one["name"] == rail and one["kind"] in DATA_RAILS]
        names |= {one["name"] for one in rails if one["kind"] in DATA_RAILS}
        if ends:
            found.append(WorkerEnd(path, ends))
    if found:
        return found
    if names:
        raise DrillError(f"rail: no worker here has {rail!r}; there are {', '.join(sorted(names))}")
    why = f" ({'; '.join(silent)})" if silent else ""
    raise DrillError(
        f"drills: no running worker in {folder} takes any{why}; set drills (R2CCL_DRILLS=on) where "
        "the engine is started"
    )


def start(workers: Sequence[WorkerEnd], **fields: Any) -> list[dict[str, Any]]:
    """Start one drill at all of them; fields: of an Order, but for its id.  Returns their views.

    ``kind`` may be a word of an earlier release.

    Raises:
        DrillError: one refuses; then none has it.
        OSError: one does not answer.
    """
    fields["kind"] = canonical(fields["kind"])
    order = Order(**({"id": secrets.token_hex(4), "by": ENGINE} | fields))
    started: list[WorkerEnd] = []
    views = []
    try:
        for worker in workers:
            views.append(worker.ask({"do": "start"} | asdict(order))["drill"])
            started.append(worker)
    except BaseException:
        for worker in started:
            worker.ask({"do": "end", "id": order.id})
        raise
    return views


def end(folder: Path, identity: str) -> int:
    """End a drill before its time; returns at how many workers.

    Raises:
        DrillError: no worker has it under way.
    """
    ended, why = 0, DrillError(f"id: there is no drill {identity!r} under way")
    for path in sockets(folder):
        try:
            ask(path, {"do": "end", "id": identity})
            ended += 1
        except (DrillError, OSError):
            continue
    if not ended:
        raise why
    return ended


def listed(folder: Path) -> tuple[int, list[dict[str, Any]]]:
    """How many workers take drills, and their drills, each with the worker's key: those under way
    first."""
    answering, found = 0, []
    for path in sockets(folder):
        try:
            drills = ask(path, {"do": "list"}, _LIST_S)["drills"]
        except (DrillError, OSError):
            continue  # it has ended, and its drills with it
        answering += 1
        found += [drill | {"worker": key_of(path)} for drill in drills]
    found.sort(key=lambda drill: (drill["ended_clock_ns"] != 0, drill["began_clock_ns"]))
    return answering, found


def _check_owner(talk: socket.socket, path: Path) -> None:
    """Who listens is whoever the folder belongs to, or root, or whoever asks."""
    _, user, _ = PEER_CREDENTIALS.unpack(
        talk.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER_CREDENTIALS.size)
    )
    if user not in (0, os.geteuid(), path.parent.stat().st_uid):
        raise DrillError(f"{path} is served by user {user}, who is a stranger")
