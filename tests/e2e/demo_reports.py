"""Checks of a report of `r2serve demo`, for every engine."""

from __future__ import annotations


def check_report(data: dict[str, object], sent: int) -> None:
    """Checks requests, tokens and both faults of a rail; ``sent``: number of requests."""
    assert data["requests"] == {"sent": sent, "completed": sent, "failed": 0}
    assert data["tokens_identical"] is True
    faults = data["faults"]
    assert isinstance(faults, list)
    assert [fault["kind"] for fault in faults] == ["carrier_loss", "black_hole"]
    for fault in faults:
        assert fault["bytes_before"] > 0
        assert fault["replayed_chunks"] > 0
        assert fault["stall_ms_max"] > 0
        assert fault["rail_after"] not in ("", fault["rail"])
