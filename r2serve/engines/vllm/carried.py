"""Variables that reach every process of vLLM, and the choice of r2ccl without a command line.

Ray's first executor (only in vLLM 0.32) copies the variables in :data:`CARRIED` to workers; the
second executor copies the whole environment. Without a command line (``vllm.LLM``) the choice comes
from the flag's variable or from
``additional_config={"r2serve": {"distributed_backend": "r2ccl"}}``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from r2serve.config import options
from r2serve.engines.flag import CHOICES, SPANS_VARIABLE, VARIABLE
from r2serve.errors import ConfigError
from r2serve.variables import MANAGEMENT, RELAY

WORKERS_VARIABLE = "R2SERVE_WORKERS_PER_NODE"
SECTION = "r2serve"
CARRIED = (
    VARIABLE,
    WORKERS_VARIABLE,
    SPANS_VARIABLE,
    RELAY,
    MANAGEMENT,
    *(option.variable for option in options()),
)


def read_additional_config(additional_config: object) -> None:
    """Takes the choice from ``additional_config`` if flag and variable are absent.

    Raises:
        ConfigError: the named backend does not exist.
    """
    if VARIABLE in os.environ or not isinstance(additional_config, Mapping):
        return
    section = additional_config.get(SECTION)
    if section is None:
        return
    value = section.get("distributed_backend") if isinstance(section, Mapping) else section
    if value not in CHOICES:
        raise ConfigError(
            f"additional_config[{SECTION!r}] is {section!r}: must be "
            '{"distributed_backend": "default"} or {"distributed_backend": "r2ccl"}'
        )
    os.environ[VARIABLE] = value
