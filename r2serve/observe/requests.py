"""Computes the cost of rail events per request from all request logs of a folder.

Requests are identified by their client-visible name. The stall time of a request is the union of
the stalls of this node's workers: simultaneous waits of two workers count once. A request that
arrives during a stalled step waits in the engine's queue. This queue time is computed after the
request has ended, from the arrival time (front end) and the scheduling time (workers). Memory is
bounded.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from r2serve.journal_folder import believed_users
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
from r2serve.observe.names import request_name
from r2serve.observe.request_log import PATTERN, Follower, RequestLogError

_LOG = logging.getLogger("r2serve.observe")

MAX_REQUESTS = 10_000
MAX_LOGS = 256
SCAN_S = 0.5
BYTES_A_LOOK = 256 * 1024
"""Read budget of a :meth:`Requests.look`; bounds the delay of other work on the same thread."""
MAX_HELD = 1024
"""Stalled steps kept per worker; requests queued during a stall are charged later."""


@dataclass(frozen=True)
class Ended:
    """An ended request with stalls, and the first worker to report the end.

    Each phase of a request is reported once.
    """

    worker: str
    label: str
    stall_s: dict[str, float]
    """Stall time by phase, s."""


class Requests:
    """Follows the request logs of a folder; not thread-safe.

    The lines of all logs are processed in timestamp order. Following the logs live and reading
    the logs afterwards therefore give the same result.
    """

    def __init__(
        self, folder: str | Path, *, max_requests: int = MAX_REQUESTS, engine: str = ""
    ) -> None:
        """engine: only logs of the serving engine of this name; empty = all logs."""
        self.folder = Path(folder)
        self._engine = engine
        self.unreadable: dict[str, str] = {}
        """Error per unreadable log, by file name."""
        self._max_requests = max_requests
        self._logs: dict[Path, _Reading] = {}
        self._read_to_end: dict[Path, int] = {}
        """Inodes of fully read logs whose writers have ended."""
        self._scanned_ns = 0
        self._requests: dict[str, TrackedRequest] = {}  # in order of first mention
        self._finished: deque[str] = deque()  # in order of their ends
        self._known = 0
        self._held: dict[str, deque[HeldStep]] = {}
        """Stalled steps by worker key, oldest first; at most MAX_LOGS workers."""

    def look(self) -> list[Ended]:
        """Processes new lines, about BYTES_A_LOOK bytes; returns ended requests with stalls."""
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
        # Last, because lines of other workers may add stalls to the same request.
        return [told for request in ended if (told := _told(request)) is not None]

    def __len__(self) -> int:
        return len(self._requests)

    def get(self, name: str) -> TrackedRequest | None:
        """Returns the request with this client-visible name, the id of its answer, else None."""
        return self._requests.get(request_name(name))

    def newest(
        self, *, before: int | None = None, limit: int, waited: bool = False
    ) -> list[TrackedRequest]:
        """Returns up to `limit` requests, newest first.

        before: only requests with a lower number. waited: only requests with stalls.
        """
        return list(islice(self._downwards(before, waited), limit))

    def about(self) -> dict[str, dict[str, str]]:
        """Returns ``model_name`` and ``engine`` of the followed worker logs, by worker key."""
        found = {}
        for reading in self._logs.values():
            said = reading.log.head.get("about")
            if reading.log.head.get("writer") == "worker" and isinstance(said, dict):
                found[_key(reading.log)] = {str(k): str(v) for k, v in said.items()}
        return found

    @property
    def followed(self) -> int:
        """Number of logs that may still grow."""
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
        """Opens new logs; closes deleted logs and fully read logs of ended writers."""
        found: dict[Path, tuple[float, int]] = {}
        try:
            owners = believed_users(self.folder)
        except PermissionError:
            owners = frozenset()  # the watch of the folder says so
        for path in self.folder.glob(PATTERN):
            try:
                status = path.stat()
            except OSError:
                continue  # deleted since the listing
            if status.st_uid not in owners:
                continue
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
                    self._logs[path] = _Reading(Follower(path, owners))
                except OSError as error:
                    self._give_up(path, str(error))
        for path, reading in self._logs.items():
            reading.look_at_writer(path, owners)

    def _leave(self, path: Path) -> None:
        self._logs.pop(path).log.close()

    def _give_up(self, path: Path, why: str) -> None:
        _LOG.warning("%s: request log no longer followed: %s; its requests are missing", path, why)
        self.unreadable[path.name] = why
        if path in self._logs:
            self._leave(path)

    def _fill(self, reading: _Reading) -> int:
        """Reads until at least 1 line is buffered or the log's end; returns the bytes read."""
        total = 0
        try:
            while not reading.lines:
                lines, count = reading.log.lines()
                if self._engine in ("", reading.log.head.get("serving_engine")):
                    reading.lines.extend(lines)
                total += count
                if not count:
                    break
        except (OSError, RequestLogError) as error:
            self._give_up(reading.log.path, str(error))
        return total

    def _take(self, reading: _Reading) -> TrackedRequest | None:
        """Processes the next line; returns the request if the line reports an end."""
        line = reading.lines.popleft()
        try:
            return self._taken(reading.log, line)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            reading.log.broken += 1
            if reading.log.broken == 1:
                _LOG.warning("%s: skipping malformed line: %r", reading.log.path, error)
        return None

    def _taken(self, log: Follower, line: dict[str, Any]) -> TrackedRequest | None:
        if "step" in line:
            self._take_step(log, line)
        elif "finished" in line:
            timings = _timings(log, line)
            request = self._ended(line["finished"])
            # A request with several answers (n > 1) ends with its slowest answer.
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
        return None  # line types of later versions are ignored

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
        # CLOCK_MONOTONIC, shared by all workers of a machine.
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
            return  # the log was rotated between the parts, so the stalled part is unknown
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
        self._held[held.worker] = kept  # most recent position: evicted last
        if len(self._held) > MAX_LOGS:
            del self._held[next(iter(self._held))]
        if kept and kept[-1].is_part_of(held):
            held = kept.pop().joined(held)
        kept.append(held)

    def _keeps_part_of(self, held: HeldStep) -> bool:
        kept = self._held.get(held.worker)
        return kept is not None and kept[-1].is_part_of(held)

    def _held_since(self, request: TrackedRequest) -> Iterator[HeldStep]:
        """Yields stalled steps of the request's workers that ended after its arrival."""
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
        key = request_name(name)
        request = self._requests.get(key)
        if request is None:
            self._known += 1
            request = self._requests[key] = TrackedRequest(key, self._known)
            if len(self._requests) > self._max_requests:
                self._forget_one()
        return request

    def _forget_one(self) -> None:
        """Evicts the request that ended first, or the oldest running request if none has ended."""
        while self._finished:
            if self._requests.pop(self._finished.popleft(), None) is not None:
                return
        del self._requests[next(iter(self._requests))]


class _Reading:
    """A log with its buffered, unprocessed lines."""

    def __init__(self, log: Follower) -> None:
        self.log = log
        self.lines: deque[dict[str, Any]] = deque()
        self.live = True

    @property
    def first_ns(self) -> int:
        """Time of the next line, CLOCK_REALTIME in ns; 0 = unknown."""
        line = self.lines[0]
        try:
            if "finished" in line:
                return int(line["ended_clock_ns"])
            return self.log.clock_ns(int(line["ended_ns" if "step" in line else "last_token_ns"]))
        except (KeyError, TypeError, ValueError, OverflowError):
            return 0

    def look_at_writer(self, path: Path, owners: Collection[int]) -> None:
        """Updates `live`. Called before the next read, so the read includes the last lines."""
        try:
            self.live = is_written(path, owners)
        except OSError:
            self.live = False


def _key(log: Follower) -> str:
    return log.path.name.removeprefix("r2ccl-").removesuffix(".requests")


def _late(line: dict[str, Any], waited: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the intervals by which a part of a step was late, CLOCK_MONOTONIC in ns.

    A single interval runs from the expected end to the actual end. The expected end is the start
    plus the baseline plus the run delay of the worker's thread. A stall is never shorter than in
    the journal. The stalls themselves are returned if no baseline is known, or if a stall ends
    after the part (a worker may finish a part before the GPU does).

    Lateness can begin before the first stall. A rail slows steps down before the `speed` event is
    recorded, and a worker also waits for peers that stalled earlier.
    """
    usual_ns = int(line.get("usual_ns", 0))
    began_ns, ended_ns = int(line["began_ns"]), int(line["ended_ns"])
    if usual_ns <= 0 or any(end > ended_ns for _, end in waited):
        return waited
    expected_ns = began_ns + usual_ns + int(line.get("delay_ns", 0))
    return [(min(expected_ns, ended_ns - Spans.of(waited).total_ns), ended_ns)]


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
        # Convert with the log's clocks, as for workers; a clock adjustment then has no effect.
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
