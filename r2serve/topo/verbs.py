"""State of libibverbs and pyverbs; either may be missing."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from r2serve import _core
from r2serve.errors import R2cclError

_DEBIAN = "/usr/lib/python3/dist-packages"
_MTU = {1: 256, 2: 512, 3: 1024, 4: 2048, 5: 4096}


def library_state() -> str:
    """Returns ``ok``, or the reason why the core cannot use libibverbs."""
    try:
        _core.verbs_devices()
    except R2cclError as error:
        return str(error)
    return "ok"


def pyverbs_device() -> ModuleType | None:
    """Returns the module ``pyverbs.device``, from this environment or from the distribution."""
    return _load_pyverbs()[0]


def pyverbs_state() -> str:
    """Returns ``ok``, or the reason why pyverbs cannot be loaded."""
    return _load_pyverbs()[1]


def _load_pyverbs() -> tuple[ModuleType | None, str]:
    reasons = []
    for path in ("", _DEBIAN):
        if path and not (Path(path) / "pyverbs").is_dir():
            continue
        if path and path not in sys.path:
            sys.path.append(path)  # last, so that nothing in this environment is hidden
        try:
            return importlib.import_module("pyverbs.device"), "ok"
        except ImportError as error:
            reasons.append(str(error) + (f" (with {path})" if path else ""))
    return None, "; ".join(reasons)


def describe(device: str, port: int) -> dict[str, Any] | None:
    """Returns firmware, limits and MTUs of the port, or an ``error``; None without pyverbs."""
    module = pyverbs_device()
    if module is None:
        return None
    try:
        with module.Context(name=device) as context:
            limits = context.query_device()
            state = context.query_port(port)
            return {
                "firmware": str(limits.fw_version),
                "max_qp": int(limits.max_qp),
                "max_mr_bytes": int(limits.max_mr_size),
                "max_qp_wr": int(limits.max_qp_wr),
                "active_mtu": _MTU.get(int(state.active_mtu), 0),
                "max_mtu": _MTU.get(int(state.max_mtu), 0),
            }
    except importlib.import_module("pyverbs.pyverbs_error").PyverbsError as error:
        return {"error": str(error)}
