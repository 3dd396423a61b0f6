"""The extra `sidecar`, installed from a checkout into an empty environment: size, and a start."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path

import pytest
from timely import patience, stop

ROOT = Path(__file__).resolve().parents[2]
MOST_BYTES = 60_000_000
LEFT_OUT = {"torch", "numpy", "msgspec", "cryptography", "vllm", "sglang", "triton"}
"""Packages that only ranks and engines need."""
INSTALL_S = 2700
"""The core takes 4 minutes of CPU time to compile."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns an environment without pip, so that all its packages come with the extra."""
    made = tmp_path_factory.mktemp("sidecar") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(made)], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(made / "bin/python")]
    ran = subprocess.run(
        [
            *pip,
            "install",
            "--quiet",
            "-C",
            f"build-dir={made.parent / 'build'}",
            f"{ROOT}[sidecar]",
        ],
        env=os.environ | {"CXX": "g++"},
        capture_output=True,
        text=True,
        check=False,
        timeout=INSTALL_S * patience(),
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return made


def packages(environment: Path) -> Path:
    (found,) = environment.glob("lib/python*/site-packages")
    return found


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_the_sidecar_takes_60_mb_at_most_and_no_torch(
    environment: Path, show: Callable[[str], None]
) -> None:
    installed = packages(environment)
    names = {found.name.lower() for found in distributions(path=[str(installed)])}
    assert {"r2serve", "fastapi", "uvicorn"} <= names
    assert not names & LEFT_OUT
    sizes: Counter[str] = Counter()
    for path in installed.rglob("*"):
        if path.is_file() and not path.is_symlink():
            sizes[path.relative_to(installed).parts[0]] += path.stat().st_size
    largest = ", ".join(f"{name} {size / 1e6:.1f}" for name, size in sizes.most_common(5))
    show(f"the sidecar takes {sizes.total() / 1e6:.1f} MB in site-packages: {largest}")
    assert sizes.total() <= MOST_BYTES, largest


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_the_installed_sidecar_answers(environment: Path, tmp_path: Path) -> None:
    command = [environment / "bin/r2serve", "sidecar", "--port", "0", "--journal-dir", tmp_path]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as sidecar:
        try:
            assert sidecar.stderr is not None
            lines = []
            for line in sidecar.stderr:
                lines.append(line)
                if line.startswith("listening: "):
                    break
            else:
                pytest.fail("".join(lines))
            url = lines[-1].removeprefix("listening: ").strip()
            with urllib.request.urlopen(f"{url}/livez", timeout=60 * patience()) as answer:
                assert answer.status == 200
            with urllib.request.urlopen(f"{url}/metrics", timeout=60 * patience()) as answer:
                assert b"r2serve_ready 0.0" in answer.read()
        finally:
            sidecar.terminate()
            stop(sidecar, "the sidecar")
