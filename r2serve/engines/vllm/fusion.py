"""A pass of vLLM's compiler that puts one operation in the place of three.

An all-reduce over ranks on several nodes, the addition of the residual and the RMSNorm after it
become ``r2serve::all_reduce_add_rms_norm``, which the group's communicator carries out: on a GPU in
one kernel that reads what the ranks sent, on the CPU one after the other.
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
    """(normed, new residual) of the sum over a group of vLLM's; all inputs stay as they are."""
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
    """``parts``: picks what a graph uses of the two results."""

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
    """For the tensor-parallel group, if it spans nodes and its communicator has the operation.

    Elsewhere, and in graphs for more rows than the operation takes, vLLM's own passes find the
    norm as it was, and fuse it with what comes after it.
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
        # The last norm of a model leaves no residual to anybody.
        for parts in (_both, _normed):
            self.register(_Fused(parts, self._epsilon, self.model_dtype, group.unique_name))

    def _takes(self, rows: int) -> bool:
        return bool(self._communicator.fuses((rows, self._hidden), self.model_dtype))

    def _why_three(self, fewest: int) -> str:
        """The condition of the fused operation that is not met.

        Args:
            fewest: rows at the end of the smallest range of compilation.
        """
        from r2serve.engines.vllm import fusion_range  # needs Triton, unlike this pass on the CPU

        ranks, nodes = self._communicator.world_size, len(set(self._communicator.r2ccl.nodes))
        if nodes < ranks:
            return f"{ranks} ranks are on {nodes} nodes; each rank must be on a node of its own"
        limits = (Config.from_env().gpu_staging_bytes, ranks, self._hidden, self.model_dtype)
        return fusion_range.exceeded(*limits) or (
            f"the smallest range of compilation ends at {fewest} rows; the limit is "
            f"{fusion_range.most_rows(*limits)} (R2CCL_GPU_STAGING_BYTES / ranks / bytes of a row)"
        )

    def is_applicable_for_range(self, compile_range: Range) -> bool:
        """Whether each graph of the range, from its fewest rows to its most, is fused."""
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
    """vLLM's, with the pass above before all that would fuse a norm with something else."""

    def configure(self, config: VllmConfig) -> None:
        super().configure(config)
        with set_current_vllm_config(config, check_compile=False):
            ours = AllReduceAddRmsNormPass(config)
        first = sum(isinstance(each, NoOpEliminationPass) for each in self.passes[:1])
        self.passes.insert(first, ours)
        if not current_platform.is_cuda_alike():
            self.fix_functionalization = _LeftAsItIs(config)


class _LeftAsItIs(VllmInductorPass):  # type: ignore[misc]
    """In the place of vLLM's last pass, which asks after operations that only GPUs have, and fails.

    What it would do for its own operations, Inductor does for all that are left.
    """

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Leaves the graph as it is."""
