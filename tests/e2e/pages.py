"""Helpers of tests of the dashboard."""

from __future__ import annotations

import os
import time
from typing import Any


def row_of(page: Any, rail: str) -> Any:
    """Returns the row of a rail in the table of rails."""
    return page.locator("#rails tr", has=page.get_by_role("rowheader", name=rail, exact=True))


def picture(page: Any, name: str) -> None:
    """Saves a screenshot if R2SERVE_SCREENSHOTS names a folder; docs/ contains two of these."""
    if folder := os.environ.get("R2SERVE_SCREENSHOTS"):
        time.sleep(1.5)  # rates are averaged over 1 s
        page.screenshot(path=f"{folder}/{name}.png", full_page=True)
