"""Starts the sidecar beside the engine, where the command line asks for it.

It is a process of its own session: what ends the engine does not end it, and the other way round.
It ends by itself a minute after the engine and the last worker have, and waits for its port as long
as one of the engine before may still have it.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

from r2serve.errors import ConfigError

_LOG = logging.getLogger(__name__)

VARIABLE = "R2SERVE_SIDECAR"
_started = False


def address(text: str) -> tuple[str, int]:
    """Host and port of ``[HOST:]PORT``.

    Raises:
        ConfigError: it is none.
    """
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"{VARIABLE} (--r2serve-sidecar) is {text!r}: must be [HOST:]PORT")
    return host.strip("[]") or "127.0.0.1", int(port)


def url() -> str | None:
    """Where the sidecar is that this engine was told to start."""
    given = os.environ.get(VARIABLE)
    if not given:
        return None
    host, port = address(given)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def start_once() -> None:
    """Start it, in the engine's first process alone; that none could be started is logged.

    Raises:
        ConfigError: its address is none.
    """
    global _started
    given = os.environ.get(VARIABLE)
    if not given or _started or multiprocessing.parent_process() is not None:
        return
    host, port = address(given)
    _started = True
    folder = os.environ.get("R2CCL_JOURNAL_DIR")
    if not folder:
        _LOG.warning("no sidecar: there are no journals (R2CCL_JOURNAL_DIR)")
        return
    words = ["sidecar", "--host", host, "--port", str(port), "--journal-dir", folder]
    words += ["--until", str(os.getpid())]
    try:
        log = _open_log(Path(folder) / "sidecar.log")
        with os.fdopen(log, "ab") as output:
            subprocess.Popen(
                [sys.executable, "-c", "from r2serve.cli import main; main()", *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
    except OSError as error:
        _LOG.warning("no sidecar: %s", error)
        return
    _LOG.info("sidecar: %s, its log: %s/sidecar.log", url(), folder)


def _open_log(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o600)
