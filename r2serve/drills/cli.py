"""``r2serve drill``: fault a rail of this node for a while, on purpose."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import click

from r2serve.drills import client
from r2serve.drills.client import WorkerEnd
from r2serve.drills.order import ENGINE, LONGEST_S, SYSTEM, DrillError
from r2serve.drills.system import Guardian, SystemFault, plan
from r2serve.faults import canonical, note_on
from r2serve.journal_folder import folder_option, journal_folder

_UNITS_S = {"ms": 1e-3, "s": 1.0, "m": 60.0}


class Duration(click.ParamType):  # type: ignore[type-arg]
    """``500ms``, ``10s``, ``2m`` or a number of seconds."""

    name = "duration"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        if isinstance(value, float):
            return value
        text = str(value)
        unit = next((unit for unit in _UNITS_S if text.endswith(unit)), "")
        try:
            seconds = float(text.removesuffix(unit)) * _UNITS_S.get(unit, 1.0)
        except ValueError:
            self.fail(f"{text!r} is no duration such as 500ms, 10s or 2m", param, ctx)
        if not 0.01 <= seconds <= LONGEST_S:
            self.fail(f"{text!r} must be from 10ms to {LONGEST_S / 60:g}m", param, ctx)
        return seconds


class _Kinds(click.Group):
    """Takes words of earlier releases for kinds, too, and tells that they go."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        found = super().get_command(ctx, canonical(cmd_name))
        if found is not None and (note := note_on(cmd_name)):
            click.echo(note, err=True)
        return found


@click.group(name="drill", cls=_Kinds)
def command() -> None:
    """Fault a rail of this node for a while, on purpose.

    Only workers that were started with drills enabled (R2CCL_DRILLS=on) take any. The fault is
    recorded as injected, and undone when its time is over, also if this command is killed.
    """


def _options(function: Callable[..., None]) -> Callable[..., None]:
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
        folder_option,
        click.option(
            "--by",
            type=click.Choice(["auto", SYSTEM, ENGINE]),
            default="auto",
            show_default=True,
            help="What makes the fault: the system (ip, nft, tc; as root, where the port is), or "
            "the workers' engines. auto: the system where it can.",
        ),
        click.option("--peer", default="", help="Of the rail to one peer, as `rank 1`. By engine."),
        click.option(
            "--for", "seconds", type=Duration(), default=5.0, help="500ms, 10s, 2m.  Default: 5s."
        ),
        click.option("--rail", required=True, help="As `r2serve rails` names it: rail1@node0."),
    ):
        function = option(function)
    return function


@command.command(name="carrier_loss")
@_options
def carrier_loss(**given: Any) -> None:
    """The port loses its carrier."""
    _drill("carrier_loss", **given)


@command.command(name="black_hole")
@_options
def black_hole(**given: Any) -> None:
    """A black hole: the carrier is there, and nothing gets through."""
    _drill("black_hole", **given)


@command.command()
@click.option("--mbit", default=10.0, show_default=True, help="Mbit/s that it still sends.")
@_options
def slow(**given: Any) -> None:
    """The port sends slowly."""
    _drill("slow", **given)


@command.command()
@click.option(
    "--period",
    "period_s",
    type=Duration(),
    default=1.0,
    help="Half of it lost, half of it not.  Default: 1s.",
)
@_options
def flap(**given: Any) -> None:
    """The port loses its carrier again and again."""
    _drill("flap", **given)


@command.command()
@_options
def corrupt(**given: Any) -> None:
    """What it sends has wrong checksums (needs R2CCL_CHECKSUM=on)."""
    _drill("corrupt", **given)


def _drill(
    kind: str,
    rail: str,
    seconds: float,
    peer: str,
    by: str,
    journal_dir: Path | None,
    as_json: bool,
    mbit: float = 10.0,
    period_s: float = 1.0,
) -> None:
    signal.signal(signal.SIGTERM, _interrupt)
    folder = journal_folder(journal_dir)
    try:
        workers = client.find(folder, rail)
        fault, why = _by_system(kind, workers, by, peer, seconds, mbit, period_s)
        order = {
            "kind": kind,
            "rail": rail,
            "seconds": seconds,
            "peer": peer,
            "mbit": mbit,
            "period_s": period_s,
        }
        views = client.start(workers, **order, by=SYSTEM if fault else ENGINE)
        _tell(views, len(workers), why, as_json)
        try:
            undone = _wait(fault, seconds)
        finally:
            _end(folder, views[0]["id"])
    except (DrillError, OSError) as error:
        raise click.ClickException(str(error)) from error
    if not undone:
        raise click.ClickException(f"the fault of {rail} could not be undone")


def _by_system(
    kind: str,
    workers: list[WorkerEnd],
    by: str,
    peer: str,
    seconds: float,
    mbit: float,
    period_s: float,
) -> tuple[SystemFault | None, str]:
    """How the system makes the fault, or None and why the engine is to."""
    if by == ENGINE:
        return None, ""
    try:
        if peer:
            raise DrillError("peer: the system faults a port, and so the rails to all peers")
        end = workers[0].rails[0]
        ports = {(one["device"], _host(one)) for worker in workers for one in worker.rails}
        if len(ports) > 1:
            raise DrillError(f"by: {end['name']} is not the same port to all workers here")
        if end["kind"] != "tcp":
            raise DrillError(f"by: the system cannot fault what is {end['kind']}")
        port = str(end["device"]), str(end["local"])
        return plan(kind, *port, seconds, mbit=mbit, period_s=period_s), ""
    except DrillError as error:
        if by == SYSTEM:
            raise
        return None, str(error)


def _host(rail: dict[str, Any]) -> str:
    return str(rail["local"]).rpartition(":")[0]


def _wait(fault: SystemFault | None, seconds: float) -> bool:
    """Until the drill's time is over, or this command is interrupted."""
    if fault is None:
        try:
            time.sleep(seconds)
        except KeyboardInterrupt:
            return True
        return True
    guardian = None
    try:
        guardian = Guardian(fault)
        return guardian.wait()
    except KeyboardInterrupt:
        return guardian.end() if guardian else True


def _end(folder: Path, identity: str) -> None:
    try:
        client.end(folder, identity)
    except DrillError:
        return  # its time was over


def _tell(views: list[dict[str, Any]], workers: int, why: str, as_json: bool) -> None:
    view = views[0]
    if as_json:
        click.echo(json.dumps(view | {"workers": workers}))
        return
    click.echo(
        f"drill {view['id']}: {view['kind']} of {view['rail']} for {view['seconds']:g} s by the "
        f"{view['by']}, at {workers} worker{'s' if workers > 1 else ''}"
        + (f" ({why})" if why else "")
    )


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
