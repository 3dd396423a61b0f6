"""The supported releases of engines; a warning for every other release.

Every row of an engine's ``relies_on.py`` holds in the sources of the tested releases.
"""

from __future__ import annotations

import functools
import logging

_LOG = logging.getLogger(__name__)

SUPPORTED = {"vllm": ">=0.32,<0.34", "sglang": ">=0.5.23,<0.5.24"}
"""Equal to the extras of pyproject.toml."""


def is_supported(engine: str, version: str) -> bool:
    """Whether a version of an engine is in the supported range; other texts (``dev``) are not."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        return SpecifierSet(SUPPORTED[engine]).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


@functools.cache  # one line a process
def warn_if_unsupported(engine: str, version: str) -> None:
    """Logs a warning if ``version`` of an engine is out of the supported range.

    A warning is enough: a refusal would stop users whose release works.
    """
    if not is_supported(engine, version):
        _LOG.warning(
            "%s %s is out of the range supported by --distributed-backend r2ccl "
            "(%s%s): the engine may fail at start or in its first step; "
            "install a release of that range, or use --distributed-backend default",
            {"vllm": "vLLM", "sglang": "SGLang"}[engine],
            version,
            engine,
            SUPPORTED[engine],
        )
