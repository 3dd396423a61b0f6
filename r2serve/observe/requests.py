"""What rail events cost each request: the request logs of a folder, joined.

A request is known by the name that its client has of it.  What it waited is the union of the
stalls of all workers here: two that waited for one another at the same time are one wait.  One that
arrives while a step is held up waits for it in the engine's queue; that is known once it has ended,
of its arrival from the front end, and of when it was begun with from the workers.  Memory is
bounded.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from r2serve.observe.files import is_written
from r2serve.observe.impact import (
    DECODE,
    PREFILL,
    QUEUE,
    HeldStep,
    Pace,
    Spans,
    Stall,
    Timings,
    TrackedRequest,
)
from r2serve.observe.request_log import LONGEST_NAME, PATTERN, Follower, RequestLogError

_LOG = logging.getLogger("r2serve.observe")

MAX_REQUESTS = 10_000
MAX_LOGS = 256
SCAN_S = 0.5
BYTES_A_LOOK = 256 * 1024
"""Who catches up with old logs holds up whoever shares the thread for no longer than that takes."""
MAX_HELD = 1024
"""Of the steps of a worker that were held up, so many are kept, for requests queued meanwhile."""


@dataclass(frozen=True)
class Ended:
    """A request that ended having waited, with the worker that said so first; told once a phase."""

    worker: str
    label: str
    stall_s: dict[str, float]
    """By phase."""


class Requests:
    """Follows the request logs of a folder; for one thread.

    Lines of all logs are taken in the order of their times, so that it makes no difference whether
    they were followed as they were written or are read afterwards.
    """

    def __init__(self, folder: str | Path, *, max_requests: int = MAX_REQUESTS) -> None:
        self.folder = Path(folder)
        self.unreadable: dict[str, str] = {}
        """Why, of logs that cannot be read, by file name."""
        self._max_requests = max_requests
        self._logs: dict[Path, _Reading] = {}
        self._read_to_end: dict[Path, int] = {}
        """Logs of writers that have ended: their inodes."""
        self._scanned_ns = 0
        self._requests: dict[str, TrackedRequest] = {}  # in the order in which they became known
        self._finished: deque[str] = deque()  # in the order in which they ended
        self._known = 0
        self._held: dict[str, deque[HeldStep]] = {}
        """By the worker's key, as they came; of as many workers as there may be logs."""

    def look(self) -> list[Ended]:
        """Read what is new, of so many bytes at most; returns requests that ended having waited."""
        now_ns = time.monotonic_ns()
        if now_ns - self._scanned_ns >= SCAN_S * 1e9:
            self._scanned_ns = now_ns
            self._scan()
        budget = BYTES_A_LOOK
        for reading in list(self._logs.values()):
            budget -= self._fill(reading)
        due = [(one.first_ns, str(path)) for path, one in self._logs.items() if one.lines]
        heapify(due)
        ended: list[TrackedRequest] = []
        while due and budget > 0:
            _, name = heappop(due)
            reading = self._logs[Path(name)]
            if (request := self._take(reading)) is not None:
                ended.append(request)
            budget -= self._fill(reading)
            if reading.lines:
                heappush(due, (reading.first_ns, name))
        # Not before all was taken: other workers may have held it up longer.
        return [told for request in ended if (told := _told(request)) is not None]

    def __len__(self) -> int:
        return len(self._requests)

    def get(self, name: str) -> TrackedRequest | None:
        """By the name that its client has of it, or by what the engine's answer has as its id."""
        exact = self._requests.get(name)
        if exact is not None:
            return exact
        # vLLM numbers the prompts of a completion: "cmpl-1" has the requests "cmpl-1-0" and so on.
        return self._requests.get(f"{name}-0")

    def newest(
        self, *, before: int | None = None, limit: int, waited: bool = False
    ) -> list[TrackedRequest]:
        """Those that became known last, newest first; with numbers below `before`."""
        return list(islice(self._downwards(before, waited), limit))

    def about(self) -> dict[str, dict[str, str]]:
        """What workers that run serve: ``model_name`` and ``engine``, by the worker's key."""
        found = {}
        for reading in self._logs.values():
            said = reading.log.head.get("about")
            if reading.log.head.get("writer") == "worker" and isinstance(said, dict):
                found[_key(reading.log)] = {str(k): str(v) for k, v in said.items()}
        return found

    @property
    def followed(self) -> int:
        """Logs that may still have something new."""
        return len(self._logs)

    def close(self) -> None:
        for reading in self._logs.values():
            reading.log.close()
        self._logs.clear()

    def _downwards(self, before: int | None, waited: bool) -> Iterator[TrackedRequest]:
        for request in reversed(self._requests.values()):
            if (before is None or request.number < before) and (request.waited or not waited):
                yield request

    def _scan(self) -> None:
        """Finds logs that came, and leaves those that went or will not grow."""
        found: dict[Path, tuple[float, int]] = {}
        for path in self.folder.glob(PATTERN):
            try:
                status = path.stat()
            except OSError:
                continue  # it went just now
            found[path] = status.st_mtime, status.st_ino
        newest = sorted(found, key=lambda path: found[path], reverse=True)[:MAX_LOGS]
        for path, reading in list(self._logs.items()):
            if path not in found:
                self._leave(path)
            elif reading.log.at_end and not reading.lines and not reading.live:
                self._read_to_end[path] = found[path][1]
                self._leave(path)
        self._read_to_end = {
            path: inode for path, inode in self._read_to_end.items() if path in found
        }
        self.unreadable = {
            name: why for name, why in self.unreadable.items() if self.folder / name in found
        }
        for path in newest:
            known = path in self._logs or path.name in self.unreadable
            if not known and self._read_to_end.get(path) != found[path][1]:
                try:
                    self._logs[path] = _Reading(Follower(path))
                except OSError as error:
                    self._give_up(path, str(error))
        for path, reading in self._logs.items():
            reading.look_at_writer(path)

    def _leave(self, path: Path) -> None:
        self._logs.pop(path).log.close()

    def _give_up(self, path: Path, why: str) -> None:
        _LOG.warning("%s is not read any more: %s", path, why)
        self.unreadable[path.name] = why
        if path in self._logs:
            self._leave(path)

    def _fill(self, reading: _Reading) -> int:
        """See to it that the log's next line is there, if it has one; returns bytes read."""
        total = 0
        try:
            while not reading.lines:
                lines, count = reading.log.lines()
                reading.lines.extend(lines)
                total += count
                if not count:
                    break
        except (OSError, RequestLogError) as error:
            self._give_up(reading.log.path, str(error))
        return total

    def _take(self, reading: _Reading) -> TrackedRequest | None:
        """The request that the line says has ended."""
        line = reading.lines.popleft()
        try:
            return self._taken(reading.log, line)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            reading.log.broken += 1
            if reading.log.broken == 1:
                _LOG.warning("%s has a line that says nothing: %r", reading.log.path, error)
        return None

    def _taken(self, log: Follower, line: dict[str, Any]) -> TrackedRequest | None:
        if "step" in line:
            self._take_step(log, line)
        elif "finished" in line:
            timings = _timings(log, line)
            request = self._ended(line["finished"])
            # Of several answers to one request, the last one.
            request.timings = max(timings, request.timings or timings, key=_e2e)
            request.hold_queued(self._held_since(request))
            return request
        elif "request" in line:
            pace = _pace(log, line)
            request = self._ended(line["request"])
            request.pace = max(pace, request.pace or pace, key=_worst_gap)
            worker = _key(log)
            request.ended_at = request.ended_at or (worker, str(log.head["label"]))
            known_ns = request.scheduled.get(worker, pace.scheduled_clock_ns)
            request.scheduled[worker] = min(known_ns, pace.scheduled_clock_ns)
            request.hold_queued(self._held_since(request))
            return request
        return None  # also of what a later version may have

    def _take_step(self, log: Follower, line: dict[str, Any]) -> None:
        stalls = tuple(
            Stall(
                collective=str(stall["collective"]),
                group=str(stall["group"]),
                call=int(stall["call"]),
                began_clock_ns=log.clock_ns(int(stall["ended_ns"]) - int(stall["ns"])),
                ns=int(stall["ns"]),
            )
            for stall in line["stalls"]
        )
        # By the clock that all workers of a machine share.
        waited = [
            (int(stall["ended_ns"]) - int(stall["ns"]), int(stall["ended_ns"]))
            for stall in line["stalls"]
        ]
        late = _late(line, waited)
        held = HeldStep(
            worker=_key(log),
            label=str(log.head["label"]),
            step=int(line["step"]),
            phase=QUEUE,
            began_clock_ns=log.clock_ns(int(line["began_ns"])),
            ended_clock_ns=log.clock_ns(int(line["ended_ns"])),
            stalls=stalls,
            late_clock_ns=tuple((log.clock_ns(begin), log.clock_ns(end)) for begin, end in late),
        )
        if not stalls and not self._keeps_part_of(held):
            return  # the log was turned over between the parts of a step
        self._keep(held)
        for phase in (PREFILL, DECODE):
            for name in dict.fromkeys(line[phase]):
                request = self._request(name)
                request.hold(replace(held, phase=phase))
                for charged, intervals in ((request.waited, waited), (request.late, late)):
                    spans = charged.setdefault(phase, Spans())
                    for interval in intervals:
                        spans.add(*interval)

    def _keep(self, held: HeldStep) -> None:
        kept = self._held.pop(held.worker, None) or deque(maxlen=MAX_HELD)
        self._held[held.worker] = kept  # now the last one to be forgotten
        if len(self._held) > MAX_LOGS:
            del self._held[next(iter(self._held))]
        if kept and kept[-1].is_part_of(held):
            held = kept.pop().joined(held)
        kept.append(held)

    def _keeps_part_of(self, held: HeldStep) -> bool:
        kept = self._held.get(held.worker)
        return kept is not None and kept[-1].is_part_of(held)

    def _held_since(self, request: TrackedRequest) -> Iterator[HeldStep]:
        """Steps of its workers that were held up and ended after it had arrived."""
        if request.timings is not None:
            arrived_ns = request.timings.arrived_clock_ns
            for worker in request.scheduled:
                steps = reversed(self._held.get(worker, deque()))
                yield from takewhile(lambda step: step.ended_clock_ns > arrived_ns, steps)

    def _ended(self, name: object) -> TrackedRequest:
        request = self._request(name)
        if not request.finished:
            self._finished.append(request.name)
        return request

    def _request(self, name: object) -> TrackedRequest:
        key = str(name)[:LONGEST_NAME]
        request = self._requests.get(key)
        if request is None:
            self._known += 1
            request = self._requests[key] = TrackedRequest(key, self._known)
            if len(self._requests) > self._max_requests:
                self._forget_one()
        return request

    def _forget_one(self) -> None:
        """The one that ended first; of those that run the oldest."""
        while self._finished:
            if self._requests.pop(self._finished.popleft(), None) is not None:
                return
        del self._requests[next(iter(self._requests))]


class _Reading:
    """A log, and those of its lines that were read and not taken yet."""

    def __init__(self, log: Follower) -> None:
        self.log = log
        self.lines: deque[dict[str, Any]] = deque()
        self.live = True

    @property
    def first_ns(self) -> int:
        """When the next line was written, CLOCK_REALTIME; 0: at an unknown time."""
        line = self.lines[0]
        try:
            if "finished" in line:
                return int(line["ended_clock_ns"])
            return self.log.clock_ns(int(line["ended_ns" if "step" in line else "last_token_ns"]))
        except (KeyError, TypeError, ValueError, OverflowError):
            return 0

    def look_at_writer(self, path: Path) -> None:
        """Whether it lives; asked before what it wrote last is read."""
        try:
            self.live = is_written(path)
        except OSError:
            self.live = False


def _key(log: Follower) -> str:
    return log.path.name.removeprefix("r2ccl-").removesuffix(".requests")


def _late(line: dict[str, Any], waited: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """From when a part of a step usually would have been over until it was; where that is unknown,
    what it waited.

    Not from the first wait on: a rail that turns slow holds steps up before that is an event, and
    workers wait for one another, also for one that was held up sooner than they were themselves.
    A step of a device may be over for its worker before it is for the device: then it is unknown,
    too.
    """
    usual_ns = int(line.get("usual_ns", 0))
    began_ns, ended_ns = int(line["began_ns"]), int(line["ended_ns"])
    if usual_ns <= 0 or any(end > ended_ns for _, end in waited):
        return waited
    return [(min(began_ns + usual_ns, ended_ns - Spans.of(waited).total_ns), ended_ns)]


def _told(request: TrackedRequest) -> Ended | None:
    phases = request.waited.keys() - request.told
    if request.ended_at is None or not phases:
        return None
    request.told |= phases
    worker, label = request.ended_at
    return Ended(worker, label, {phase: request.stall_s(phase) for phase in phases})


def _pace(log: Follower, line: dict[str, Any]) -> Pace:
    return Pace(
        scheduled_clock_ns=log.clock_ns(int(line["scheduled_ns"])),
        first_token_clock_ns=log.clock_ns(int(line["first_token_ns"])),
        last_token_clock_ns=log.clock_ns(int(line["last_token_ns"])),
        tokens=int(line["tokens"]),
        worst_gap_s=int(line["worst_gap_ns"]) / 1e9,
        worst_gap_ended_clock_ns=log.clock_ns(int(line["worst_gap_ended_ns"])),
    )


def _e2e(timings: Timings) -> float:
    return timings.e2e_s


def _worst_gap(pace: Pace) -> float:
    return pace.worst_gap_s


def _timings(log: Follower, line: dict[str, Any]) -> Timings:
    ended_ns = int(line["ended_clock_ns"])
    if "ended_ns" in line:
        # As what workers say: a clock that was set meanwhile makes no difference.
        ended_ns = log.clock_ns(int(line["ended_ns"]))
    return Timings(
        reason=str(line["reason"]),
        prompt_tokens=int(line["prompt_tokens"]),
        tokens=int(line["tokens"]),
        queued_s=float(line["queued_s"]),
        prefill_s=float(line["prefill_s"]),
        decode_s=float(line["decode_s"]),
        e2e_s=float(line["e2e_s"]),
        arrived_clock_ns=ended_ns - int(line["e2e_s"] * 1e9),
        ended_clock_ns=ended_ns,
    )
