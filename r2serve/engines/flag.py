"""The flag ``--distributed-backend {default,r2ccl}`` of every engine.

The engine's first process parses the flag and stores the choice in the environment; child processes
inherit the environment. Without a command line the choice comes from the variable
:data:`VARIABLE`. This module imports no engine.
"""

from __future__ import annotations

import argparse
import logging
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from r2serve import cpus
from r2serve.config import Config
from r2serve.engines import sidecar
from r2serve.errors import ConfigError
from r2serve.journal_folder import default_folder
from r2serve.variables import BACKEND

_LOG = logging.getLogger(__name__)

VARIABLE = BACKEND
SPANS_VARIABLE = "R2SERVE_SPANS_NODES"
"""``1``: groups of this engine may span nodes."""
CHOICES = ("default", "r2ccl")

of_command_line = False
"""Whether this process has a command line of an engine, whose exit status a supervisor reads."""


def active() -> bool:
    """Whether the user has chosen r2ccl."""
    return os.environ.get(VARIABLE) == "r2ccl"


def spans_nodes() -> bool:
    """Whether the user has chosen r2ccl, and groups of this engine may span nodes."""
    return active() and os.environ.get(SPANS_VARIABLE) == "1"


def add_to(parser: argparse.ArgumentParser, check: Callable[[], object] = Config.from_env) -> None:
    """Adds the flag in a separate argument group of the engine's parser.

    Args:
        check: called for the value ``r2ccl``; raises ConfigError if r2ccl cannot work here.
    """
    if any("--distributed-backend" in action.option_strings for action in parser._actions):
        return  # an engine may prepare the same parser twice
    global of_command_line
    of_command_line = True
    group = parser.add_argument_group(
        "r2serve", "Collectives that survive the loss of a NIC, cable or link."
    )
    group.add_argument(
        "--distributed-backend",
        choices=CHOICES,
        default="default",
        action=_CarryFlag,
        check=check,
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

    def __init__(self, *args: Any, check: Callable[[], object], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._check = check

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        if values == "r2ccl":
            keep_journals()  # options such as drills need the folder
            try:
                self._check()
            except ConfigError as error:
                raise argparse.ArgumentError(self, str(error)) from error
        setattr(namespace, self.dest, values)
        os.environ[VARIABLE] = str(values)


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
        name_engine()
        cpus.hand_down()
        Config.from_env()


def name_engine() -> None:
    """Names this serving engine after its first process, unless the environment names it.

    Later processes inherit the name, which tells the engines of a host apart.
    """
    if not os.environ.get("R2CCL_SERVING_ENGINE"):
        os.environ["R2CCL_SERVING_ENGINE"] = str(os.getpid())


def group_config() -> Config:
    """Returns the configuration of an engine's groups: the environment's, with steps compared.

    ``consensus=auto`` is resolved to ``step``. Every group of an engine takes this configuration,
    because groups share rails only if all options are equal.

    Raises:
        ConfigError: an option is wrong.
    """
    config = Config.from_env()
    return replace(config, consensus="step") if config.consensus == "auto" else config


def keep_journals() -> None:
    """Sets the folder of journals to this user's folder in memory, unless the environment sets it.

    Every process calls this, because another node may inherit the choice without the folder. An
    empty variable means no journals. A folder that cannot be made is no error here: each worker
    warns, and serves without a journal.
    """
    folder = default_folder()
    if os.environ.get("R2CCL_JOURNAL_DIR", str(folder)) != str(folder):
        return
    os.environ.pop("R2CCL_JOURNAL_DIR", None)
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        _LOG.debug("%s cannot be made: %s", folder, error)
    if os.path.lexists(folder):
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            _LOG.warning(
                "journals are disabled: %s must be a folder of this user; r2serve commands do not "
                "see this process",
                folder,
            )
            return
    os.environ["R2CCL_JOURNAL_DIR"] = str(folder)


def log_with(engine: logging.Logger, level: str) -> None:
    """Sends r2serve's log to the handlers of the engine's logger.

    Args:
        engine: the logger that the engine configures in every process; without handlers, records
            go to the root logger.
        level: a level of r2serve's option ``log_level``.
    """
    ours = logging.getLogger("r2serve")
    if not ours.handlers:
        ours.handlers = list(engine.handlers)
        ours.propagate = not engine.handlers
    ours.setLevel(level.upper())
