"""A real browser as fixtures; a conftest.py imports them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from timely import patience

ROOT = Path(__file__).resolve().parents[1]
SHOWN_MS = int(120_000 * patience())
"""Longest wait of a test for the page, ms."""


@pytest.fixture(scope="module")
def chromium() -> str:
    """Returns the path of the distribution's Chromium."""
    tools = subprocess.run(
        [ROOT / "deploy/setup/system.sh", "browser"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHON": sys.executable},
        check=False,
    )
    found = shutil.which("chromium")
    if tools.returncode != 0 or found is None:
        pytest.skip(f"no browser: {tools.stderr.strip()}")
    return found


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        # Chromium has no sandbox under root; the page comes from this repository and is trusted.
        started = driver.chromium.launch(
            executable_path=chromium,
            args=["--no-sandbox", "--disable-dev-shm-usage"],
            timeout=2 * SHOWN_MS,
        )
        yield started
        started.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with browser.new_context(viewport={"width": 1100, "height": 900}) as context:
        made = context.new_page()
        made.set_default_timeout(SHOWN_MS)
        playwright.expect.set_options(timeout=SHOWN_MS)
        made.problems = []
        made.on("pageerror", lambda error: made.problems.append(str(error)))
        made.on("console", lambda said: said.type == "error" and made.problems.append(said.text))
        yield made
