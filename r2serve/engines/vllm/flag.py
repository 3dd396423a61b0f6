"""The flag ``--distributed-backend {default,r2ccl}``, and its transfer to every process.

The API process parses the flag; engine core and workers inherit the environment. Ray's first
executor (only in vLLM 0.32) copies the variables in :data:`CARRIED` to workers; the second executor
copies the whole environment. Without a command line (``vllm.LLM``) the choice comes from the
variable :data:`VARIABLE` or from
``additional_config={"r2serve": {"distributed_backend": "r2ccl"}}``.
"""

from __future__ import annotations

import argparse
import logging
import os
import stat
from collections.abc import Mapping, Sequence
from typing import Any

from r2serve.config import Config, options
from r2serve.engines.vllm import sidecar
from r2serve.errors import ConfigError
from r2serve.journal_folder import default_folder

_LOG = logging.getLogger(__name__)

VARIABLE = "R2SERVE_DISTRIBUTED_BACKEND"
WORKERS_VARIABLE = "R2SERVE_WORKERS_PER_NODE"
SPANS_VARIABLE = "R2SERVE_SPANS_NODES"
"""``1``: groups of this engine may span nodes."""
CHOICES = ("default", "r2ccl")
SECTION = "r2serve"
CARRIED = (
    VARIABLE,
    WORKERS_VARIABLE,
    SPANS_VARIABLE,
    *(option.variable for option in options()),
)


def active() -> bool:
    """Whether the user has chosen r2ccl."""
    return os.environ.get(VARIABLE) == "r2ccl"


def add_to(parser: argparse.ArgumentParser) -> None:
    """Adds the flag in a separate argument group (shown by ``vllm serve --help=r2serve``)."""
    if any("--distributed-backend" in action.option_strings for action in parser._actions):
        return  # vLLM may prepare the same parser twice
    group = parser.add_argument_group(
        "r2serve", "Collectives that survive the loss of a NIC, cable or link."
    )
    group.add_argument(
        "--distributed-backend",
        choices=CHOICES,
        default="default",
        action=_CarryFlag,
        help="Transport of collectives in groups that span nodes. default: the engine's own "
        "communicator. r2ccl: several rails; traffic moves to another rail when a rail dies. "
        "R2CCL_* variables configure r2ccl (see `r2serve config`).",
    )
    group.add_argument(
        "--r2serve-sidecar",
        metavar="[HOST:]PORT",
        action=_CarrySidecar,
        help="Start the sidecar (probes, metrics, dashboard) at this address, beside the engine. "
        "Needs --distributed-backend r2ccl. Default of HOST: 127.0.0.1.",
    )


class _CarrySidecar(argparse.Action):
    """Stores the address in the environment of the engine's first process."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        try:
            sidecar.address(str(values))
        except ConfigError as error:
            raise argparse.ArgumentError(self, str(error)) from error
        setattr(namespace, self.dest, values)
        os.environ[sidecar.VARIABLE] = str(values)


class _CarryFlag(argparse.Action):
    """Stores the value in the environment for child processes; refuses wrong ``R2CCL_*`` values."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        if values == "r2ccl":
            try:
                Config.from_env()
            except ConfigError as error:
                raise argparse.ArgumentError(self, str(error)) from error
        setattr(namespace, self.dest, values)
        os.environ[VARIABLE] = str(values)


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


def check_environment() -> None:
    """Refuses a wrong variable of the flag or a wrong option, before any worker starts.

    Raises:
        ConfigError: names the field or variable, its value and what would be right.
    """
    value = os.environ.get(VARIABLE, "default")
    if value not in CHOICES:
        raise ConfigError(f"{VARIABLE} is {value!r}: must be {' or '.join(CHOICES)}")
    if value == "r2ccl":
        keep_journals()
        compare_steps()
        Config.from_env()


def compare_steps() -> None:
    """Resolves ``R2CCL_CONSENSUS=auto`` to ``step``, in the environment of this process.

    Every process calls this before its first group, because groups share an engine only if all
    options are equal.
    """
    if os.environ.get("R2CCL_CONSENSUS", "").strip().lower() in ("", "auto"):
        os.environ["R2CCL_CONSENSUS"] = "step"


def keep_journals() -> None:
    """Sets the folder of journals to this user's folder in memory, unless the environment sets it.

    Every process calls this, because another node may inherit the choice without the folder. An
    empty variable means no journals.
    """
    folder = default_folder()
    if os.environ.get("R2CCL_JOURNAL_DIR", str(folder)) != str(folder):
        return
    os.environ.pop("R2CCL_JOURNAL_DIR", None)
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        _LOG.warning("journals are disabled: %s; r2serve commands do not see this process", error)
        return
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        _LOG.warning(
            "journals are disabled: %s must be a folder of this user; r2serve commands do not see "
            "this process",
            folder,
        )
        return
    os.environ["R2CCL_JOURNAL_DIR"] = str(folder)


def log_with_vllm(level: str) -> None:
    """Sends r2serve's log to vLLM's handlers; vLLM's workers configure only their own logger."""
    ours, theirs = logging.getLogger("r2serve"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.propagate = not theirs.handlers
    ours.setLevel(level.upper())
