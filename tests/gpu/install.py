"""Installs r2serve into a folder of its own, without an index and without an environment.

The core comes from the wheel of ``build/gpu-kit`` if the wheel is of the same sources; else this
machine compiles the core.  Python files are the tree's, so a repair in Python needs no new wheel.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tomllib
from pathlib import Path

from kit import KIT, ROOT, core_digest
from stages import SITE, Here
from stepper import Outcome, Step, Stepper

BUILD_TOOLS = ("cmake", "ninja", "nanobind", "scikit_build_core")
LOADS = (
    "import sys, r2serve; from r2serve import _core;"
    "assert r2serve.__file__.startswith(sys.argv[1]), f'{r2serve.__file__}: not in {sys.argv[1]}';"
    "assert _core.has_kernels(), 'the core has no kernels: no nvcc where it was built';"
    "print(r2serve.__file__, _core.gpus(sys.argv[2]))"
)


def why_not_the_kit(kit: Path = KIT) -> str:
    """Why the kit does not fit this tree and this Python; empty: the kit fits."""
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
    """Up to four steps: packages of the kit, then an import; after a failure a build."""
    shutil.rmtree(site, ignore_errors=True)
    why_not = why_not_the_kit()
    if why_not:
        stepper.skip("install", why_not)
    else:
        wheels = [str(path) for path in sorted(KIT.glob("*.whl")) if _wanted(path)]
        if not stepper.run(Step("install", _pip(here, site, *wheels), 60)).failed:
            _bring_python(site)
            if not _import(stepper, here, site).failed:
                return
        shutil.rmtree(site, ignore_errors=True)
    missing = [name for name in BUILD_TOOLS if importlib.util.find_spec(name) is None]
    missing += [name for name in ("nvcc", "c++") if shutil.which(name) is None]
    if missing:
        stepper.fail("build", f"no {', '.join(missing)}")
    elif not stepper.run(Step("build", _pip(here, site, "--no-build-isolation", "."), 300)).failed:
        _import(stepper, here, site)


def _import(stepper: Stepper, here: Here, site: Path) -> Outcome:
    return stepper.run(Step("import", (here.python, "-c", LOADS, str(site), here.library), 60))


def _pip(here: Here, site: Path, *what: str) -> tuple[str, ...]:
    pip = (here.python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    return (*pip, "--no-index", "--no-deps", "--no-compile", "--target", str(site), *what)


def _wanted(wheel: Path) -> bool:
    """r2serve, and packages missing in this Python."""
    name = wheel.name.split("-")[0].lower()
    return name == "r2serve" or importlib.util.find_spec(name) is None


def _bring_python(site: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for package, source in project["tool"]["scikit-build"]["wheel"]["packages"].items():
        for path in (ROOT / source).rglob("*.py"):
            target = site / package / path.relative_to(ROOT / source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
