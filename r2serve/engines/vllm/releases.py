"""The tested releases of vLLM."""

from __future__ import annotations

import functools
import logging

_LOG = logging.getLogger(__name__)

TESTED = ">=0.32,<0.34"
"""Equal to the extra ``vllm`` of pyproject.toml."""


def is_tested(version: str) -> bool:
    """Whether a version of vLLM is in the tested range; other texts (``dev``) are not."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        return SpecifierSet(TESTED).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


@functools.cache  # one line a process
def warn_if_untested(version: str) -> None:
    """Log a warning where ``version`` of vLLM is out of the tested range.

    A refusal would stop users of a release without problems.
    """
    if not is_tested(version):
        _LOG.warning(
            "vLLM %s is out of the range that --distributed-backend r2ccl was tested with "
            "(vllm%s): the engine may fail at start or in its first step; "
            "install a release of that range, or use --distributed-backend default",
            version,
            TESTED,
        )
