"""The table of fault kinds: a single name for each, and deprecated names for the same kind."""

from __future__ import annotations

import re
from pathlib import Path

from r2serve import _core, faults
from r2serve.drills.order import KINDS as DRILLS
from r2serve.lab.kinds import KINDS
from r2serve.observe import journal


def page() -> str:
    return (Path(__file__).resolve().parents[2] / "docs" / "architecture.md").read_text()


def test_an_old_word_maps_to_one_kind() -> None:
    words = [word for kind in faults.FAULT_KINDS.values() for word in kind.old]
    assert len(words) == len(set(words))
    assert not set(words) & set(faults.FAULT_KINDS)
    for kind in faults.FAULT_KINDS.values():
        assert faults.canonical(kind.name) == kind.name
        assert faults.note_on(kind.name) == ""
        for word in kind.old:
            assert faults.canonical(word) == kind.name
            assert kind.name in faults.note_on(word)


def test_every_fault_kind_in_use_is_in_the_table() -> None:
    assert {*DRILLS, *KINDS, *journal.FAULTS[1:]} <= set(faults.FAULT_KINDS)


def test_the_simulator_has_the_names_of_the_table_or_a_reason() -> None:
    """A name of the simulator alone stands in a table of its own, and in no list of old names."""
    section = page().split("\n| kind of the simulator | meaning |\n|---|---|\n")[1]
    rows = re.findall(r"\| (`.+?) \| .+ \|\n", section.split("\n\n")[0] + "\n")
    own = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert len(own) == len(set(own))
    simulated = set(_core.fault_kinds())
    assert simulated - set(faults.FAULT_KINDS) == set(own)
    assert not simulated & {word for kind in faults.FAULT_KINDS.values() for word in kind.old}


def test_the_page_prints_the_table() -> None:
    for kind in faults.FAULT_KINDS.values():
        old = ", ".join(f"`{word}`" for word in kind.old)
        assert f"| `{kind.name}` | {kind.meaning.replace('``', '`')} | {old} |" in page()
