"""Table of all options of r2serve: type, default, unit, meaning and range.

The class body of :class:`Config` is the only table. The environment variable of a field is
``R2CCL_`` plus the name in capitals. ``docs/configuration.md`` and ``r2serve config`` print the
table. ``csrc/base/config.hpp`` repeats the fields of the core; a test compares both.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass

from r2serve.config_checks import MAX_CHUNKS_PER_SLOT, check_across_fields
from r2serve.option import Option, Value, checked, core, option, read_variables


@dataclass(frozen=True, kw_only=True)
class Config:
    """The options of one process; immutable, and valid after construction.

    Raises:
        ConfigError: names the field, the value and what would be right.
    """

    # Ports and nodes.
    rails: str = option(
        "auto",
        "Network ports that carry collectives. `auto`: every usable port, the fastest first (see "
        "rails.md). Otherwise a comma-separated list in rail order: devices, addresses, "
        "`device=address` or RDMA ports (`mlx5_0:1`)",
    )
    node: str = option(
        "",
        "Identity of a node. Empty: ranks with the same boot id and network namespace share a "
        "node; `per-rank`: every rank is a separate node; any other text: ranks with the same "
        "text share a node",
    )
    management: str = option(
        "",
        "Device or address of a NIC kept free of rails, for the engine's control traffic; carries "
        "collectives only under `fallback`. Empty: the NIC with control traffic is a rail, too",
    )
    ports: str = core(
        "",
        "TCP ports of all listeners, for hosts with a packet filter: `40000-40050`. Each process "
        "takes the lowest free port at each of its addresses, so the range needs as many ports as "
        "processes on the host; `r2serve doctor` counts the ports and prints the rule of the "
        "packet filter. Empty: any free port",
        window=True,
    )

    # Control traffic.
    control: str = option(
        "rails",
        "Path of vLLM's own connections between nodes (ZMQ, gloo, TCPStore). `rails`: a relay on "
        "each node carries them over every NIC, so that the management NIC may die, too; `direct`: "
        "TCP over the management NIC. Must be the same on every node",
        choices=("rails", "direct"),
    )
    control_master: str = option(
        "",
        "Addresses of node 0 at which the relays of a job meet, between commas. Followers try "
        "every address, so that the start needs no particular NIC. Node 0 also listens at the "
        "engine's master address, for a node without a relay. Empty: that address alone",
    )
    secret_file: str = option(
        "",
        "File with a key of at least 32 bytes, the same on every node, for networks that are not "
        "trusted: authenticates the meeting of the relays and the exchange of the network plugin, "
        "and enters the keys of all rails. Empty: a process that can change the engine's store can "
        "pose as a rank",
    )

    # RDMA.
    rdma: str = option(
        "auto",
        "Use of RDMA verbs. `auto`: a rail uses verbs if both ports have an RDMA device, else TCP; "
        "`require`: start-up fails if a rail cannot use verbs; `off`: all rails use TCP",
        choices=("auto", "require", "off"),
    )
    gid_index: int = core(
        -1,
        "GID index of RoCE rails. -1: the GID of the rail's address, RoCE v2 before RoCE v1",
        low=-1,
        high=255,
    )
    verbs_timeout: int = core(
        14,
        "Time an RDMA device waits for an acknowledgement before a retransmission (`timeout` of "
        "the queue pair): 4.096 us times 2^value (14: 67 ms). Rail failure detection is faster",
        low=1,
        high=31,
    )
    verbs_retry_count: int = core(
        6,
        "Transport retries before the queue pair fails (`retry_cnt`). With the defaults: 0.5 s",
        low=0,
        high=7,
    )
    verbs_rnr_timer: int = core(
        12,
        "Delay after a receiver-not-ready answer, as a code of InfiniBand's table "
        "(`min_rnr_timer`; 12: 0.64 ms). Receiver-not-ready is not expected, because r2ccl posts "
        "receives before it gives credit",
        low=0,
        high=31,
    )
    verbs_rnr_retry: int = core(
        7,
        "Receiver-not-ready retries (`rnr_retry`). 7: unlimited, so that a stopped peer process "
        "does not take the rail down",
        low=0,
        high=7,
    )
    traffic_class: int = core(
        0,
        "Traffic class of RoCE rails: the byte with DSCP and ECN",
        low=0,
        high=255,
    )
    service_level: int = core(
        0,
        "Service level of RDMA rails: the priority for flow control",
        low=0,
        high=15,
    )
    pkey_index: int = core(
        0,
        "Index of the InfiniBand partition key of RDMA rails",
        low=0,
        high=65535,
    )

    # Failover.
    resilience: bool = core(
        True,
        "Failover. `off`: no copies for replay, no hedges, no probes; the loss of a rail can end "
        "collectives in an error. Only for measuring the cost of resilience, not for serving. Must "
        "be the same on every node",
    )
    fallback: bool = core(
        True,
        "Collectives on the management NIC while no other rail to a peer is left: slower, but "
        "without a stall. Must be the same on every node",
    )
    checksum: bool = core(
        False,
        "CRC32C of every chunk, against bit errors that the NIC's own checks miss. A wrong "
        "checksum takes the rail down and replays the chunk. Must be the same on every node",
    )
    link_timeout_s: float = core(
        30.0,
        "Longest time without any rail to a peer before every rank raises PeerLostError. Ten "
        "times as long while rails work but the peer's process is silent",
        unit="s",
        low=0.1,
        high=3600.0,
    )
    call_timeout_s: float = core(
        0.0,
        "Longest wait of a call for other ranks; then every rank raises `AbortedError`. Also the "
        "longest wait of a start at the store and for rails, if shorter than the store's timeout "
        "and `connect_timeout_s`; then `StartupTimeoutError`. 0: no limit, so a call waits as long "
        "as the other ranks' processes live. With a limit, ranks that begin a call late (a "
        "compilation, an idle server) end the call",
        unit="s",
        low=0.0,
        high=86400.0,
    )
    refused_grace_s: float = core(
        0.3,
        "How long the host of a peer must refuse connections, at least three, before its process "
        "counts as dead. Needs connections that the peer's host has closed in order (FIN); resets, "
        "filters and silence wait for `link_timeout_s`",
        unit="s",
        low=0.05,
        high=60.0,
    )
    connect_timeout_s: float = core(
        60.0,
        "Longest wait of start-up for the first rail of every link",
        unit="s",
        low=0.1,
        high=3600.0,
    )
    handshake_timeout_ms: int = core(
        1000,
        "Longest time for a new connection to authenticate, and for its first probe to be "
        "answered. Doubles, up to 16 times, while the peer's process is late, until the rail is UP",
        unit="ms",
        low=10,
        high=60_000,
    )

    # Messages and memory.
    small_message_bytes: int = core(
        32 * 1024,
        "Largest message that travels as one chunk, on the rail with the shortest expected time; "
        "larger messages are striped over rails. At most `chunk_bytes`",
        unit="bytes",
        low=0,
        high=64 * 1024**2,
    )
    chunk_bytes: int = core(
        128 * 1024,
        "Size of a chunk: the unit that a rail carries, acknowledges and replays. Must be the same "
        "on every node",
        unit="bytes",
        low=4096,
        high=64 * 1024**2,
        power_of_two=True,
    )
    slot_bytes: int = core(
        1024**2,
        "Size of a receive slot and of the largest message. A multiple of `chunk_bytes`, "
        f"at most {MAX_CHUNKS_PER_SLOT} chunks. Must be the same on every node",
        unit="bytes",
        low=4096,
        high=1024**3,
    )
    slots: int = core(
        8,
        "Receive slots of each link, communicator and direction: the messages in flight. A power "
        "of two keeps slot numbers in step when message numbers wrap. Must be the same on every "
        "node",
        unit="slots",
        low=2,
        high=256,
        power_of_two=True,
    )
    spare_slots: int = core(
        4,
        "Slots that replace slots in quarantine after the loss of a rail. Must be the same on "
        "every node",
        unit="slots",
        low=0,
        high=256,
    )
    staging_bytes: int = core(
        256 * 1024,
        "Largest message that is copied, so that the call returns before the message is on the "
        "wire. Larger messages are sent from the caller's buffer",
        unit="bytes",
        low=0,
        high=1024**3,
    )
    socket_buffer_bytes: int = core(
        0,
        "Size of the send buffer and of the receive buffer of each TCP rail. 0: the kernel tunes "
        "both, which is faster",
        unit="bytes",
        low=0,
        high=1024**3,
    )

    # Detection and rejoin.
    ack_deadline_floor_ms: int = core(
        20,
        "Shortest silence after which a rail with unacknowledged chunks is suspected and the "
        "chunks are hedged, if the peer answers on another rail. At most `dead_deadline_ms`",
        unit="ms",
        low=1,
        high=60_000,
    )
    ack_deadline_factor: float = core(
        8.0,
        "Acknowledgement deadline as a multiple of the rail's smoothed acknowledgement time. The "
        "longer of this deadline and `ack_deadline_floor_ms` applies",
        low=1.0,
        high=1000.0,
    )
    dead_deadline_ms: int = core(
        500,
        "Silence after which a suspected rail is taken down, if the peer answers on another path "
        "or an inquiry",
        unit="ms",
        low=1,
        high=60_000,
    )
    probe_interval_ms: int = core(
        200,
        "Interval of probes on an idle rail, which detect the death of an unused rail",
        unit="ms",
        low=1,
        high=60_000,
    )
    rejoin_backoff_min_ms: int = core(
        50,
        "Delay before a lost rail is connected again; the delay doubles with each failure. 0: no "
        "delay. At most `rejoin_backoff_max_ms`",
        unit="ms",
        low=0,
        high=600_000,
    )
    rejoin_backoff_max_ms: int = core(
        5000,
        "Upper bound of the reconnection back-off",
        unit="ms",
        low=0,
        high=600_000,
    )
    flap_half_life_s: float = core(
        30.0,
        "Half-life of the reconnection penalty of a rail that keeps failing. 0: no penalty",
        unit="s",
        low=0.0,
        high=3600.0,
    )

    # Progress.
    spin_us: int = core(
        200,
        "Time a caller polls before it sleeps until data arrives",
        unit="us",
        low=0,
        high=10_000_000,
    )
    background_interval_ms: int = core(
        2,
        "Interval at which the background thread serves links while no caller polls",
        unit="ms",
        low=1,
        high=1000,
    )
    background_cpus: str = core(
        "",
        "CPUs of the core's background threads (`r2ccl-progress`, `r2ccl-proxy` and others), for "
        "hosts on which an engine computes on all other CPUs. Empty: the CPUs that the process had "
        "at its start, also after the engine has pinned the thread that computes",
        cpus=True,
    )

    # NCCL and GPUs.
    nccl_exit_s: float = option(
        30.0,
        "Network plugin for NCCL: time from an error of a connection to the process's end, with "
        "status 70, unless the connection is closed. NCCL 2.26 and 2.27 lose errors. 0: never",
        unit="s",
        low=0.0,
        high=3600.0,
    )
    cuda_library: str = option(
        "libcuda.so.1",
        "CUDA driver library: a file, or a name that the loader finds. Loaded at first use",
    )
    gpu_staging_bytes: int = option(
        8 * 1024**2,
        "Size of a staging buffer of a GPU communicator. A communicator has 2 buffers for inputs "
        "and 2 for results: 4 times this size of pinned host memory and, with `gpu_direct`, as "
        "much GPU memory. Larger collectives run in slices. Must be the same on all ranks",
        unit="bytes",
        low=1024**2,
        high=1024**3,
    )
    gpu_direct: str = option(
        "auto",
        "Staging of large collectives in GPU memory (GPUDirect RDMA). `auto`: if all ranks can; "
        "`on`: start-up fails if a rank cannot; `off`: never. Must be the same on all ranks",
        choices=("auto", "on", "off"),
    )
    gpu_direct_min_bytes: int = option(
        65_536,
        "Smallest transfer between two ranks that uses `gpu_direct`. Must be the same on all ranks",
        unit="bytes",
        low=1,
        high=1024**3,
    )
    fuse: str = option(
        "auto",
        "Fusion of all-reduce, residual addition and RMSNorm into one operation, in models that "
        "vLLM compiles. `auto`: on GPUs; `on`: also on the CPU, where fusion gains nothing and "
        "start-up compiles for longer; `off`: never",
        choices=("auto", "on", "off"),
    )

    # Arithmetic.
    algorithm: str = core(
        "auto",
        "All-reduce algorithm. `auto`: one_shot or two_shot, by size and lost bandwidth. "
        "`two_shot_overlap`: blocks of a large input overlap, for NICs slower than memory. Results "
        "have the same bits with every choice. Must be the same on every node",
        choices=("auto", "one_shot", "two_shot", "two_shot_overlap"),
    )
    consensus: str = core(
        "auto",
        "Whether ranks compare their calls by the engine's `step`, and by the calling line: `site` "
        "warns, `site-error` raises. `auto`: `step` under engines, else `off`. Same on every node",
        choices=("auto", "off", "step", "site", "site-error"),
    )
    consensus_result: int = core(
        0,
        "Compare the bits of each N-th result between ranks. 0: never. The same on every node",
        low=0,
        high=2**31,
    )
    simd: str = option(
        "auto",
        "Instruction set of the reduce kernels. `auto`: the best set of the processor. Results "
        "have the same bits with every choice",
        choices=("auto", "portable", "avx2", "avx512"),
    )

    # Observation.
    journal_dir: str = core(
        "",
        "Existing folder for the journal of each process, `r2ccl-<pid>-<engine>.journal`. A folder "
        "that cannot be written costs a warning, and the process runs without a journal. Empty: "
        "the journal is in memory only",
    )
    journal_limit_bytes: int = option(
        32 << 20,
        "Limit of all files of r2serve in `journal_dir` together: journals, request logs and the "
        "sidecar's log, of live and of ended processes. At most a quarter of the file system",
        unit="bytes",
        low=1 << 20,
        high=2**40,
    )
    serving_engine: str = option(
        "",
        "Name of the serving engine (vLLM), for sidecars of hosts with several engines. Empty: the "
        "process id of the engine's first process",
    )
    fault_file: str = core(
        "",
        "File for drills without root. Each appended line injects a fault into rails of this "
        "process: `<rail> carrier_loss`, `<rail> black_hole`, `<rail> reset` or `<rail> heal`, "
        "with the number of the rail. Neither the group of the file and of its folder nor other "
        "users may have the right to write. The words `cut`, `drop` and `error` are accepted for "
        "one release. Empty: no file",
    )
    drills: bool = option(
        False,
        "Accept drills, which are faults injected on purpose into rails of this process, from "
        "`r2serve drill` and the sidecar. Needs `journal_dir`",
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
        check_across_fields(self)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: Value) -> Config:
        """Reads ``R2CCL_*`` from ``environ`` (default: ``os.environ``); keywords take precedence.

        An unknown variable with the prefix causes a warning with the closest known name. An error
        would break jobs whose processes run different versions.
        """
        environ = os.environ if environ is None else environ
        return cls(**read_variables(options(), environ, overrides))

    def describe(self) -> list[tuple[Option, Value]]:
        """Returns every option with its value in this config, in table order."""
        return [(each, getattr(self, each.name)) for each in options()]

    def core_fields(self) -> dict[str, Value]:
        """Returns the fields for the core."""
        return {each.name: value for each, value in self.describe() if each.core}


def options() -> tuple[Option, ...]:
    """Returns the table, in the order of the fields."""
    return _OPTIONS


_OPTIONS = tuple(
    dataclasses.replace(field.metadata["option"], name=field.name)
    for field in dataclasses.fields(Config)
)
