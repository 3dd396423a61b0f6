"""Every option of r2serve, once: type, default, unit, meaning and range.

The class body of :class:`Config` is the one table.  The environment variable of a field is
``R2CCL_`` and its name in capitals; ``docs/configuration.md`` and ``r2serve config`` are printed
from it, and ``csrc/include/r2ccl/config.hpp`` repeats the fields that the core acts on (a test
compares the two).
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from r2serve.errors import ConfigError

PREFIX = "R2CCL_"
MAX_CHUNKS_PER_SLOT = 64  # the receiver counts a slot's chunks in one 64-bit word

_TRUE = ("on", "1", "true", "yes")
_FALSE = ("off", "0", "false", "no")
_LOG = logging.getLogger(__name__)

Value = bool | int | float | str


@dataclass(frozen=True, kw_only=True)
class Option:
    """What is known of one field, apart from its value."""

    name: str = ""
    kind: type[Value] = str
    default: Value = ""
    unit: str = ""
    meaning: str = ""
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    power_of_two: bool = False
    core: bool = False
    """The core acts on it, so ``config.hpp`` has it too."""

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def allowed(self) -> str:
        """What values are right, in words."""
        if self.kind is bool:
            return "on or off"
        if self.choices:
            return ", ".join(self.choices[:-1]) + f" or {self.choices[-1]}"
        if self.low is None or self.high is None:
            return "text"
        noun = "a power of two" if self.power_of_two else _NOUN[self.kind]
        return f"{noun} from {show(self.kind(self.low))} to {show(self.kind(self.high))}"


_NOUN: dict[type[Value], str] = {int: "an integer", float: "a number"}


def show(value: Value) -> str:
    """The value as it would be written in an environment variable."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def _option(default: Value, meaning: str, **details: Any) -> Any:
    option = Option(kind=type(default), default=default, meaning=meaning, **details)
    return dataclasses.field(default=default, metadata={"option": option})


def _core(default: Value, meaning: str, **details: Any) -> Any:
    return _option(default, meaning, core=True, **details)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The options of one process; immutable, and valid once it exists.

    Raises:
        ConfigError: names the field, the value and what would be right.
    """

    # Where traffic goes.
    rails: str = _option(
        "auto",
        "Network ports that carry collectives. `auto` takes every NIC that is up and has an "
        "address, except the management NIC; otherwise a comma-separated list of devices or "
        "addresses, in rail order, the same number on every node",
    )
    node: str = _option(
        "",
        "What counts as a node. Empty: ranks with the same boot id and network namespace share "
        "one; `per-rank`: every rank is a node of its own; any other text: ranks with the same "
        "text share one",
    )
    management: str = _option(
        "",
        "Device or address kept for the engine's own control traffic and never used as a rail, but "
        "for `fallback`. "
        "Empty: the one that the engine's store is reached through, as long as others remain",
    )

    # Failover.
    resilience: bool = _core(
        True,
        "Off: keep nothing for replay, hedge nothing, probe nothing. For measuring what "
        "resilience costs, not for serving",
    )
    fallback: bool = _core(
        True,
        "Collectives go over the management NIC, too, while no other rail to a peer is left: "
        "slower, but nothing waits. The same on every node",
    )
    checksum: bool = _core(
        False,
        "A CRC32C of every chunk, so that bits flipped behind the NIC's own checks are found: the "
        "chunk is replayed and its rail goes down. The same on every node",
    )
    link_timeout_s: float = _core(
        30.0,
        "How long a link may be without any rail before every rank gets the typed error; ten times "
        "as long where rails work and the peer's process says nothing",
        unit="s",
        low=0.1,
        high=3600.0,
    )
    connect_timeout_s: float = _core(
        60.0,
        "How long start-up waits until every link has its first rail",
        unit="s",
        low=0.1,
        high=3600.0,
    )
    handshake_timeout_ms: int = _core(
        1000,
        "How long one new connection may take to prove who it is before it is dropped",
        unit="ms",
        low=10,
        high=60_000,
    )

    # Messages and memory.
    small_message_bytes: int = _core(
        32 * 1024,
        "Messages up to this size travel as one chunk on the one rail that answers fastest; "
        "larger ones are striped. At most `chunk_bytes`",
        unit="bytes",
        low=0,
        high=64 * 1024**2,
    )
    chunk_bytes: int = _core(
        128 * 1024,
        "Size of the unit that a rail carries, acknowledges and replays",
        unit="bytes",
        low=4096,
        high=64 * 1024**2,
        power_of_two=True,
    )
    slot_bytes: int = _core(
        1024**2,
        "Size of one receive slot, which is the largest message. A multiple of `chunk_bytes`, "
        f"at most {MAX_CHUNKS_PER_SLOT} chunks",
        unit="bytes",
        low=4096,
        high=1024**3,
    )
    slots: int = _core(
        8,
        "Receive slots of each link, communicator and direction: messages that may be under way. "
        "A power of two, so that slot numbers stay in step when message numbers wrap",
        unit="slots",
        low=2,
        high=256,
        power_of_two=True,
    )
    spare_slots: int = _core(
        4,
        "Slots that stand in for those in quarantine after a rail went down",
        unit="slots",
        low=0,
        high=256,
    )
    staging_bytes: int = _core(
        256 * 1024,
        "Messages up to this size are copied and the call returns without waiting for the wire; "
        "larger ones are sent from the caller's buffer",
        unit="bytes",
        low=0,
        high=1024**3,
    )
    socket_buffer_bytes: int = _core(
        0,
        "Send and receive buffer asked of the kernel for each TCP rail; 0: the kernel tunes them, "
        "which is faster",
        unit="bytes",
        low=0,
        high=1024**3,
    )

    # Detection and rejoin.
    ack_deadline_floor_ms: int = _core(
        20,
        "Shortest time a rail may take to acknowledge before it is suspected and its open chunks "
        "are hedged. At most `dead_deadline_ms`",
        unit="ms",
        low=1,
        high=60_000,
    )
    ack_deadline_factor: float = _core(
        8.0,
        "The same time in units of the rail's own smoothed acknowledgement time; the longer of "
        "the two counts",
        unit="",
        low=1.0,
        high=1000.0,
    )
    dead_deadline_ms: int = _core(
        500,
        "How long a suspected rail may stay silent before it is taken down",
        unit="ms",
        low=1,
        high=60_000,
    )
    probe_interval_ms: int = _core(
        200,
        "How often an idle rail is probed, so that a rail that died unused is known",
        unit="ms",
        low=1,
        high=60_000,
    )
    rejoin_backoff_min_ms: int = _core(
        50,
        "First wait before a lost rail is connected again; it doubles with each failure. 0: at "
        "once. At most `rejoin_backoff_max_ms`",
        unit="ms",
        low=0,
        high=600_000,
    )
    rejoin_backoff_max_ms: int = _core(
        5000,
        "Longest such wait",
        unit="ms",
        low=0,
        high=600_000,
    )
    flap_half_life_s: float = _core(
        30.0,
        "Time in which the penalty of a rail that keeps failing halves; 0: no penalty",
        unit="s",
        low=0.0,
        high=3600.0,
    )

    # Progress.
    spin_us: int = _core(
        200,
        "How long a caller polls before it sleeps until something arrives",
        unit="us",
        low=0,
        high=10_000_000,
    )
    background_interval_ms: int = _core(
        2,
        "How often the background thread looks after links while no caller polls",
        unit="ms",
        low=1,
        high=1000,
    )

    # Arithmetic.
    algorithm: str = _core(
        "auto",
        "All-reduce algorithm; `auto` picks by size. Same bits either way",
        choices=("auto", "one_shot", "two_shot"),
    )
    simd: str = _option(
        "auto",
        "Instruction set of the reduce kernels; `auto` takes the best that the processor has. "
        "Same bits either way",
        choices=("auto", "portable", "avx2", "avx512"),
    )

    # Observation.
    journal_dir: str = _core(
        "",
        "Existing folder in which each process keeps its journal, `r2ccl-<pid>.journal`. Empty: "
        "in memory only",
    )
    fault_file: str = _core(
        "",
        "For drills without root: a file whose lines `<rail> cut`, `<rail> drop` or `<rail> heal` "
        "inject faults into this process's rails as they are appended. Empty: none",
    )
    log_level: str = _option(
        "info",
        "Level of the logger `r2serve`",
        choices=("debug", "info", "warning", "error"),
    )

    def __post_init__(self) -> None:
        for option in options():
            value = _checked(option, getattr(self, option.name))
            object.__setattr__(self, option.name, value)
        self._check_across_fields()

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: Value) -> Config:
        """Read ``R2CCL_*`` from ``environ`` (default: the process's); keywords win over it.

        A variable of that prefix that is no option is only warned of, with the likeliest spelling:
        processes of one job may run different versions.
        """
        environ = os.environ if environ is None else environ
        known = {option.variable: option for option in options()}
        values: dict[str, Any] = dict(overrides)
        for variable in sorted(v for v in environ if v.startswith(PREFIX)):
            if variable in known:
                option = known[variable]
                if option.name not in values:
                    values[option.name] = _parsed(option, environ[variable])
            else:
                close = difflib.get_close_matches(variable, known, n=1)
                hint = f"; did you mean {close[0]}?" if close else ""
                _LOG.warning("%s is not an option of r2serve and is ignored%s", variable, hint)
        return cls(**values)

    def describe(self) -> list[tuple[Option, Value]]:
        """Every option with its value here, in table order."""
        return [(option, getattr(self, option.name)) for option in options()]

    def core_fields(self) -> dict[str, Value]:
        """The fields that the core has too, for handing them over."""
        return {option.name: value for option, value in self.describe() if option.core}

    def _check_across_fields(self) -> None:
        if self.slot_bytes % self.chunk_bytes:
            raise _wrong("slot_bytes", self, f"a multiple of chunk_bytes ({self.chunk_bytes})")
        if self.slot_bytes // self.chunk_bytes > MAX_CHUNKS_PER_SLOT:
            limit = MAX_CHUNKS_PER_SLOT * self.chunk_bytes
            raise _wrong("slot_bytes", self, f"at most {limit} with chunk_bytes {self.chunk_bytes}")
        for small, large in (
            ("small_message_bytes", "chunk_bytes"),
            ("ack_deadline_floor_ms", "dead_deadline_ms"),
            ("rejoin_backoff_min_ms", "rejoin_backoff_max_ms"),
        ):
            if getattr(self, small) > getattr(self, large):
                raise _wrong(small, self, f"at most {large} ({show(getattr(self, large))})")
        self._check_texts()

    def _check_texts(self) -> None:
        if self.rails != "auto":
            names = self.rails.split(",")
            if any(not name or name != name.strip() or " " in name for name in names):
                raise _wrong("rails", self, "auto or devices or addresses separated by commas")
            if len(set(names)) != len(names):
                raise _wrong("rails", self, "a list without repetitions")
        for name in ("node", "management"):
            text = getattr(self, name)
            if any(not letter.isprintable() or letter.isspace() for letter in text):
                raise _wrong(name, self, "one word")
        folder = self.journal_dir
        # isdir() first: it also takes texts that can be no path.
        if folder and not (os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)):
            raise _wrong("journal_dir", self, "empty or an existing folder that can be written to")
        if self.fault_file and not os.path.isdir(os.path.dirname(self.fault_file) or "."):
            raise _wrong("fault_file", self, "empty or a file in an existing folder")


def options() -> tuple[Option, ...]:
    """The table, in the order of the fields."""
    return _OPTIONS


_OPTIONS = tuple(
    dataclasses.replace(field.metadata["option"], name=field.name)
    for field in dataclasses.fields(Config)
)


def _wrong(name: str, config: Config, right: str) -> ConfigError:
    return ConfigError(_complaint(name, getattr(config, name), right))


def _complaint(name: str, value: object, right: str) -> str:
    shown = repr(value) if isinstance(value, str) else value
    if isinstance(value, int) and value.bit_length() > 64:  # Python refuses to print the largest
        shown = f"an integer of {value.bit_length()} bits"
    return f"{name} ({PREFIX}{name.upper()}) is {shown}: must be {right}"


def _parsed(option: Option, text: str) -> Value:
    """The value that an environment variable's text stands for."""
    text = text.strip()
    try:
        if option.kind is bool:
            if text.lower() not in _TRUE + _FALSE:
                raise ValueError
            return text.lower() in _TRUE
        return option.kind(text)
    except ValueError:
        raise ConfigError(_complaint(option.name, text, option.allowed)) from None


def _checked(option: Option, value: object) -> Value:
    """The value, if its type and range are right."""
    error = ConfigError(_complaint(option.name, value, option.allowed))
    if isinstance(value, int | float) and option.low is not None and option.high is not None:
        if not option.low <= value <= option.high:  # nor is NaN
            raise error
        if option.kind is float and type(value) is int:
            value = float(value)
    if type(value) is not option.kind:  # not isinstance: a bool is no int here
        raise error
    if option.power_of_two and isinstance(value, int) and value.bit_count() != 1:
        raise error
    if option.choices and value not in option.choices:
        raise error
    assert isinstance(value, bool | int | float | str)
    return value
