"""A pass of vLLM's compiler for the fusion of all-reduce, residual addition and RMSNorm.

The pass replaces the three operations by ``r2serve::all_reduce_add_rms_norm`` in groups that span
nodes. The group's communicator runs the operation: on a GPU in a single kernel that reads the
received tensors, on the CPU as separate steps.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
import vllm.ir.ops
from vllm.compilation.passes.pass_manager import PostGradPassManager
from vllm.compilation.passes.utility.noop_elimination import NoOpEliminationPass
from vllm.compilation.passes.vllm_inductor_pass import (
    VllmFusionPatternMatcherPass,
    VllmInductorPass,
    VllmPatternReplacement,
)
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.utils import Range
from vllm.distributed import get_tp_group, parallel_state, tensor_model_parallel_all_reduce
from vllm.platforms import current_platform
from vllm.utils.torch_utils import direct_register_custom_op

from r2serve.config import Config
from r2serve.engines.vllm.spanning import SpanningCollectives

_LOG = logging.getLogger(__name__)
_LIBRARY = torch.library.Library("r2serve", "FRAGMENT")  # type: ignore[no-untyped-call]

Pair = tuple[torch.Tensor, torch.Tensor]


def all_reduce_add_rms_norm(
    tensor: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    group_name: str,
) -> Pair:
    """Returns (normed, new residual) of the sum over a vLLM group; inputs are unchanged.

    Shapes: (rows, hidden) for ``tensor``, ``residual`` and both results; (hidden,) for ``weight``.
    """
    group = parallel_state._groups[group_name]()
    assert group is not None, f"the group {group_name} is gone"
    made: Pair = group.device_communicator.all_reduce_add_rms_norm(
        tensor, residual, weight, epsilon
    )
    return made


def _shapes_of_all_reduce_add_rms_norm(
    tensor: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    group_name: str,
) -> Pair:
    return torch.empty_like(tensor), torch.empty_like(residual)


direct_register_custom_op(
    op_name="all_reduce_add_rms_norm",
    op_func=all_reduce_add_rms_norm,
    fake_impl=_shapes_of_all_reduce_add_rms_norm,
    target_lib=_LIBRARY,
)


class _Fused(VllmPatternReplacement):  # type: ignore[misc]
    """The pattern and its replacement; ``parts`` selects the results used by a graph."""

    def __init__(
        self, parts: Callable[[Pair], Any], epsilon: float, dtype: torch.dtype, group_name: str
    ) -> None:
        self._parts = parts
        self._epsilon = epsilon
        self._dtype = dtype
        self._group_name = group_name

    @property
    def pattern(self) -> Callable[..., Any]:
        def pattern(tensor: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
            total = tensor_model_parallel_all_reduce(tensor)
            made = vllm.ir.ops.fused_add_rms_norm(total, residual, weight, self._epsilon)
            return self._parts(made)

        return pattern

    @property
    def replacement(self) -> Callable[..., Any]:
        def replacement(tensor: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
            made = torch.ops.r2serve.all_reduce_add_rms_norm.default(
                tensor, residual, weight, self._epsilon, self._group_name
            )
            return self._parts(made)

        return replacement

    def get_inputs(self) -> list[torch.Tensor]:
        empty = functools.partial(self.empty, dtype=self._dtype)
        return [empty(5, 16), empty(5, 16), empty(16)]


class AllReduceAddRmsNormPass(VllmFusionPatternMatcherPass):  # type: ignore[misc]
    """Fusion in the tensor-parallel group, if the group spans nodes and its communicator fuses.

    Otherwise, and in graphs with too many rows, the pattern stays for vLLM's own passes.
    """

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config, "r2serve_all_reduce_add_rms_norm")
        text = config.model_config.hf_text_config
        self._epsilon = float(getattr(text, "rms_norm_eps", 1e-6))
        self._hidden = config.model_config.get_hidden_size()
        group = get_tp_group()
        self._communicator = group.device_communicator
        if not isinstance(self._communicator, SpanningCollectives):
            return
        compilation = config.compilation_config
        ends = [*(compilation.compile_ranges_endpoints or ()), *(compilation.compile_sizes or ())]
        fewest = min(ends, default=1)
        if not self._takes(fewest):
            _LOG.info(
                "group %s: all-reduce, addition and RMSNorm stay three operations: %s",
                group.unique_name,
                self._why_three(fewest),
            )
            return
        # A second pattern without the new residual, which the last norm of a model does not use.
        for parts in (_both, _normed):
            self.register(_Fused(parts, self._epsilon, self.model_dtype, group.unique_name))

    def _takes(self, rows: int) -> bool:
        return bool(self._communicator.fuses((rows, self._hidden), self.model_dtype))

    def _why_three(self, fewest: int) -> str:
        """Returns the unmet condition of the fused operation.

        Args:
            fewest: number of rows at the end of the smallest range of compilation.
        """
        from r2serve.engines.vllm import fusion_range  # needs Triton, unlike this pass on the CPU

        ranks, nodes = self._communicator.world_size, len(set(self._communicator.r2ccl.nodes))
        if nodes < ranks:
            return f"{ranks} ranks are on {nodes} nodes; each rank must be on a separate node"
        limits = (Config.from_env().gpu_staging_bytes, ranks, self._hidden, self.model_dtype)
        return fusion_range.exceeded(*limits) or (
            f"the smallest range of compilation ends at {fewest} rows; the limit is "
            f"{fusion_range.most_rows(*limits)} (R2CCL_GPU_STAGING_BYTES / ranks / bytes of a row)"
        )

    def is_applicable_for_range(self, compile_range: Range) -> bool:
        """Whether the pass fuses every graph of the range, from the fewest rows to the most."""
        return bool(self._pattern_replacements) and self._takes(compile_range.end)

    def __call__(self, graph: torch.fx.Graph) -> None:
        super().__call__(graph)
        _LOG.info(
            "all-reduce, addition and RMSNorm are one operation at %d places of a compiled graph",
            self.matched_count,
        )

    def uuid(self) -> str:
        registered = f"{len(self._pattern_replacements)} {self._epsilon} {self.model_dtype}"
        return f"{super().uuid()} {registered}"


def _both(made: Pair) -> Pair:
    return made[0], made[1]


def _normed(made: Pair) -> torch.Tensor:
    return made[0]


class R2cclPassManager(PostGradPassManager):  # type: ignore[misc]
    """vLLM's pass manager with the pass above, ahead of passes with other fusions of a norm."""

    def configure(self, config: VllmConfig) -> None:
        super().configure(config)
        with set_current_vllm_config(config, check_compile=False):
            ours = AllReduceAddRmsNormPass(config)
        first = sum(isinstance(each, NoOpEliminationPass) for each in self.passes[:1])
        self.passes.insert(first, ours)
        if not current_platform.is_cuda_alike():
            self.fix_functionalization = _LeftAsItIs(config)


class _LeftAsItIs(VllmInductorPass):  # type: ignore[misc]
    """A replacement of vLLM's last pass, which fails without operations specific to GPUs.

    Inductor itself replaces the remaining functionalised operations by in-place operations.
    """

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Leaves the graph as it is."""
