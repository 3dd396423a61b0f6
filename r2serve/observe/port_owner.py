"""The owner of a taken port: sidecars answer a question, other processes are looked up."""

from __future__ import annotations

import http.client
import json
import socket

import psutil

from r2serve.observe.names import printable

_ASK_S = 1.0
_MAX_BYTES = 64 << 10
_MAX_CHARACTERS = 500
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def is_taken(host: str, port: int) -> bool:
    """Whether a process listens on the port now."""
    try:
        with socket.create_connection((_WILDCARDS.get(host, host), port), timeout=_ASK_S):
            return True
    except OSError:
        return False


def owner_of(host: str, port: int) -> str:
    """Returns the owner of a taken port, in words."""
    # http.client does not know the proxies of the environment.
    connection = http.client.HTTPConnection(_WILDCARDS.get(host, host), port, timeout=_ASK_S)
    try:
        connection.request("GET", "/v1/sidecar")
        said = json.loads(connection.getresponse().read(_MAX_BYTES))
        name = said["serving_engine"]
        whose = f"engine {name!r}" if name else "all engines"
        return printable(
            f"the sidecar of {whose} (process {said['process']}, journals in {said['journal_dir']})"
        )[:_MAX_CHARACTERS]
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return _process_on(port)  # no sidecar, or one of another release
    finally:
        connection.close()


def _process_on(port: int) -> str:
    try:
        listening = [
            one
            for one in psutil.net_connections("tcp")
            if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port
        ]
        found = next((one.pid for one in listening if one.pid), None)
        if found is not None:
            return f"process {found} ({printable(psutil.Process(found).name())})"
    except (psutil.Error, OSError):
        return "another process"  # of another user, or just ended
    return "another process"
