"""Rows about torch: the backend of torch.distributed, streams and graphs rely on these seams.

Tests compare every row with facts from the sources of every release;
``tests/engines/contracts/README.md`` has the table. Tensor operations have no row.
"""

from __future__ import annotations

from r2serve.seams import (
    Accepts,
    Expectation,
    Has,
    InOrder,
    Row,
    Says,
    Subclass,
    Takes,
    There,
)

RELEASES = ("2.13.0", "2.14.0", "2.15.0")
"""Releases of torch checked against the rows."""

_C10D = "torch.distributed.distributed_c10d"
_GROUP = "torch.distributed.ProcessGroup"
_OPTIONS = "torch._C._distributed_c10d"
# Classes by which C++ calls groups and works written in Python.
_TRAMPOLINES = "file:torch/include/torch/csrc/distributed/c10d/*PyProcessGroup.hpp"
_GROUP_HEADER = "file:torch/include/torch/csrc/distributed/c10d/ProcessGroup.hpp"


def _row(
    seam: str,
    purpose: str,
    exit_: str,
    *expects: Expectation,
    releases: tuple[str, ...] = RELEASES,
) -> Row:
    return Row(seam, purpose, exit_, expects, releases)


# Methods of a group called by torch's Python code; r2serve's group overrides all.
_FROM_PYTHON = {
    "allreduce": "self, tensors, opts=...",
    "allreduce_coalesced": "self, tensors, opts=...",
    "reduce": "self, tensors, opts=...",
    "broadcast": "self, tensors, opts=...",
    "allgather": "self, output_tensors, input_tensors, opts=...",
    "allgather_coalesced": "self, output_lists, input_list, opts=...",
    "all_gather_single": "self, output, input, opts=...",
    "all_gather_single_coalesced": "self, output_lists, input_list, opts=...",
    "reduce_scatter": "self, output_tensors, input_tensors, opts=...",
    "reduce_scatter_single": "self, outputTensor, inputTensor, opts",
    "reduce_scatter_single_coalesced": "self, outputTensors, inputTensors, opts=None",
    "gather": "self, output_tensors, input_tensors, opts=...",
    "scatter": "self, output_tensors, input_tensors, opts=...",
    "alltoall": "self, output_tensor, input_tensor, opts=...",
    "all_to_all_single": (
        "self, output_tensor, input_tensor, output_split_sizes, input_split_sizes, opts=..."
    ),
    "barrier": "self, opts=...",
    "send": "self, tensors, dstRank, tag",
    "recv": "self, tensors, srcRank, tag",
    "recv_anysource": "self, tensors, tag",
    "shutdown": "self",
    "abort": "self",
    "_get_backend": "self, device",
}

# Names and arguments of the Python methods that torch's C++ code calls on a group.
_FROM_CPP = (
    "WORK_OVERRIDE(ProcessGroup, allgather, outputTensors, inputTensors, opts)",
    '"all_gather_single_coalesced"',
    "WORK_OVERRIDE(ProcessGroup, allreduce, tensors, opts)",
    "WORK_OVERRIDE(ProcessGroup, allreduce_coalesced, tensors, opts)",
    '"all_to_all_single"',
    "override(outputBuffer, inputBuffer, outputSplitSizes, inputSplitSizes, opts)",
    "WORK_OVERRIDE(ProcessGroup, barrier, opts)",
    "WORK_OVERRIDE(ProcessGroup, broadcast, tensors, opts)",
    "WORK_OVERRIDE(ProcessGroup, reduce_scatter, outputTensors, inputTensors, opts)",
    '"reduce_scatter_single_coalesced"',
    "WORK_OVERRIDE(ProcessGroup, send, tensors, dstRank, tag)",
    "WORK_OVERRIDE(ProcessGroup, recv, tensors, srcRank, tag)",
    "PYBIND11_OVERRIDE(std::string, ProcessGroup, getBackendName, )",
    "PYBIND11_OVERRIDE(void, ProcessGroup, abort, )",
    "PYBIND11_OVERRIDE(const std::string&, ProcessGroup, getGroupName, )",
    "PYBIND11_OVERRIDE(void, ProcessGroup, setGroupName, group_name)",
    "PYBIND11_OVERRIDE(const std::string&, ProcessGroup, getGroupDesc, )",
    "PYBIND11_OVERRIDE(void, ProcessGroup, setGroupDesc, group_desc)",
)
# Further names and arguments, since torch 2.14.
_FROM_CPP_LATER = (
    "WORK_OVERRIDE(ProcessGroup, all_gather_single, outputBuffer, inputBuffer, opts)",
    "WORK_OVERRIDE(ProcessGroup, reduce, tensors, opts)",
    "WORK_OVERRIDE(ProcessGroup, alltoall, outputTensors, inputTensors, opts)",
    "WORK_OVERRIDE(ProcessGroup, gather, outputTensors, inputTensors, opts)",
    "WORK_OVERRIDE(ProcessGroup, scatter, outputTensors, inputTensors, opts)",
    "WORK_OVERRIDE(ProcessGroup, reduce_scatter_single, outputBuffer, inputBuffer, opts)",
)

ROWS = (
    _row(
        "Backend.register_backend",
        "registers the backend r2ccl; torch constructs r2serve's group with extended_api=True",
        "",
        Accepts(
            "torch.distributed.Backend.register_backend", "cls, name, make, extended_api=, devices="
        ),
        Has("torch.distributed.Backend", ("backend_list",)),
        InOrder(
            f"{_C10D}._new_process_group_helper",
            (
                "backend_plugin.creator_fn",
                "_DistributedBackendOptions",
                "dist_backend_opts.store",
                "dist_backend_opts.group_rank",
                "dist_backend_opts.group_size",
                "dist_backend_opts.timeout",
                "dist_backend_opts.group_id",
            ),
        ),
        Has(
            f"{_OPTIONS}._DistributedBackendOptions",
            ("group_id", "group_rank", "group_size", "store", "timeout"),
        ),
    ),
    _row(
        "a ProcessGroup in Python needs no Backend",
        "torch uses the group from R2cclGroup.create() as the process group, so torch's Python and "
        "C++ code calls methods of r2serve",
        "torch allows a Backend in Python",
        Says(
            "file:torch/distributed/distributed_c10d.py",
            ("ProcessGroup): pg = backend_class",),
        ),
        Subclass(_GROUP),
        # Stubs before 2.15 list only this overload; r2serve's group calls the header's overload.
        Takes(f"{_GROUP}.__init__", "self, store, rank, size"),
        Says(_GROUP_HEADER, ("explicit ProcessGroup(int rank, int size);",)),
        Says(_TRAMPOLINES, ("using ProcessGroup::ProcessGroup;",)),
    ),
    _row(
        "methods of a group, as Python calls them",
        "r2serve's group overrides every method",
        "",
        *(Takes(f"{_GROUP}.{name}", parameters) for name, parameters in _FROM_PYTHON.items()),
    ),
    _row(
        "methods of a group, as C++ calls them",
        "functional collectives, DDP and FSDP call these methods",
        "",
        Says(_TRAMPOLINES, _FROM_CPP),
    ),
    _row(
        "further methods of a group, as C++ calls them",
        "functional collectives call these methods, since torch 2.14",
        "r2serve no longer supports torch 2.13: merge with the row before",
        Says(_TRAMPOLINES, _FROM_CPP_LATER),
        releases=("2.14.0", "2.15.0"),
    ),
    _row(
        "options of collectives",
        "root, operator, timeout, and whether the call is asynchronous",
        "",
        *(
            Has(f"{_OPTIONS}.{kind}", ("asyncOp", "timeout", *names))
            for kind, names in {
                "AllreduceOptions": ("reduceOp",),
                "ReduceOptions": ("reduceOp", "rootRank"),
                "ReduceScatterOptions": ("reduceOp",),
                "BroadcastOptions": ("rootRank",),
                "GatherOptions": ("rootRank",),
                "ScatterOptions": ("rootRank",),
                "AllgatherOptions": (),
                "AllToAllOptions": (),
                "BarrierOptions": (),
            }.items()
        ),
        Has(
            "torch.distributed.ReduceOp",
            ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"),
        ),
    ),
    _row(
        "Work",
        "handle of a running collective; base class of r2serve's works",
        "",
        *(
            Takes(f"torch.distributed.Work.{name}", "self")
            for name in (
                "is_completed",
                "is_success",
                "exception",
                "get_future",
                "result",
                "synchronize",
            )
        ),
        Takes("torch.distributed.Work.wait", "self, timeout=..."),
        Subclass("torch.distributed.Work"),
        Says(
            _TRAMPOLINES,
            (
                "PYBIND11_OVERRIDE(bool, Work, wait, timeout)",
                '"get_future"',
                "make_intrusive<PyWorkHolder>(o)",
            ),
        ),
    ),
    _row(
        "Future",
        "result of get_future(): callers wait on the host or in a stream",
        "",
        Accepts("torch.futures.Future.__init__", "self, devices="),
        Accepts("torch.futures.Future.then", "self, callback"),
        Accepts("torch.futures.Future.set_result", "self, result"),
    ),
    _row(
        "Store, ranks and sizes",
        "start-up: ranks meet, and exchange addresses",
        "",
        There("torch.distributed.Store"),
        There("torch.distributed.DistError"),
        Accepts("torch.distributed.TCPStore.__init__", "self, host, port, ranks, is_master="),
        Accepts("torch.distributed.Store.check", "self, keys"),
        Accepts("torch.distributed.Store.delete_key", "self, key"),
        Accepts("torch.distributed.Store.set", "self, key, value"),
        Accepts("torch.distributed.Store.get", "self, key"),
        Accepts("torch.distributed.Store.wait", "self, keys, timeout"),
        Accepts(f"{_C10D}._get_default_store", ""),
        Accepts("torch.distributed.is_initialized", ""),
        Accepts("torch.distributed.all_gather", "lengths, own, group="),
        Accepts("torch.distributed.get_rank", ""),
        Accepts("torch.distributed.get_world_size", "group"),
    ),
    _row(
        "streams and events",
        "collectives run in the caller's stream, or in a stream of the group",
        "",
        Accepts("torch.cuda.current_stream", "device"),
        Accepts("torch.cuda.stream", "stream"),
        Accepts("torch.cuda.Stream.__new__", "cls, device, priority="),
        Has("torch.cuda.Stream", ("cuda_stream",)),
        Accepts("torch.cuda.Stream.wait_event", "self, event"),
        Accepts("torch.cuda.Stream.synchronize", "self"),
        Accepts("torch.cuda.Event.__new__", "cls"),
        Accepts("torch.cuda.Event.record", "self, stream"),
        Accepts("torch.cuda.Event.query", "self"),
        Accepts("torch.cuda.Event.synchronize", "self"),
        Accepts("torch.cuda.is_available", ""),
    ),
    _row(
        "graphs",
        "capture of collectives; only 1 at a time, because a capture begins with a wait for the "
        "device",
        "",
        Accepts("torch.cuda.is_current_stream_capturing", ""),
        Accepts("torch.cuda.graph.__init__", "self, graph, stream=, capture_error_mode="),
        InOrder(
            "torch.cuda.graph.__enter__",
            (
                "torch.cuda.synchronize",
                "torch.cuda.empty_cache",
                "self.stream_ctx.__enter__",
                "self.cuda_graph.capture_begin",
                "capture_error_mode=",
            ),
        ),
        Accepts("torch.cuda.CUDAGraph.__new__", "cls"),
        Accepts("torch.cuda.CUDAGraph.replay", "self"),
    ),
    _row(
        "ProcessGroupGloo",
        "behind a relay, replaced by a subclass whose device listens at the node's virtual "
        "address; torch's private class _Options has no facts, so a unit test constructs it",
        "gloo takes the address of its listener from the environment",
        Subclass(f"{_C10D}.ProcessGroupGloo"),
        Accepts(f"{_C10D}.ProcessGroupGloo.create_device", "hostname=, lazy_init="),
        Accepts("torch.distributed.is_available", ""),
        Accepts("torch.distributed.is_gloo_available", ""),
        Says(
            "file:torch/include/torch/csrc/distributed/c10d/ProcessGroupGloo.hpp",
            ("std::vector<std::shared_ptr<::gloo::transport::Device>> devices;",),
        ),
    ),
    _row(
        "_new_process_group_helper constructs ProcessGroupGloo",
        "the replaced name takes effect; torch 2.14 and 2.15 construct the class elsewhere, where "
        "r2serve does not replace it so far",
        "the place of torch 2.14 is replaced, too",
        InOrder(f"{_C10D}._new_process_group_helper", ("Backend.GLOO", "ProcessGroupGloo")),
        releases=("2.13.0",),
    ),
    _row(
        "TCPStore, as a master",
        "behind a relay, replaced by a subclass that listens at the node's virtual address",
        "a TCPStore listens at its host_name only",
        Subclass("torch.distributed.TCPStore"),
        Accepts(
            "torch.distributed.TCPStore.__init__",
            "self, host_name, port, world_size, is_master, master_listen_fd=",
        ),
        InOrder("torch.distributed.rendezvous._create_c10d_store", ("TCPStore", "is_master=")),
    ),
    _row(
        "a pass of Inductor",
        "base class of vLLM's passes, and so of r2serve's pass; a separate row, because facts "
        "about vLLM exclude torch",
        "",
        Subclass("torch._inductor.custom_graph_pass.CustomGraphPass", ("__call__", "uuid")),
        Takes("torch._inductor.custom_graph_pass.CustomGraphPass.__call__", "self, graph"),
    ),
    _row(
        "torch.library.Library",
        "registers the fused operation for vLLM's compiler",
        "",
        Accepts("torch.library.Library.__init__", "self, namespace, kind"),
    ),
)
