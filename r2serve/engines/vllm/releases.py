"""The supported releases of vLLM: every row of ``patches.py`` holds in the sources of each."""

from __future__ import annotations

import functools
import logging

_LOG = logging.getLogger(__name__)

SUPPORTED = ">=0.32,<0.34"
"""Equal to the extra ``vllm`` of pyproject.toml."""


def is_supported(version: str) -> bool:
    """Whether a version of vLLM is in the supported range; other texts (``dev``) are not."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        return SpecifierSet(SUPPORTED).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


@functools.cache  # one line a process
def warn_if_unsupported(version: str) -> None:
    """Logs a warning if ``version`` of vLLM is out of the supported range.

    A warning is enough: a refusal would stop users whose release works.
    """
    if not is_supported(version):
        _LOG.warning(
            "vLLM %s is out of the range supported by --distributed-backend r2ccl "
            "(vllm%s): the engine may fail at start or in its first step; "
            "install a release of that range, or use --distributed-backend default",
            version,
            SUPPORTED,
        )
