"""Builds `build/gpu-kit`: r2serve for a machine with a GPU, torch and Triton.

`make gpu-kit` makes a stripped wheel for Python 3.12 and later, so the GPU machine compiles
nothing. The wheels of further imports of r2serve and the tests lie beside the wheel.
"""

from __future__ import annotations

import glob
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KIT = ROOT / "build/gpu-kit"
TOOLS = ROOT / "build/gpu-kit-tools"
BUILD = ROOT / "build/gpu-kit-build"
MOST_BYTES = 4_000_000
BUILD_TOOLS = ("cmake", "nanobind", "ninja", "scikit-build-core")
# Imports of r2serve and the tests; the machine provides torch, Triton, numpy and pytest.
REQUIREMENTS = (
    "click",
    "cryptography",
    "psutil",
    "rich",
    "hypothesis",
    "pytest-timeout",
    "pytest-xdist",
)
LOAD = (
    "import importlib.util as u, sys; s = u.spec_from_file_location('r2serve._core', sys.argv[1]);"
    "m = u.module_from_spec(s); s.loader.exec_module(m); print(m.has_kernels())"
)


class KitError(Exception):
    """A missing tool or a wrong wheel; the text names the correction."""


def core_digest(root: Path = ROOT) -> str:
    """Returns the SHA-256 of the core's sources and build options."""
    digest = hashlib.sha256()
    for path in [
        root / "CMakeLists.txt",
        root / "pyproject.toml",
        *sorted((root / "csrc").rglob("*")),
    ]:
        if path.is_file():
            name, content = path.relative_to(root).as_posix(), path.read_bytes()
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def python_312() -> str:
    """Returns a Python 3.12 from PATH or pyenv.

    Raises:
        KitError: neither has a Python 3.12.
    """
    found = [shutil.which("python3.12")]
    found += sorted(glob.glob(os.path.expanduser("~/.pyenv/versions/3.12*/bin/python")))
    for python in filter(None, found):
        # pyenv's python3.12 in PATH fails if pyenv has no 3.12 selected.
        program = "import sys; sys.exit(sys.version_info[:2] != (3, 12))"
        if (
            subprocess.run([python, "-c", program], capture_output=True, check=False).returncode
            == 0
        ):
            return python
    raise KitError(
        "no Python 3.12: neither python3.12 in PATH nor ~/.pyenv/versions/3.12*/bin/python; "
        "`pyenv install 3.12` brings one"
    )


def build() -> Path:
    """Builds the kit and returns its wheel; replaces the kit's folder at the end.

    Raises:
        KitError: a tool is missing, or the wheel does not fit.
        subprocess.CalledProcessError: pip or the compiler failed; the output was shown.
    """
    python = python_312()
    for tool, why in (("nvcc", "the kernels are compiled by it"), ("strip", "52 MB become 8")):
        if shutil.which(tool) is None:
            raise KitError(f"no {tool} in PATH: {why}")
    tools = str(TOOLS / "bin/python")
    if not Path(tools).exists():
        run(python, "-m", "venv", str(TOOLS))
    run(tools, "-m", "pip", "install", "--quiet", *BUILD_TOOLS)
    made = KIT.with_name(KIT.name + "-new")
    shutil.rmtree(made, ignore_errors=True)
    digest = core_digest()
    pip = (tools, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    options = {
        "build-dir": BUILD.relative_to(ROOT).as_posix(),
        "install.strip": "true",
        # Stripping removes debugging information, which would cost half of the build time.
        "cmake.define.CMAKE_CXX_FLAGS_RELWITHDEBINFO": "-O2 -DNDEBUG",
    }
    settings = [f"--config-settings={name}={value}" for name, value in options.items()]
    # The kit's cmake and ninja come first in PATH, before older versions of the system.
    path = f"{TOOLS / 'bin'}{os.pathsep}{os.environ['PATH']}"
    run(*pip, *settings, "--wheel-dir", str(made), ".", PATH=path)
    if core_digest() != digest:
        raise KitError("sources changed while the kit was built; `make gpu-kit` again")
    [wheel] = made.glob("*.whl")
    check(wheel, tools)
    run(
        tools,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--only-binary=:all:",
        "-d",
        str(made),
        *REQUIREMENTS,
    )
    (made / "core.sha256").write_text(digest + "\n")
    shutil.rmtree(KIT, ignore_errors=True)
    made.rename(KIT)
    return KIT / wheel.name


def check(wheel: Path, python: str) -> None:
    """Checks tag, size and kernels of the wheel.

    Raises:
        KitError: another tag, too large, or a core without kernels.
    """
    if "-cp312-abi3-" not in wheel.name:
        raise KitError(f"{wheel.name}: the tag is not cp312-abi3")
    size = wheel.stat().st_size
    if size >= MOST_BYTES:
        raise KitError(f"{wheel.name}: {size} bytes; it must be under {MOST_BYTES}")
    unpacked = wheel.parent / "core"
    shutil.unpack_archive(str(wheel), str(unpacked), "zip")
    [core] = (unpacked / "r2serve").glob("_core*.so")
    done = subprocess.run(
        [python, "-c", LOAD, str(core)], capture_output=True, text=True, check=False
    )
    shutil.rmtree(unpacked)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise KitError(f"{wheel.name}: its core does not load: {last}")
    if done.stdout.strip() != "True":
        raise KitError(f"{wheel.name}: its core has no kernels; nvcc did not compile them")


def run(*command: str, **environment: str) -> None:
    subprocess.run(command, cwd=ROOT, env=os.environ | environment, check=True)


def main(_: Sequence[str] = ()) -> int:
    try:
        wheel = build()
    except (KitError, subprocess.CalledProcessError) as error:
        sys.stderr.write(f"no kit: {error}\n")
        return 1
    sys.stdout.write(f"{wheel.relative_to(ROOT)}: {wheel.stat().st_size} bytes\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
