"""Loaded by each Python interpreter of a command of ``r2serve relay -- COMMAND``.

Torch's listeners move to the virtual address once the interpreter imports ``torch.distributed``.
Without this import the interpreter pays for nothing but this file. Another ``sitecustomize`` of
the environment runs, too.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType

_WATCHED = "torch.distributed"


class _AfterImport:
    """Finds ``torch.distributed`` as Python would, and adds a step after its import."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _WATCHED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        loader = spec.loader if spec is not None else None
        if loader is None:
            return None
        execute = loader.exec_module

        def execute_and_apply(module: ModuleType) -> None:
            execute(module)
            from r2serve.relay.client import Carried
            from r2serve.relay.torch_seams import apply

            carried = Carried.here()
            if carried is not None:
                apply(carried)

        loader.exec_module = execute_and_apply  # type: ignore[method-assign]
        return spec


def _load_the_next() -> None:
    own = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != own]
    this = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":  # Python prints the error, and goes on
            raise
    if this is not None:
        sys.modules.setdefault("sitecustomize", this)


if os.environ.get("R2SERVE_RELAY"):
    sys.meta_path.insert(0, _AfterImport)
_load_the_next()
