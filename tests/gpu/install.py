"""Installs r2serve into a separate folder, without an index and without an environment.

The core comes from the wheel in `build/gpu-kit` if the wheel was built from the same sources.
Otherwise this machine compiles the core. Python files come from the tree, so a repair in Python
needs no new wheel. Packages missing in this Python always come from the kit.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from kit import KIT, ROOT, core_digest
from stages import SITE, Here
from stepper import Outcome, Step, Stepper

STEP_S, BUILD_S = 60.0, 300.0  # limits of a step and of the build
BUILD_TOOLS = ("cmake", "ninja", "nanobind", "scikit_build_core")
LOADS = (
    "import sys, r2serve; from r2serve import _core;"
    "assert r2serve.__file__.startswith(sys.argv[1]), f'{r2serve.__file__}: not in {sys.argv[1]}';"
    "assert _core.has_kernels(), 'the core has no kernels: no nvcc where it was built';"
    "print(r2serve.__file__, _core.gpus(sys.argv[2]))"
)


def why_not_the_kit(kit: Path = KIT) -> str:
    """Returns why the kit does not fit this tree and this Python; empty = the kit fits."""
    wheels = list(kit.glob("r2serve-*.whl"))
    if len(wheels) != 1:
        return f"{len(wheels)} wheels of r2serve in {kit}; one is right (make gpu-kit)"
    stated = kit / "core.sha256"
    if not stated.is_file() or stated.read_text().strip() != core_digest():
        return f"{wheels[0].name} is of other sources; make gpu-kit builds one of these"
    here = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    if sys.version_info < (3, 12) and f"-{here}-" not in wheels[0].name:
        return f"{wheels[0].name} is not for Python {sys.version.split()[0]}"
    return ""


def install(stepper: Stepper, here: Here, site: Path = SITE) -> None:
    """Runs up to 5 steps: missing packages, the kit's r2serve, an import; on failure a build."""
    shutil.rmtree(site, ignore_errors=True)
    packages = [str(path) for path in sorted(KIT.glob("*.whl")) if _missing(path)]
    if packages:
        stepper.run(Step("packages", _pip(here, site, *packages), STEP_S))
    why_not = why_not_the_kit()
    if why_not:
        stepper.skip("install", why_not)
    else:
        [wheel] = KIT.glob("r2serve-*.whl")
        if not stepper.run(Step("install", _pip(here, site, str(wheel)), STEP_S)).failed:
            _bring_python(site)
            if not _import(stepper, here, site).failed:
                return
    lacks = [name for name in BUILD_TOOLS if not _found(name)]
    lacks += [name for name in ("nvcc", "c++") if shutil.which(name) is None]
    if lacks:
        stepper.fail("build", f"no {', '.join(lacks)}")
        return
    command = _pip(here, site, "--no-build-isolation", ".")
    if not stepper.run(Step("build", command, BUILD_S)).failed:
        _import(stepper, here, site)


def _found(tool: str) -> bool:
    """Returns whether a build tool exists: as a module, or (cmake, ninja) as a program."""
    if importlib.util.find_spec(tool) is not None:
        return True
    return tool in ("cmake", "ninja") and shutil.which(tool) is not None


def _import(stepper: Stepper, here: Here, site: Path) -> Outcome:
    return stepper.run(Step("import", (here.python, "-c", LOADS, str(site), here.library), STEP_S))


def _pip(here: Here, site: Path, *what: str) -> tuple[str, ...]:
    pip = (here.python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    # pip replaces files in a target folder only with --upgrade.
    how = ("--no-index", "--no-deps", "--no-compile", "--upgrade", "--target", str(site))
    return (*pip, *how, *what)


def _missing(wheel: Path) -> bool:
    """Returns whether this Python lacks the package; a later step installs r2serve."""
    name = wheel.name.split("-")[0]
    if name == "r2serve":
        return False
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return True
    return False


def _bring_python(site: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for package, source in project["tool"]["scikit-build"]["wheel"]["packages"].items():
        for path in (ROOT / source).rglob("*.py"):
            target = site / package / path.relative_to(ROOT / source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
