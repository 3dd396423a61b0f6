"""``r2serve nccl``: runs a command whose NCCL takes the network plugin."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from r2serve import children
from r2serve.cli import nccl_ranks
from r2serve.engines.flag import keep_journals
from r2serve.errors import ConfigError
from r2serve.observe import files

LIBRARY = "libnccl-net-r2ccl.so"
FIXED = {
    "NCCL_NET": nccl_ranks.NETWORK,
    "NCCL_NET_PLUGIN_REF_COUNT": "1",
    "NCCL_PROTO": "^LL128",
    "NCCL_RUNTIME_CONNECT": "0",
    "NCCL_SET_THREAD_NAME": "1",
}
"""Variables of NCCL beside the path of the library; docs/nccl.md has the reasons."""


def library() -> Path:
    """Returns the path of the installed plugin.

    Raises:
        ConfigError: this installation has no plugin.
    """
    core = importlib.util.find_spec("r2serve._core")
    folder = Path(core.origin).parent if core is not None and core.origin else Path()
    if core is None or not (folder / LIBRARY).is_file():
        raise ConfigError(
            f"{LIBRARY} is not beside r2serve._core: this installation was built without the "
            "plugin; install r2serve again, or build the plugin with `make netplugin`"
        )
    return folder / LIBRARY


def variables(present: Mapping[str, str], path: Path) -> dict[str, str]:
    """Returns the variables with which NCCL takes the plugin at ``path``.

    A protocol that ``present`` sets stays, if it leaves LL128 out.

    Raises:
        ConfigError: ``present`` has another value of a variable.
    """
    wanted = {"NCCL_NET_PLUGIN": str(path), **FIXED}
    protocols = present.get("NCCL_PROTO", "")
    if protocols and not _has_ll128(protocols):
        wanted["NCCL_PROTO"] = protocols
    for name, value in wanted.items():
        given = present.get(name, value)
        if given.lower() != value.lower():
            raise ConfigError(
                f"{name} is {given!r}: must be unset, or {value!r} for the network plugin"
            )
    return wanted


def _has_ll128(protocols: str) -> bool:
    """Whether a value of NCCL_PROTO allows LL128, for all functions of NCCL or for some.

    The value has rules between ``;``. A rule has names, or names to leave out after ``^``, for all
    functions, or for the functions before its ``:``. Without a rule for all functions, NCCL chooses
    the protocol of the others.
    """
    rules = [rule.strip().rpartition(":") for rule in protocols.split(";") if rule.strip()]
    return all(colon for _, colon, _ in rules) or any(_names_ll128(names) for _, _, names in rules)


def _names_ll128(names: str) -> bool:
    named = {word.strip().upper() for word in names.lstrip("^").split(",")}
    return ("LL128" in named) != names.startswith("^")


def run(argv: Sequence[str], env: Mapping[str, str], check: bool) -> int:
    """Runs a command and returns its exit status, or 70 after a rank without the plugin.

    check: look at the processes of the command; False: the command takes the place of this process.

    Raises:
        ConfigError: the command cannot be started.
    """
    if check:
        with children.running(argv, env) as command:
            return nccl_ranks.watched(command, lambda text: click.echo(text, err=True))
    try:
        os.execvpe(argv[0], list(argv), dict(env))
    except OSError as error:
        raise ConfigError(f"COMMAND: {argv[0]}: {error.strerror}; must be a program") from error


def _keep_journals() -> None:
    """Chooses the folder of journals as engines do, and deletes old journals there."""
    keep_journals()
    folder = os.environ.get("R2CCL_JOURNAL_DIR")
    if folder:
        with contextlib.suppress(OSError):  # the plugin warns, and runs without a journal
            files.prune(folder, files.KEPT)


@click.command()
@click.option("--show", is_flag=True, help="Print the variables for a shell, and run nothing.")
@click.option(
    "--check/--no-check",
    default=True,
    show_default=True,
    help="End COMMAND with status 70 if NCCL of a process of it has a communicator without the "
    f"plugin for {nccl_ranks.WITHIN_S:g} s; warn of a process that has lost NCCL_NET.",
)
@click.argument("argv", metavar="[-- COMMAND…]", nargs=-1, type=click.UNPROCESSED)
def command(show: bool, check: bool, argv: tuple[str, ...]) -> None:
    """Run COMMAND with NCCL over r2serve's network plugin (a preview, over TCP).

    Sets six variables of NCCL. A rank without the plugin then fails at its start, because NCCL_NET
    names the only network. A rank that has lost the variables is found by its process. Use the same
    on every node. The exit status is that of COMMAND.
    """
    if show == bool(argv):
        raise click.UsageError("give either --show or a COMMAND")
    try:
        wanted = variables(os.environ, library())
        if not show:
            _keep_journals()
            raise SystemExit(run(argv, {**os.environ, **wanted}, check))
    except ConfigError as error:
        raise click.ClickException(str(error)) from error
    for name, value in wanted.items():
        click.echo(f"export {name}={shlex.quote(value)}")
