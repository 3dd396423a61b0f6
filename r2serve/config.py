"""Every option of r2serve, once: type, default, unit, meaning and range.

The class body of :class:`Config` is the one table.  The environment variable of a field is
``R2CCL_`` and its name in capitals; ``docs/configuration.md`` and ``r2serve config`` are printed
from it, and ``csrc/base/config.hpp`` repeats the fields that the core acts on (a test
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
from r2serve.option import PREFIX, Option, Value, checked, complaint, core, option, parsed, show

MAX_CHUNKS_PER_SLOT = 64  # the receiver counts a slot's chunks in one 64-bit word
# A unix socket's path has 107 bytes; "/r2ccl-4194304-ffffffff.drills" are 30 of them.
LONGEST_DRILL_FOLDER = 77

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The options of one process; immutable, and valid once it exists.

    Raises:
        ConfigError: names the field, the value and what would be right.
    """

    # Where traffic goes.
    rails: str = option(
        "auto",
        "Network ports that carry collectives. `auto` takes every NIC that is up and has an "
        "address, except the management NIC; otherwise a comma-separated list of devices, "
        "addresses or RDMA ports (`mlx5_0:1`), in rail order",
    )
    node: str = option(
        "",
        "What counts as a node. Empty: ranks with the same boot id and network namespace share "
        "one; `per-rank`: every rank is a node of its own; any other text: ranks with the same "
        "text share one",
    )
    management: str = option(
        "",
        "Device or address kept for the engine's control traffic, never a rail but for `fallback`. "
        "Empty: the one that the engine's store is reached through, as long as others remain",
    )

    # RDMA.
    rdma: str = option(
        "auto",
        "Rails over RDMA verbs. `auto`: where a port has an RDMA device at both ends; `require`: "
        "start-up fails where one has none; `off`: TCP alone",
        choices=("auto", "require", "off"),
    )
    gid_index: int = core(
        -1,
        "GID that RoCE rails use. -1: the one of the rail's own address, RoCE v2 before v1",
        unit="",
        low=-1,
        high=255,
    )
    verbs_timeout: int = core(
        14,
        "An RDMA device waits 4.096 us times two to the power of this for an acknowledgement "
        "before it sends again (14: 67 ms). Finding a dead rail does not wait for it",
        unit="",
        low=1,
        high=31,
    )
    verbs_retry_count: int = core(
        6,
        "So many times, before the queue pair fails. With 14 and 6 that is half a second",
        unit="",
        low=0,
        high=7,
    )
    verbs_rnr_timer: int = core(
        12,
        "How long a device waits whose peer had no receive posted, by InfiniBand's table (12: "
        "0.64 ms). r2ccl posts receives before it gives credit, so none should",
        unit="",
        low=0,
        high=31,
    )
    verbs_rnr_retry: int = core(
        7,
        "So many times, before the queue pair fails; 7: for ever, since a peer that is stopped is "
        "no fault of its rail",
        unit="",
        low=0,
        high=7,
    )
    traffic_class: int = core(
        0,
        "Traffic class of RoCE rails: the byte that carries DSCP and ECN",
        unit="",
        low=0,
        high=255,
    )
    service_level: int = core(
        0,
        "Service level of RDMA rails: the priority that flow control acts on",
        unit="",
        low=0,
        high=15,
    )
    pkey_index: int = core(
        0,
        "Index of the InfiniBand partition key of RDMA rails",
        unit="",
        low=0,
        high=65535,
    )

    # Failover.
    resilience: bool = core(
        True,
        "Off: keep nothing for replay, hedge nothing, probe nothing. For measuring what "
        "resilience costs, not for serving",
    )
    fallback: bool = core(
        True,
        "Collectives go over the management NIC, too, while no other rail to a peer is left: "
        "slower, but nothing waits. The same on every node",
    )
    checksum: bool = core(
        False,
        "A CRC32C of every chunk, so that bits flipped behind the NIC's own checks are found: the "
        "chunk is replayed and its rail goes down. The same on every node",
    )
    link_timeout_s: float = core(
        30.0,
        "How long a link may be without any rail before every rank gets the typed error; ten times "
        "as long where rails work and the peer's process says nothing",
        unit="s",
        low=0.1,
        high=3600.0,
    )
    connect_timeout_s: float = core(
        60.0,
        "How long start-up waits until every link has its first rail",
        unit="s",
        low=0.1,
        high=3600.0,
    )
    handshake_timeout_ms: int = core(
        1000,
        "How long one new connection may take to prove who it is before it is dropped",
        unit="ms",
        low=10,
        high=60_000,
    )

    # Messages and memory.
    small_message_bytes: int = core(
        32 * 1024,
        "Messages up to this size travel as one chunk on the one rail that answers fastest; "
        "larger ones are striped. At most `chunk_bytes`",
        unit="bytes",
        low=0,
        high=64 * 1024**2,
    )
    chunk_bytes: int = core(
        128 * 1024,
        "Size of the unit that a rail carries, acknowledges and replays",
        unit="bytes",
        low=4096,
        high=64 * 1024**2,
        power_of_two=True,
    )
    slot_bytes: int = core(
        1024**2,
        "Size of one receive slot, which is the largest message. A multiple of `chunk_bytes`, "
        f"at most {MAX_CHUNKS_PER_SLOT} chunks",
        unit="bytes",
        low=4096,
        high=1024**3,
    )
    slots: int = core(
        8,
        "Receive slots of each link, communicator and direction: messages that may be under way. "
        "A power of two, so that slot numbers stay in step when message numbers wrap",
        unit="slots",
        low=2,
        high=256,
        power_of_two=True,
    )
    spare_slots: int = core(
        4,
        "Slots that stand in for those in quarantine after a rail went down",
        unit="slots",
        low=0,
        high=256,
    )
    staging_bytes: int = core(
        256 * 1024,
        "Messages up to this size are copied and the call returns without waiting for the wire; "
        "larger ones are sent from the caller's buffer",
        unit="bytes",
        low=0,
        high=1024**3,
    )
    socket_buffer_bytes: int = core(
        0,
        "Send and receive buffer asked of the kernel for each TCP rail; 0: the kernel tunes them, "
        "which is faster",
        unit="bytes",
        low=0,
        high=1024**3,
    )

    # Detection and rejoin.
    ack_deadline_floor_ms: int = core(
        20,
        "Shortest time a rail may take to acknowledge before it is suspected and its open chunks "
        "are hedged. At most `dead_deadline_ms`",
        unit="ms",
        low=1,
        high=60_000,
    )
    ack_deadline_factor: float = core(
        8.0,
        "The same time in units of the rail's own smoothed acknowledgement time; the longer of "
        "the two counts",
        unit="",
        low=1.0,
        high=1000.0,
    )
    dead_deadline_ms: int = core(
        500,
        "How long a suspected rail may stay silent before it is taken down",
        unit="ms",
        low=1,
        high=60_000,
    )
    probe_interval_ms: int = core(
        200,
        "How often an idle rail is probed, so that a rail that died unused is known",
        unit="ms",
        low=1,
        high=60_000,
    )
    rejoin_backoff_min_ms: int = core(
        50,
        "First wait before a lost rail is connected again; it doubles with each failure. 0: at "
        "once. At most `rejoin_backoff_max_ms`",
        unit="ms",
        low=0,
        high=600_000,
    )
    rejoin_backoff_max_ms: int = core(
        5000,
        "Longest such wait",
        unit="ms",
        low=0,
        high=600_000,
    )
    flap_half_life_s: float = core(
        30.0,
        "Time in which the penalty of a rail that keeps failing halves; 0: no penalty",
        unit="s",
        low=0.0,
        high=3600.0,
    )

    # Progress.
    spin_us: int = core(
        200,
        "How long a caller polls before it sleeps until something arrives",
        unit="us",
        low=0,
        high=10_000_000,
    )
    background_interval_ms: int = core(
        2,
        "How often the background thread looks after links while no caller polls",
        unit="ms",
        low=1,
        high=1000,
    )

    # GPUs.
    cuda_library: str = option(
        "libcuda.so.1",
        "The CUDA driver: a file, or a name that the loader finds. Loaded when one is needed",
    )
    gpu_staging_bytes: int = option(
        8 * 1024**2,
        "Pinned memory of each communicator of a GPU, and of the GPU's with `gpu_direct`: so much "
        "for inputs and for results, twice. Larger collectives go in slices. The same on all ranks",
        unit="bytes",
        low=1024**2,
        high=1024**3,
    )
    gpu_direct: str = option(
        "auto",
        "Stage what is large in the GPU's memory, which NICs read and write (GPUDirect RDMA). "
        "`auto`: where all ranks can; `on`: or do not start. The same on all ranks",
        choices=("auto", "on", "off"),
    )
    gpu_direct_min_bytes: int = option(
        65_536,
        "Least that a rank sends another one for `gpu_direct` to apply. The same on all ranks",
        unit="bytes",
        low=1,
        high=1024**3,
    )
    fuse: str = option(
        "auto",
        "Make one operation of an all-reduce, the addition of the residual and the RMSNorm after "
        "it, in models that vLLM compiles. `auto`: on GPUs; `on`: on the CPU, too, where it "
        "gains nothing and start-up compiles for longer",
        choices=("auto", "on", "off"),
    )

    # Arithmetic.
    algorithm: str = core(
        "auto",
        "All-reduce algorithm; `auto` picks by size. Same bits either way",
        choices=("auto", "one_shot", "two_shot"),
    )
    simd: str = option(
        "auto",
        "Instruction set of the reduce kernels; `auto` takes the best that the processor has. "
        "Same bits either way",
        choices=("auto", "portable", "avx2", "avx512"),
    )

    # Observation.
    journal_dir: str = core(
        "",
        "Existing folder in which each process keeps its journal, `r2ccl-<pid>-<engine>.journal`. "
        "Empty: in memory only",
    )
    fault_file: str = core(
        "",
        "For drills without root: a file whose lines `<rail> carrier_loss`, `<rail> black_hole`, "
        "`<rail> reset` or `<rail> heal` inject faults into this process's rails as they are "
        "appended. The words `cut`, `drop` and `error` are accepted for one release. Empty: none",
    )
    drills: bool = option(
        False,
        "Take drills from `r2serve drill` and the sidecar: faults injected on purpose into rails "
        "of this process. Needs `journal_dir`",
    )
    log_level: str = option(
        "info",
        "Level of the logger `r2serve`",
        choices=("debug", "info", "warning", "error"),
    )

    def __post_init__(self) -> None:
        for known in options():
            value = checked(known, getattr(self, known.name))
            object.__setattr__(self, known.name, value)
        self._check_across_fields()

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: Value) -> Config:
        """Read ``R2CCL_*`` from ``environ`` (default: the process's); keywords win over it.

        A variable of that prefix that is no option is only warned of, with the likeliest spelling:
        processes of one job may run different versions.
        """
        environ = os.environ if environ is None else environ
        known = {each.variable: each for each in options()}
        values: dict[str, Any] = dict(overrides)
        for variable in sorted(v for v in environ if v.startswith(PREFIX)):
            if variable in known:
                meant = known[variable]
                if meant.name not in values:
                    values[meant.name] = parsed(meant, environ[variable])
            else:
                close = difflib.get_close_matches(variable, known, n=1)
                hint = f"; did you mean {close[0]}?" if close else ""
                _LOG.warning("%s is not an option of r2serve and is ignored%s", variable, hint)
        return cls(**values)

    def describe(self) -> list[tuple[Option, Value]]:
        """Every option with its value here, in table order."""
        return [(each, getattr(self, each.name)) for each in options()]

    def core_fields(self) -> dict[str, Value]:
        """The fields that the core has too, for handing them over."""
        return {each.name: value for each, value in self.describe() if each.core}

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
        library = self.cuda_library
        named = bool(library) and all(c.isprintable() and not c.isspace() for c in library)
        if not (os.path.isfile(library) if os.sep in library else named):
            raise _wrong("cuda_library", self, "an existing file or a name that the loader finds")
        for name in ("node", "management"):
            text = getattr(self, name)
            if any(not letter.isprintable() or letter.isspace() for letter in text):
                raise _wrong(name, self, "one word")
        folder = self.journal_dir
        # isdir() first: it also takes texts that can be no path.
        if folder and not (os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)):
            raise _wrong("journal_dir", self, "empty or an existing folder that can be written to")
        if self.drills and not folder:
            raise _wrong("drills", self, "off where journal_dir is empty")
        if self.drills and len(os.fsencode(folder)) > LONGEST_DRILL_FOLDER:
            right = f"a path of at most {LONGEST_DRILL_FOLDER} bytes where drills is on"
            raise _wrong("journal_dir", self, right)
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
    return ConfigError(complaint(name, getattr(config, name), right))
