"""r2serve's step of SGLang's configuration, in the first process, before schedulers start.

The step checks options, turns off everything that would carry collectives around r2ccl, and starts
the sidecar.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from r2serve.config import Config
from r2serve.engines import flag, releases, sidecar
from r2serve.engines.sglang import node_values
from r2serve.errors import ConfigError

_LOG = logging.getLogger(__name__)

PCIE_VARIABLE = "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE"
BYPASSES: dict[str, Any] = {
    "disable_custom_all_reduce": True,
    "enable_mscclpp": False,
    "enable_torch_symm_mem": False,
    "enable_symm_mem": False,
    "enforce_disable_flashinfer_allreduce_fusion": True,
    "flashinfer_allreduce_fusion_backend": None,
    "pre_warm_nccl": False,
}
"""Options of SGLang that carry collectives around r2ccl, with the values that prevent this."""
_WAY_OUT = "or --distributed-backend default, without failover"


def resolve(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Runs SGLang's own step, then r2serve's.

    Args:
        server_args: SGLang's ServerArgs.
        previous: SGLang's own step.

    Raises:
        ConfigError: names an option, its value and what would be right.
    """
    previous(server_args)
    if not flag.active():
        _compare_without_flag(server_args)
        sidecar.say_if_useless()
        return
    flag.check_environment()
    import sglang
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    releases.warn_if_unsupported("sglang", sglang.__version__)
    options = resolving_view(server_args)
    refuse(options)
    spans = options.nnodes > 1 or Config.from_env().node == "per-rank"
    os.environ[flag.SPANS_VARIABLE] = str(int(spans))
    if spans:
        from r2serve.engines import rails  # loads the core

        rails.check()
        changed = changes(options)
        if changed:
            declare_resolution(server_args, "r2serve", **changed)
        if os.environ.get(PCIE_VARIABLE, "0").lower() not in ("", "0", "false"):
            changed[PCIE_VARIABLE] = os.environ[PCIE_VARIABLE] = "0"
        if changed:
            settings = ", ".join(f"{name}={value}" for name, value in changed.items())
            _LOG.info("r2ccl carries collectives between nodes, so r2serve sets %s", settings)
        warn(options)
    else:
        _LOG.info("the engine is inside one node: SGLang's own path carries all groups")
    node_values.compare_once(options)
    sidecar.start_once()


def _compare_without_flag(server_args: Any) -> None:
    """Compares the nodes where this one does without r2ccl, and starts under any SGLang."""
    try:
        from sglang.srt.arg_groups.overrides import resolving_view

        node_values.compare_once(resolving_view(server_args))
    except (ImportError, AttributeError) as error:
        _LOG.debug("the nodes of this engine are not compared: %s", error)


def changes(options: Any) -> dict[str, Any]:
    """Returns the options to change so that no collective bypasses r2ccl."""
    return {
        name: value for name, value in BYPASSES.items() if getattr(options, name, value) != value
    }


def refuse(options: Any) -> None:
    """Refuses options whose schedulers would run without r2serve's hooks.

    Raises:
        ConfigError: names option, value and what would be right.
    """
    if options.use_ray:
        raise ConfigError(
            "--use-ray is True: SGLang's Ray actors load no plugins, so their groups would have no "
            f"failover; --use-ray must be left out, {_WAY_OUT}"
        )
    if options.elastic_ep_backend not in (None, "none"):
        raise ConfigError(
            f"--elastic-ep-backend is {options.elastic_ep_backend!r}, which replaces the backend "
            f"of every group; --elastic-ep-backend must be left out, {_WAY_OUT}"
        )


def warn(options: Any) -> None:
    """Logs the traffic between nodes that r2ccl does not carry."""
    if options.moe_a2a_backend != "none":
        _LOG.warning(
            "--moe-a2a-backend %s exchanges tokens between experts without r2ccl: no failover for "
            "this exchange; --moe-a2a-backend none has failover",
            options.moe_a2a_backend,
        )
    if options.disaggregation_mode != "null":
        _LOG.warning(
            "--disaggregation-mode %s transfers the KV cache without r2ccl: no failover for this "
            "transfer",
            options.disaggregation_mode,
        )
    if options.attn_dp_size > 1:
        _LOG.warning(
            "--attn-dp-size %d sends requests between nodes by ZMQ over TCP, without r2ccl: the "
            "loss of the management NIC stops new requests",
            options.attn_dp_size,
        )
