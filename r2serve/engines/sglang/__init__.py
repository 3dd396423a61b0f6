"""The SGLang plugin: ``sglang serve MODEL --distributed-backend r2ccl``.

SGLang calls :func:`register` (entry point group ``sglang.srt.plugins``) in every process, before
options are parsed and even without the flag. So this module imports torch, the core or SGLang only
inside functions.
"""

from __future__ import annotations

import multiprocessing

from r2serve.engines import flag


def register() -> None:
    """Registers the hooks; SGLang applies them right after all plugins have registered theirs.

    A child process inherits the choice of the first process, so a child without the choice needs no
    hooks.

    Raises:
        SystemExit: r2ccl was chosen, and a hook cannot be registered. SGLang would only log another
            exception, and serve without resilience.
    """
    if multiprocessing.parent_process() is not None and not flag.active():
        return
    from r2serve.engines.sglang import hooks

    hooks.install()
