#!/usr/bin/env python3
"""Search the models of the protocols exhaustively with Spin; docs/model/README.md explains them.

The protocol must hold in a complete search.  Each broken variant must violate the assertion named
in its entry of RUNS, in the last step of Spin's counterexample.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
LINK = "link.pml"
MAILBOX = "mailbox.pml"
POSTED = "posted.pml"
BUILD = HERE.parents[1] / "build" / "model"

# Options of the verifier's compilation.  COLLAPSE and SEPQS compress states without loss.  NOREDUCE
# turns partial order reduction off: nearly every step touches state shared by both sides, so the
# reduction would find nothing to leave out.
COMPILE = ("-O2", "-w", "-DCOLLAPSE", "-DSEPQS", "-DNOREDUCE", "-DMEMLIM=3000")
DEPTH = 10_000  # limit of steps per run; far more than the longest run has
HASH = 25  # hash table of 2^25 entries; affects speed only: a fuller table is slower
# Processes that loop forever.  Spin accepts this because of their label `end`.
LOOPS = ("Sender", "Receiver", "End", "Acks", "Send", "Receive", "Wire")


@dataclass(frozen=True)
class Run:
    """A search of a model.

    ``violates`` and ``last_step`` are the assertion and the last step required of a broken variant.
    """

    name: str
    defines: tuple[str, ...] = ()
    violates: str | None = None
    last_step: str = ""
    cycles: bool = False  # search for endless runs instead of violations
    model: str = LINK

    @property
    def kind(self) -> tuple[str, ...]:
        if self.cycles:
            return ("-DNP",)
        # A breadth-first search finds a shortest counterexample.
        return ("-DSAFETY", "-DBFS") if self.violates else ("-DSAFETY",)


def broken(name: str, violates: str, last_step: str, model: str = LINK) -> Run:
    return Run(name, (name,), violates, last_step, model=model)


RUNS = (
    Run("protocol"),
    Run("4 messages, 1 fault", ("MESSAGES=4", "FAULTS=1")),
    Run("every run ends, 1 fault", ("FAULTS=1",), cycles=True),
    broken("NO_REUSE_RULE", "stale_write", "writes message 0"),
    broken("OWN_FENCE_RESOLVES", "stale_write", "late: rail . writes message 0"),
    broken("FENCED_BEFORE_FLUSH", "stale_write", "late: rail . writes message 0"),
    broken("OLD_FENCE_COUNTS", "stale_write", "late: rail . writes message 0"),
    broken("DELIVERY_IS_CREDIT", "early_write", "writes message 2"),
    broken("PATH_ACK_IS_DELIVERY", "stuck", ""),
    broken("NUMBER_IGNORED", "wrong_bytes", "begins to read message 2"),
    Run("mailbox", model=MAILBOX),
    Run(
        "ENTRY_NOT_AWAITED",
        ("AHEAD", "ENTRY_NOT_AWAITED"),
        "half_read",
        "sums up exchange 1",
        model=MAILBOX,
    ),
    broken("BLOCK_DECIDES_ALONE", "half_read", "sums up exchange 1", MAILBOX),
    broken("VERDICT_OF_EACH_KERNEL", "half_written", "ends kernel 4 of exchange 1", MAILBOX),
    broken("LOSS_NOT_SIGNALLED", "stuck", "", MAILBOX),
    broken("ABORT_NOT_SEEN", "stuck", "", MAILBOX),
    Run("posted receives", model=POSTED),
    Run("posted receives end", ("FAULTS=1",), cycles=True, model=POSTED),
    broken("ROOM_BEFORE_FENCE", "late_write", "writes message", POSTED),
    broken("REPLAY_WITHOUT_ROOM", "late_write", "writes message", POSTED),
    broken("OLD_EPOCH_COUNTS", "late_write", "writes message", POSTED),
    broken("OLD_TRY_ANSWERED", "late_write", "writes message", POSTED),
    broken("READ_NOT_AWAITED", "late_read", "reads message", POSTED),
    broken("PATH_ACK_ENDS_SEND", "stuck", "", POSTED),
    broken("ROOM_NOT_REPEATED", "stuck", "", POSTED),
)
# Searches of the option --long; these take minutes more.
LONG_RUNS = (
    Run("every run ends", cycles=True),
    Run("4 messages", ("MESSAGES=4",)),
    Run("3 faults", ("FAULTS=3",)),
    Run("mailbox, posted ahead", ("AHEAD",), model=MAILBOX),
)


@dataclass(frozen=True)
class Outcome:
    """The results in a verifier's output."""

    errors: int
    states: int
    depth: int
    memory_mb: float
    seconds: float
    violated: str | None
    cut_short: tuple[str, ...]  # reasons why the search may be incomplete
    unreached: tuple[str, ...]  # steps not taken in any run


# Messages of a verifier that has not seen, or not distinguished, all states.
CUTS = (
    "max search depth too small",
    "Search not completed",
    "out of memory",
    "reached -DMEMLIM bound",
    "hash table full",
    "Bit statespace search",
    "hash-compact",
    "Hash Compact",
)


def parse(output: str) -> Outcome:
    cut_short = [cut for cut in CUTS if cut in output]
    if "Full statespace search for:" not in output:
        cut_short.append("no full search of the state space")
    end = re.search(r"depth reached (\d+).*errors: (\d+)", output)
    states = re.search(r"^\s*([\d.e+]+) states, stored", output, re.MULTILINE)
    memory = re.search(r"^\s*([\d.]+)\s+total actual memory usage", output, re.MULTILINE)
    seconds = re.search(r"pan: elapsed time ([\d.e+-]+) seconds", output)
    if end is None or states is None or memory is None or seconds is None:
        cut_short.append("the verifier did not finish its report")
    violated = re.search(r"assertion violated\s+!?\(?(\w+)\)?", output)

    unreached = []
    process = "?"
    for line in output.splitlines():
        if heading := re.match(r"unreached in (?:proctype )?(\S+)", line):
            process = heading[1]
        step = re.match(r"\s+\S*?:?(\d+), state \d+, \"(.*)\"$", line)
        if step and (step[2] != "-end-" or process not in LOOPS):
            unreached.append(f"{process}, line {step[1]}: {step[2]}")
    return Outcome(
        errors=int(end[2]) if end else 0,
        states=int(float(states[1])) if states else 0,
        depth=int(end[1]) if end else 0,
        memory_mb=float(memory[1]) if memory else 0.0,
        seconds=float(seconds[1]) if seconds else 0.0,
        violated=violated[1] if violated else None,
        cut_short=tuple(cut_short),
        unreached=tuple(unreached),
    )


def steps_of(replay: str) -> list[str]:
    """Return the steps of a counterexample, as printed by the model, the assertion last."""
    steps = []
    for line in replay.splitlines():
        if line.startswith("spin: trail ends"):
            break
        if line and not re.match(r"\s*\d+:\t", line):
            steps.append(line)
    return steps


def flaws(run: Run, outcome: Outcome, steps: list[str]) -> list[str]:
    """Return the differences from the required outcome of the run; empty if there are none."""
    if run.violates is None:
        found = [f"not exhaustive: {cut}" for cut in outcome.cut_short]
        if outcome.errors:
            found.append(f"{outcome.errors} errors: {outcome.violated or 'a run that never ends'}")
        found += [f"no run takes this step: {step}" for step in outcome.unreached]
        return found
    if outcome.violated != run.violates:
        return [f"violated is {outcome.violated}, not {run.violates}"]
    if len(steps) < 2 or f"assertion violated  !({run.violates})" not in steps[-1]:
        return ["the counterexample does not end with the violated assertion"]
    if not re.search(run.last_step, steps[-2]):
        return [f"the last step is '{steps[-2]}', not '{run.last_step}'"]
    return []


def call(command: list[str], folder: Path) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        text=True,
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}exit status {done.returncode}")
    return done.stdout


def search(run: Run, build: Path, depth: int = DEPTH) -> tuple[Outcome, list[str]]:
    """Search a single variant.  All output goes to a separate folder in ``build``."""
    folder = build / re.sub(r"\W+", "-", run.name)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    (folder / run.model).write_bytes((HERE / run.model).read_bytes())
    call(["spin", *(f"-D{define}" for define in run.defines), "-a", run.model], folder)
    call(["gcc", *COMPILE, *run.kind, "-o", "pan", "pan.c"], folder)
    output = call(["./pan", f"-m{depth}", f"-w{HASH}", *(["-l"] if run.cycles else [])], folder)
    (folder / "output.txt").write_text(output)
    steps = []
    trail = f"{run.model}.trail"
    if (folder / trail).exists():
        steps = steps_of(call(["./pan", "-r", trail], folder))
        (folder / "counterexample.txt").write_text("\n".join(steps) + "\n")
    return parse(output), steps


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--long", action="store_true", help="also run searches that take minutes")
    parser.add_argument("--build", type=Path, default=BUILD, help="folder of the generated files")
    arguments = parser.parse_args()

    begun = time.monotonic()
    wrong: list[str] = []
    say(f"{'run':<24} {'result':<22} {'states':>11} {'depth':>6} {'memory':>8} {'search':>8}")
    for run in RUNS + (LONG_RUNS if arguments.long else ()):
        outcome, steps = search(run, arguments.build)
        found = flaws(run, outcome, steps)
        wrong += [f"{run.name}: {flaw}" for flaw in found]
        result = "WRONG" if found else f"caught: {run.violates}" if run.violates else "holds"
        say(
            f"{run.name:<24} {result:<22} {outcome.states:>11,} {outcome.depth:>6} "
            f"{outcome.memory_mb:>5.0f} MB {outcome.seconds:>6.1f} s"
        )
        if run.name == "NO_REUSE_RULE":
            say("\n".join(f"    {step}" for step in steps))
    where = os.path.relpath(arguments.build)
    say(f"{time.monotonic() - begun:.0f} s; counterexamples: {where}/*/counterexample.txt")
    for flaw in wrong:
        say(flaw)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
