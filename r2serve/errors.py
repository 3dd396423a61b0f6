"""The errors that r2serve raises, one class for each error code of the core."""

from __future__ import annotations


class R2cclError(RuntimeError):
    """Base of every error that a communicator raises."""


class InvalidArgumentError(R2cclError, ValueError):
    """A parameter of this call is wrong.  Nothing was sent; the communicator stays usable."""


class OrderMismatchError(R2cclError):
    """Ranks called different collectives under the same call number; says who called what."""


class PeerLostError(R2cclError):
    """No rail to a peer for longer than ``link_timeout_s``, or the peer process is gone."""


class PeerClosedError(R2cclError):
    """The peer closed its communicator in good order while this rank still needed it."""


class AbortedError(R2cclError):
    """Another rank reported a fatal verdict; the message carries that rank and its text."""


class StartupTimeoutError(R2cclError, TimeoutError):
    """Start-up did not finish within ``connect_timeout_s``."""


class InternalError(R2cclError):
    """A broken invariant: a bug of r2ccl, worth a report with the journal attached."""


class ConfigError(ValueError):
    """An option is wrong.  Names the field, the value and what would be right."""


# Keyed by the names of the core's ErrorCode, which raises through this table.
ERROR_TYPES: dict[str, type[R2cclError]] = {
    "invalid_argument": InvalidArgumentError,
    "order_mismatch": OrderMismatchError,
    "peer_lost": PeerLostError,
    "peer_closed": PeerClosedError,
    "aborted": AbortedError,
    "timeout": StartupTimeoutError,
    "internal": InternalError,
}
