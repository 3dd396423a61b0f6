"""Client of the drill service in the workers of this node."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from r2serve.drills.order import ENGINE, DrillError, Order
from r2serve.drills.service import PATTERN, PEER_CREDENTIALS
from r2serve.faults import DATA_RAILS, canonical
from r2serve.journal_folder import believed_users

_TALK_S = 10.0
_LIST_S = 1.0


@dataclass(frozen=True)
class WorkerEnd:
    """A worker with a drill socket, and its rails of the requested name."""

    socket: Path
    rails: Sequence[dict[str, Any]]

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Sends a request; raises DrillError on refusal, OSError without an answer."""
        return ask(self.socket, request)


def ask(path: Path, request: dict[str, Any], timeout_s: float = _TALK_S) -> dict[str, Any]:
    """Sends a request to a worker and returns the answer.

    Raises:
        DrillError: the worker refuses; the text contains the reason.
        OSError: the worker does not answer.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as talk:
        talk.settimeout(timeout_s)
        talk.connect(str(path))
        _check_owner(talk, path)
        talk.sendall(json.dumps(request).encode() + b"\n")
        with talk.makefile("rb") as answers:
            line = answers.readline()
    if not line:
        raise ConnectionError(f"{path.name} closed the connection without an answer")
    answer: dict[str, Any] = json.loads(line)
    if "error" in answer:
        raise DrillError(str(answer["error"]))
    return answer


def sockets(folder: Path) -> list[Path]:
    """Returns the drill sockets in a folder; some workers may have ended."""
    return sorted(folder.glob(PATTERN))


def key_of(path: Path) -> str:
    """Returns the worker's key, ``<pid>-<engine>``, which journals and sidecar use as well."""
    return path.name.removeprefix("r2ccl-").removesuffix(".drills")


def find(folder: Path, rail: str) -> list[WorkerEnd]:
    """Returns the workers with an end of a rail.

    Raises:
        DrillError: no worker accepts drills, or no worker has the rail.
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
        raise DrillError(
            f"rail: {rail!r} is not a rail here; must be one of {', '.join(sorted(names))}"
        )
    why = f" ({'; '.join(silent)})" if silent else ""
    raise DrillError(
        f"drills: no running worker in {folder} accepts drills{why}; start the engine with "
        "R2CCL_DRILLS=on"
    )


def start(workers: Sequence[WorkerEnd], **fields: Any) -> list[dict[str, Any]]:
    """Starts a drill at all workers and returns their views.

    ``fields`` are the fields of an Order except ``id``. ``kind`` may be a deprecated name.

    Raises:
        DrillError: a worker refuses; the drill is undone at the other workers.
        OSError: a worker does not answer.
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
            with contextlib.suppress(DrillError, OSError):  # the drill has ended already
                worker.ask({"do": "end", "id": order.id})
        raise
    return views


def end(folder: Path, identity: str) -> int:
    """Ends a drill early; returns the number of workers with the drill.

    Raises:
        DrillError: the drill is not running at any worker.
    """
    ended, why = 0, DrillError(f"id: no drill {identity!r} is running")
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
    """Returns the number of answering workers, and their drills, running drills first.

    Each drill has the field ``worker`` with the worker's key.
    """
    answering, found = 0, []
    for path in sockets(folder):
        try:
            drills = ask(path, {"do": "list"}, _LIST_S)["drills"]
        except (DrillError, OSError):
            continue  # the worker has ended, and its drills, too
        answering += 1
        found += [drill | {"worker": key_of(path)} for drill in drills]
    found.sort(key=lambda drill: (drill["ended_clock_ns"] != 0, drill["began_clock_ns"]))
    return answering, found


def _check_owner(talk: socket.socket, path: Path) -> None:
    """Checks that the server runs as a user whose files in the folder are believed.

    Raises:
        DrillError: another user runs the server.
        PermissionError: the folder belongs to a stranger.
    """
    _, user, _ = PEER_CREDENTIALS.unpack(
        talk.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER_CREDENTIALS.size)
    )
    if user not in believed_users(path.parent):
        raise DrillError(
            f"refusing to use {path}: the server runs as uid {user}, not as this user, root or "
            "a believed owner of the folder"
        )
