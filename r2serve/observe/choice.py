"""The choice of a communicator's latest all-reduce, as the communicator's journal entry has it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

ALGORITHMS = ("", "one_shot", "two_shot", "two_shot_overlap")
ALGORITHM_REASONS = ("", "given", "size", "loss")
"""``given``: by the caller or ``R2CCL_ALGORITHM``; ``loss``: size alone leads to the other one."""
SHARES_REASONS = ("", "no_loss", "no_gain", "few_blocks", "loss")
"""Empty: one_shot has no shares. ``loss``: uneven shares; others: why the shares were even."""

_ALGORITHM_TEXTS = {
    "given": "as the caller or R2CCL_ALGORITHM says",
    "size": "by size",
    "loss": "because of the loss",
}
_SHARES_TEXTS = {
    "no_loss": "even shares",
    "no_gain": "even shares: others gain nothing",
    "few_blocks": "even shares: too few blocks for others",
    "loss": "uneven shares",
}


@dataclass(frozen=True)
class Choice:
    """Algorithm and shares of an all-reduce, with the reasons."""

    algorithm: str
    """One of :data:`ALGORITHMS`; empty = no all-reduce yet."""
    algorithm_reason: str  # one of ALGORITHM_REASONS
    shares_reason: str  # one of SHARES_REASONS
    lost: int
    """Largest loss of a node that the call went by, in sixteenths of the node's bandwidth."""

    @property
    def text(self) -> str:
        """Returns algorithm, shares and reasons as a phrase."""
        why = _ALGORITHM_TEXTS.get(self.algorithm_reason, "")
        words = [f"{self.algorithm} {why}".rstrip()]
        if self.shares_reason:
            words.append(_SHARES_TEXTS.get(self.shares_reason, self.shares_reason))
        return ", ".join(words)

    @classmethod
    def parse(cls, data: bytes) -> Choice:
        """Returns the choice in ``data``, which has four bytes."""
        algorithm, algorithm_reason, shares_reason, lost = data
        return cls(
            algorithm=_name(ALGORITHMS, algorithm),
            algorithm_reason=_name(ALGORITHM_REASONS, algorithm_reason),
            shares_reason=_name(SHARES_REASONS, shares_reason),
            lost=lost,
        )


NO_CHOICE = Choice("", "", "", 0)


def lines(choices: Iterable[tuple[str, Choice]]) -> list[str]:
    """Returns a line per communicator and choice under a loss, from names and choices.

    Ranks of a node choose the same, so equal lines appear once.
    """
    return list(
        dict.fromkeys(
            f"{name}: a node lacks {choice.lost}/16 of its bandwidth; last all_reduce: "
            f"{choice.text}"
            for name, choice in choices
            if choice.algorithm and choice.lost
        )
    )


def _name(names: tuple[str, ...], number: int) -> str:
    return names[number] if number < len(names) else "unknown"
