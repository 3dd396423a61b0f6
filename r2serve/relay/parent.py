"""The relay of a node as seen by its parent, which starts one a node, before the engine listens."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from r2serve import errors
from r2serve.errors import ConfigError, PeerLostError, R2cclError, StartupTimeoutError
from r2serve.forks import close_in_children
from r2serve.relay.lines import NoRelayError

END_S = 10.0
"""Wait for a relay that was told to end; the other nodes hear of the end meanwhile."""

Failure = R2cclError | ConfigError
_CONFIG_ERRORS: tuple[type[ConfigError], ...] = (NoRelayError, ConfigError)
"""Errors of the configuration that a parent tells apart; a subclass comes before its base."""

_LOG = logging.getLogger("r2serve.relay")


def command(
    node: int,
    nodes: int,
    master: str,
    port: int,
    timeout_s: float | None = None,
    *,
    others_may_end: bool = False,
) -> list[str]:
    """Returns the command of a relay.

    Args:
        master: addresses of node 0 between commas.
        timeout_s: wait for the other nodes; None: the default of the command.
        others_may_end: the relay goes on after another node has ended in good order.
    """
    program = [sys.executable, "-c", "from r2serve.cli import main; main()"]
    place = ["--node", str(node), "--nodes", str(nodes)]
    wait = [] if timeout_s is None else ["--timeout-s", f"{timeout_s:g}"]
    ends = ["--others-may-end"] if others_may_end else []
    return [*program, "relay", *place, "--master", master, "--port", str(port), *wait, *ends]


class RelayProcess:
    """A running relay. It ends with this process, and its own end is told once."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        """Starts the relay, in a session of its own: signals of a terminal go to the parent."""
        self._process = subprocess.Popen(
            list(argv),
            env=None if env is None else dict(env),
            bufsize=0,  # a buffer would have a lock, and a forked child closes the pipes
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        close_in_children(self)
        self._changed = threading.Condition()
        self._ready: dict[str, Any] | None = None
        self._error: Failure | None = None
        self._closing = False
        self._on_end: Callable[[Failure], None] | None = None
        threading.Thread(target=self._read, name="relay-parent", daemon=True).start()

    def wait_ready(self, timeout_s: float) -> None:
        """Waits until connections can begin.

        Raises:
            R2cclError, ConfigError: the relay failed; the class is the class of its own error.
            StartupTimeoutError: the relay is not ready after ``timeout_s`` seconds.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._error, timeout_s)
            if self._error is not None:
                raise self._error
            if self._ready is None:
                raise StartupTimeoutError(f"the relay is not ready after {timeout_s:g} s")

    @property
    def address(self) -> str:
        """Virtual address of this node; after :meth:`wait_ready`."""
        return str(self._known()["address"])

    @property
    def prefix(self) -> str:
        """Address prefix of the job, ``127.x.y.0``; after :meth:`wait_ready`."""
        return str(self._known()["prefix"])

    @property
    def node(self) -> int:
        """Number of this node; after :meth:`wait_ready`."""
        return int(self._known()["node"])

    def address_of(self, node: int) -> str:
        """Returns the virtual address of a node."""
        return f"{self.prefix.removesuffix('.0')}.{node + 1}"

    def on_end(self, call: Callable[[Failure], None]) -> None:
        """Calls ``call`` once, in a thread, when the relay ends without :meth:`close`.

        The connections of the job are lost then, so the caller ends the job.
        """
        with self._changed:
            self._on_end = call
            error = self._error
        if error is not None:
            call(error)

    def fails(self, within_s: float) -> bool:
        """Whether the relay has failed, or fails within ``within_s`` seconds."""
        with self._changed:
            return bool(self._changed.wait_for(lambda: self._error is not None, within_s))

    def started(self) -> None:
        """Tells the relay that the engine has started: new listeners are rare from now on."""
        self._tell(b"up\n")

    def close(self, within_s: float = END_S) -> None:
        """Ends the relay, after the last bytes of this node; the other nodes hear of the end.

        Args:
            within_s: limit in seconds; the relay is killed then.
        """
        with self._changed:
            self._closing = True
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            _LOG.debug("the relay has ended already")
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            _LOG.warning("the relay did not end within %g s and is killed", within_s)
            self._process.kill()
            self._process.wait()

    def left_behind(self) -> None:
        """Closes the pipes in a forked child: only the parent's end of a pipe keeps the relay."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _known(self) -> dict[str, Any]:
        if self._ready is None:
            raise R2cclError("the relay is not ready: call wait_ready() first")
        return self._ready

    def _tell(self, line: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
        except BrokenPipeError:
            _LOG.debug("the relay has ended already")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                said = json.loads(line)
            except ValueError:  # a preloaded library may print, too
                _LOG.warning("the relay printed: %r", line)
                continue
            if "failed" in said:
                self._failed(_typed(str(said.get("error")), str(said["failed"])))
            else:
                with self._changed:
                    self._ready = said
                    self._changed.notify_all()
        status = self._process.wait()
        lost = f"the relay of this node ended with status {status}"
        self._failed(PeerLostError(f"{lost}: the connections between the nodes are lost"))

    def _failed(self, error: Failure) -> None:
        """Tells the first error only: a relay names its reason, and then resets connections."""
        with self._changed:
            if self._closing or self._error is not None:
                return
            self._error = error
            self._changed.notify_all()
            call = self._on_end
        if call is not None:
            call(error)


def kind_of(error: Failure) -> type[Failure]:
    """Returns the class that a relay names to its parent."""
    kinds = (kind for kind in _CONFIG_ERRORS if isinstance(error, kind))
    return next(kinds, type(error))


def _typed(name: str, text: str) -> Failure:
    """Returns the error named by a relay."""
    known: dict[str, type[Failure]] = {kind.__name__: kind for kind in _CONFIG_ERRORS}
    known |= {kind.__name__: kind for kind in errors.ERROR_TYPES.values()}
    return known.get(name, R2cclError)(text)
