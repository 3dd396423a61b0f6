"""The top-level command; subcommands load only when called.

The module of a subcommand exposes a click command or group, by default under the name ``command``.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import click

from r2serve.errors import how_to_install

OPERATION, DEVELOPMENT = (
    "Commands for the operation of a node",
    "Commands for tests and measurements",
)


@dataclass(frozen=True)
class LazyCommand:
    """A subcommand not yet loaded: its module, attribute, summary and pip extra."""

    module: str
    summary: str
    extra: str = "torch"
    attribute: str = "command"
    section: str = OPERATION

    def load(self, name: str) -> click.Command:
        try:
            command = getattr(importlib.import_module(self.module), self.attribute)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.split(".")[0] == "r2serve":
                raise
            raise click.ClickException(
                f"`r2serve {name}` needs the module {error.name}; {how_to_install(self.extra)}"
            ) from error
        assert isinstance(command, click.Command)
        return command


SUBCOMMANDS = {
    "bench": LazyCommand(
        "r2serve.bench.cli",
        "Benchmark collectives and kernels against alternatives.",
        "bench",
        section=DEVELOPMENT,
    ),
    "config": LazyCommand("r2serve.cli.config", "Show every option with its current value."),
    "demo": LazyCommand(
        "r2serve.demo.cli",
        "Serve a model on two nodes while rails fail.",
        "vllm",
        section=DEVELOPMENT,
    ),
    "drill": LazyCommand(
        "r2serve.drills.cli", "Inject a fault into a rail of this node, for a limited time."
    ),
    "doctor": LazyCommand(
        "r2serve.cli.topo", "Check this node for problems with rails.", attribute="check"
    ),
    "events": LazyCommand(
        "r2serve.observe.live", "Show rail events of this node's workers.", attribute="events"
    ),
    "journal": LazyCommand("r2serve.observe.cli", "Show the recorded rail events of workers."),
    "nccl": LazyCommand(
        "r2serve.cli.nccl", "Run a command with NCCL over the network plugin (preview)."
    ),
    "plan": LazyCommand(
        "r2serve.cli.plan", "Explain an all-reduce while rails are lost, and predict its time."
    ),
    "rails": LazyCommand(
        "r2serve.observe.live", "Show the rails of this node's workers.", attribute="rails"
    ),
    "relay": LazyCommand(
        "r2serve.relay.cli", "Carry the TCP connections between the nodes of a job over all rails."
    ),
    "sidecar": LazyCommand(
        "r2serve.observe.sidecar.cli", "Serve probes, metrics, rails and events.", "sidecar"
    ),
    "sim": LazyCommand(
        "r2serve.sim.cli",
        "Run whole jobs with random faults in simulated time.",
        section=DEVELOPMENT,
    ),
    "top": LazyCommand(
        "r2serve.observe.live", "Watch rails, collectives and events live.", attribute="top"
    ),
    "topo": LazyCommand(
        "r2serve.cli.topo", "Show NICs, rails and failover chains of this node.", attribute="topo"
    ),
}


class LazyGroup(click.Group):
    """A click group with lazily loaded subcommands."""

    def __init__(self, *args: Any, lazy: Mapping[str, LazyCommand], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *self.lazy})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.lazy:
            return super().get_command(ctx, cmd_name)
        groups = [self.name or ""] if ctx.parent else []
        return self.lazy[cmd_name].load(" ".join([*groups, cmd_name]))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        names = self.list_commands(ctx)
        room = formatter.width - 6 - max(map(len, names))
        sections: dict[str, list[tuple[str, str]]] = {}
        for name in names:
            # A group below the top has commands of one section.
            known = ctx.parent is None and name in self.lazy
            section = self.lazy[name].section if known else "Commands"
            sections.setdefault(section, []).append((name, self._summary(ctx, name, room)))
        for section in sorted(sections, key=[DEVELOPMENT].count):
            with formatter.section(section):
                formatter.write_dl(sections[section])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]  # click takes the words out of the list while it looks for options
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = get_close_matches(name, self.list_commands(ctx), n=1)
            if not near or "Did you mean" in error.format_message():
                raise
            text = f"{error.message} Did you mean {near[0]!r}?"
            raise click.UsageError(text, ctx) from None

    def _summary(self, ctx: click.Context, name: str, room: int) -> str:
        if name in self.lazy:
            return self.lazy[name].summary
        command = self.get_command(ctx, name)
        assert command is not None
        return command.get_short_help_str(room)


@click.group(
    cls=LazyGroup, lazy=SUBCOMMANDS, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(package_name="r2serve", message="r2serve %(version)s")
def main() -> None:
    """Keep LLM serving running when a NIC, cable or link dies in the middle of a decode step."""
