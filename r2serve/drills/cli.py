"""``r2serve drill``: injects a fault into a rail of this node, for a limited time."""

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
from r2serve.drills.order import ENGINE, LONGEST_S, SYSTEM, SYSTEM_KINDS, DrillError
from r2serve.drills.system import Guardian, SystemFault, plan
from r2serve.faults import canonical, note_on
from r2serve.journal_folder import folder_option, journal_folder
from r2serve.terminal import FiniteRange

_UNITS_S = {"ms": 1e-3, "s": 1.0, "m": 60.0}


class Duration(click.ParamType):  # type: ignore[type-arg]
    """A duration: ``500ms``, ``10s``, ``2m`` or a number of seconds."""

    name = "duration"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        if isinstance(value, float):
            return value
        text = str(value)
        unit = next((unit for unit in _UNITS_S if text.endswith(unit)), "")
        try:
            seconds = float(text.removesuffix(unit)) * _UNITS_S.get(unit, 1.0)
        except ValueError:
            self.fail(f"{text!r} must be a duration such as 500ms, 10s or 2m", param, ctx)
        if not 0.01 <= seconds <= LONGEST_S:
            self.fail(f"{text!r} must be from 10ms to {LONGEST_S / 60:g}m", param, ctx)
        return seconds


class _Kinds(click.Group):
    """Accepts deprecated names of fault kinds, too, and prints a deprecation note."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        found = super().get_command(ctx, canonical(cmd_name))
        if found is not None and (note := note_on(cmd_name)):
            click.echo(note, err=True)
        return found


@click.group(name="drill", cls=_Kinds)
def command() -> None:
    """Inject a fault into a rail of this node, for a limited time.

    Only workers started with R2CCL_DRILLS=on accept drills. The journal marks the fault as
    injected. The fault ends after the given time, even if this command is killed.
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
            help="Origin of the fault. system: the operating system (ip, nft, tc; needs root and "
            "the port's network namespace). engine: the workers. auto: system if possible.",
        ),
        click.option(
            "--peer",
            default="",
            help="Fault only the rail to this peer, such as `rank 1`. Needs a fault by the engine.",
        ),
        click.option(
            "--for",
            "seconds",
            type=Duration(),
            default=5.0,
            help="Duration of the fault, such as 500ms, 10s or 2m. Default: 5s.",
        ),
        click.option(
            "--rail",
            required=True,
            help="Name of the rail in `r2serve rails`, such as rail1@node0.",
        ),
    ):
        function = option(function)
    return function


@command.command(name="carrier_loss")
@_options
def carrier_loss(**given: Any) -> None:
    """Take the port's carrier away."""
    _drill("carrier_loss", **given)


@command.command(name="black_hole")
@_options
def black_hole(**given: Any) -> None:
    """Drop all packets of the port; the carrier stays up."""
    _drill("black_hole", **given)


@command.command(name="egress_refused")
@_options
def egress_refused(**given: Any) -> None:
    """Drop packets in this node's kernel, before the port; arriving packets pass."""
    _drill("egress_refused", **given)


@command.command()
@click.option(
    "--mbit",
    type=FiniteRange(0, min_open=True),
    default=10.0,
    show_default=True,
    help="Remaining send rate in Mbit/s.",
)
@_options
def slow(**given: Any) -> None:
    """Limit the port's send rate."""
    _drill("slow", **given)


@command.command()
@click.option(
    "--period",
    "period_s",
    type=Duration(),
    default=1.0,
    help="Period of the flaps; the port has no carrier in half of each period. Default: 1s.",
)
@_options
def flap(**given: Any) -> None:
    """Take the port's carrier away and bring it back, repeatedly."""
    _drill("flap", **given)


@command.command()
@_options
def corrupt(**given: Any) -> None:
    """Send chunks with wrong checksums (needs R2CCL_CHECKSUM=on)."""
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
        raise click.ClickException(
            f"rail {rail}: the fault could not be undone; restore the port by hand"
        )


def _by_system(
    kind: str,
    workers: list[WorkerEnd],
    by: str,
    peer: str,
    seconds: float,
    mbit: float,
    period_s: float,
) -> tuple[SystemFault | None, str]:
    """Returns the system fault, or None and the reason why the engine makes the fault instead."""
    if by == ENGINE:
        return None, ""
    needs_system = by == SYSTEM or kind in SYSTEM_KINDS
    try:
        if peer:
            raise DrillError(
                f"peer: {peer!r} needs a fault by the engine; a fault by the system hits the port, "
                "and thus the rails to all peers"
            )
        end = workers[0].rails[0]
        ports = {(one["device"], _host(one)) for worker in workers for one in worker.rails}
        if len(ports) > 1:
            raise DrillError(
                f"by: workers of this node use different ports for {end['name']}, so only the "
                "engine can make the fault"
            )
        if end["kind"] != "tcp":
            raise DrillError(
                f"by: a fault by the system needs a tcp rail; {end['name']} is a rail of kind "
                f"{end['kind']}"
            )
        port = str(end["device"]), str(end["local"])
        return plan(kind, *port, seconds, mbit=mbit, period_s=period_s), ""
    except DrillError as error:
        if needs_system:
            raise
        return None, str(error)


def _host(rail: dict[str, Any]) -> str:
    return str(rail["local"]).rpartition(":")[0]


def _wait(fault: SystemFault | None, seconds: float) -> bool:
    """Waits for the end of the drill or an interrupt; returns whether the fault is undone."""
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
    """Ends the drill at the workers. A second Ctrl-C counts afterwards, or the fault would last."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        client.end(folder, identity)
    except DrillError:
        return  # the drill has ended already
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
