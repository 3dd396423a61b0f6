"""Start of the sidecar beside the engine, on request of the command line.

The sidecar runs in a separate session, so engine and sidecar do not end each other. The sidecar
exits a minute after the end of the engine and the last worker. At start the sidecar waits for its
port while a previous engine's sidecar may still hold the port.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

from r2serve.errors import ConfigError
from r2serve.observe.files import SIDECAR_LOG
from r2serve.observe.port_owner import is_taken, owner_of

_LOG = logging.getLogger(__name__)

VARIABLE = "R2SERVE_SIDECAR"
_started = False


def address(text: str) -> tuple[str, int]:
    """Parses ``[HOST:]PORT`` into host and port.

    Raises:
        ConfigError: the text has another form.
    """
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"{VARIABLE} (--r2serve-sidecar) is {text!r}: must be [HOST:]PORT, with PORT from 1 to "
            "65535"
        )
    return host.strip("[]") or "127.0.0.1", int(port)


def url() -> str | None:
    """Returns the URL of this engine's sidecar; None: no sidecar was requested."""
    given = os.environ.get(VARIABLE)
    if not given:
        return None
    host, port = address(given)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def start_once() -> None:
    """Starts the sidecar, in the engine's first process only; logs a failure to start.

    Raises:
        ConfigError: the address has a wrong form.
    """
    global _started
    given = os.environ.get(VARIABLE)
    if not given or _started or multiprocessing.parent_process() is not None:
        return
    host, port = address(given)
    _started = True
    folder = os.environ.get("R2CCL_JOURNAL_DIR")
    if not folder:
        _LOG.warning("sidecar not started: R2CCL_JOURNAL_DIR is not set, so no journals exist")
        return
    words = ["sidecar", "--host", host, "--port", str(port), "--journal-dir", folder]
    words += ["--until", str(os.getpid())]
    if name := os.environ.get("R2CCL_SERVING_ENGINE"):
        words += ["--engine", name]
    owner = owner_of(host, port) if is_taken(host, port) else ""
    log = None
    try:
        log = _open_log(Path(folder) / SIDECAR_LOG)
    except OSError as error:
        _LOG.warning("the sidecar's messages appear here: %s", error)
    try:
        subprocess.Popen(
            [sys.executable, "-c", "from r2serve.cli import main; main()", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,  # None: as the engine's
            stderr=log,
            start_new_session=True,
        )
    except OSError as error:
        _LOG.warning("sidecar not started: %s; the engine runs without metrics of rails", error)
        return
    finally:
        if log is not None:
            os.close(log)
    _LOG.info("sidecar: %s, log: %s/%s", url(), folder, SIDECAR_LOG)
    if owner:
        _LOG.warning(
            "%s is taken by %s: this engine's sidecar tries again for 90 s; name another port with "
            "--r2serve-sidecar",
            url(),
            owner,
        )


def say_if_useless() -> None:
    """Warns, once, that no sidecar starts for an engine without r2ccl, which has no rails."""
    global _started
    if os.environ.get(VARIABLE) and not _started and multiprocessing.parent_process() is None:
        _started = True
        _LOG.warning("no sidecar starts: --r2serve-sidecar needs --distributed-backend r2ccl")


def _open_log(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o600)
