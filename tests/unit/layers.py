"""The layers: what a folder may use. test_tidy.py holds every include to this map.

A folder uses only folders that stand above it here, so no arrow points back. docs/architecture.md
prints the map, with the topmost layer first.
"""

from __future__ import annotations

CSRC: dict[str, tuple[str, ...]] = {
    "base": (),
    "journal": ("base",),
    "drivers": ("base",),
    "plan": ("base",),
    "link": ("base",),
    "rails": ("base", "drivers", "link"),
    "collectives": ("base", "link", "rails"),
    "connect": ("base", "drivers", "link", "rails"),
    "engine": (
        "base",
        "journal",
        "drivers",
        "plan",
        "link",
        "rails",
        "collectives",
        "connect",
    ),
    "device": ("base", "drivers", "link", "rails", "collectives", "engine"),
    "sim": ("base", "plan", "link", "rails", "collectives", "connect", "device"),
    "bindings": ("base", "drivers", "link", "connect", "engine", "device", "sim"),
}
