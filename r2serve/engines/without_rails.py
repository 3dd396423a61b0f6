"""Tells sidecars of an engine without rails, which is ready and has nothing to protect.

Groups inside one node use the engine's own path. Their workers have no communicator of r2ccl, and
so no journal. A sidecar would take such an engine for absent, and its probe would keep all requests
away. A process of the engine therefore tells once that the engine is up.
"""

from __future__ import annotations

import logging
import os

from r2serve.observe.unobserved import Note, Unobserved
from r2serve.observe.watch import Watch

_LOG = logging.getLogger(__name__)

WHY = "no worker of this engine on this node has a rail"

_told: Unobserved | None = None


def tell_once(label: str) -> None:
    """Tells sidecars that this engine serves without rails, if so; call once the engine is up."""
    global _told
    folder = os.environ.get("R2CCL_JOURNAL_DIR")
    if _told is not None or not folder:
        return
    engine = os.environ.get("R2CCL_SERVING_ENGINE", "")
    try:
        if _is_known(Watch(folder, engine=engine)):
            return
    except Exception:  # noqa: BLE001  no engine ends because of an observer
        _LOG.exception("%s is not known to be without rails; sidecars may not see it", label)
        return
    _LOG.info("%s has nothing to protect: %s", label, WHY)
    try:
        _told = Unobserved(folder, Note(os.getpid(), label, engine, WHY, has_rails=False))
    except (OSError, RuntimeError) as error:  # RuntimeError: no thread
        _LOG.warning("sidecars do not see %s and answer that no engine runs: %s", label, error)


def _is_known(watch: Watch) -> bool:
    """Whether a process of the engine has a journal, or has told already that it has none."""
    watch.look()
    return bool(watch.live() or watch.unobserved or watch.unprotected)
