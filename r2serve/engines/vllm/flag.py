"""The flag ``--distributed-backend {default,r2ccl}`` and how its value reaches every process.

The API process parses it; engine core and workers are children and inherit the environment.  Ray's
first executor (vLLM 0.32 alone) copies the variables in :data:`CARRIED` to workers, the second
executor copies the whole environment.  Without a command line (``vllm.LLM``) the variable, or
``additional_config={"r2serve": {"distributed_backend": "r2ccl"}}``, makes the choice.
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
    """Whether r2ccl was asked for."""
    return os.environ.get(VARIABLE) == "r2ccl"


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the flag in an argument group of its own (shown by ``vllm serve --help=r2serve``)."""
    if any("--distributed-backend" in action.option_strings for action in parser._actions):
        return  # vLLM may prepare one parser twice
    group = parser.add_argument_group(
        "r2serve", "Collectives that outlive the loss of a NIC, cable or link."
    )
    group.add_argument(
        "--distributed-backend",
        choices=CHOICES,
        default="default",
        action=_CarryFlag,
        help="What carries the collectives of groups that span nodes: the engine's own "
        "communicator, or r2ccl, which moves traffic to another rail when one dies. "
        "r2ccl is set up by R2CCL_* variables (see `r2serve config`).",
    )
    group.add_argument(
        "--r2serve-sidecar",
        metavar="[HOST:]PORT",
        action=_CarrySidecar,
        help="Start the sidecar (probes, metrics, dashboard) there, beside the engine, with "
        "--distributed-backend r2ccl. HOST: 127.0.0.1 unless given.",
    )


class _CarrySidecar(argparse.Action):
    """Puts the address where the engine's first process finds it."""

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
    """Puts the value where child processes find it, and refuses a wrong ``R2CCL_*`` at once."""

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
    """Take the choice from ``additional_config`` where neither flag nor variable made one.

    Raises:
        ConfigError: it names a backend that does not exist.
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
    """Stop before any worker is started if the flag's variable or an option is wrong.

    Raises:
        ConfigError: names the field or variable, its value and what would be right.
    """
    value = os.environ.get(VARIABLE, "default")
    if value not in CHOICES:
        raise ConfigError(f"{VARIABLE} is {value!r}: must be {' or '.join(CHOICES)}")
    if value == "r2ccl":
        keep_journals()
        Config.from_env()


def keep_journals() -> None:
    """In memory, in a folder of this user, unless the environment says where, or nowhere.

    Of each process, since another node may have inherited the choice and not the folder.
    """
    folder = default_folder()
    if os.environ.get("R2CCL_JOURNAL_DIR", str(folder)) != str(folder):
        return
    os.environ.pop("R2CCL_JOURNAL_DIR", None)
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        _LOG.warning("no journals: %s", error)
        return
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        _LOG.warning("no journals: %s belongs to somebody else", folder)
        return
    os.environ["R2CCL_JOURNAL_DIR"] = str(folder)


def log_with_vllm(level: str) -> None:
    """Send r2serve's log lines where vLLM's go; vLLM's workers set up only their own logger."""
    ours, theirs = logging.getLogger("r2serve"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.propagate = not theirs.handlers
    ours.setLevel(level.upper())
