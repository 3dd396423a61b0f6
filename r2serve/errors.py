"""Errors of r2serve, one class for each error code of the core."""

from __future__ import annotations


def how_to_install(extra: str) -> str:
    """Returns how to get the packages of an extra. No package index has r2serve, so none is named.

    A stranger could register the name there.
    """
    return f"in a checkout of r2serve, run: pip install '.[{extra}]'"


class R2cclError(RuntimeError):
    """Base of every error of a communicator."""


class InvalidArgumentError(R2cclError, ValueError):
    """A parameter of this call is wrong. Nothing was sent; the communicator stays usable."""


class OrderMismatchError(R2cclError):
    """Ranks called different collectives under the same call number; the text lists the calls."""


class PeerLostError(R2cclError):
    """No rail to a peer was up for ``link_timeout_s``, or the peer's process is gone.

    Every rank of the communicator raises the error, including ranks with all their rails up.
    """


class PeerClosedError(R2cclError):
    """The peer closed its communicator gracefully while this rank still needed the peer."""


class AbortedError(R2cclError):
    """A rank, perhaps this rank, called ``abort``; the message names the rank and the reason."""


class StartupTimeoutError(R2cclError, TimeoutError):
    """Start-up did not finish within ``connect_timeout_s``, or a shorter ``call_timeout_s``."""


class InternalError(R2cclError):
    """A call of the operating system, libibverbs or CUDA failed, or an invariant is broken.

    The message names the failed call. A broken invariant is a bug of r2ccl: please report the bug
    with the journal attached.
    """


class ConfigError(ValueError):
    """An option is wrong. The text names the field, the value and what would be right."""


# Keys are the names of the core's ErrorCode; the core raises errors through this table.
ERROR_TYPES: dict[str, type[R2cclError]] = {
    "invalid_argument": InvalidArgumentError,
    "order_mismatch": OrderMismatchError,
    "peer_lost": PeerLostError,
    "peer_closed": PeerClosedError,
    "aborted": AbortedError,
    "timeout": StartupTimeoutError,
    "internal": InternalError,
}
