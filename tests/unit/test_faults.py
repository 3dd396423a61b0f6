"""The table of fault kinds: a single name for each, and deprecated names for the same kind."""

from __future__ import annotations

from pathlib import Path

from r2serve import faults
from r2serve.drills.order import KINDS as DRILLS
from r2serve.lab.kinds import KINDS
from r2serve.observe import journal


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


def test_the_page_prints_the_table() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "architecture.md").read_text()
    for kind in faults.FAULT_KINDS.values():
        old = ", ".join(f"`{word}`" for word in kind.old)
        assert f"| `{kind.name}` | {kind.meaning.replace('``', '`')} | {old} |" in page
