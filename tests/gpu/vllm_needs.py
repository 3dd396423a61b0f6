"""Lists the missing requirements of vLLM on a GPU: `python3 tests/gpu/vllm_needs.py`.

Each missing requirement has a line with the state found and the correct state. The list is
complete, so a single round of installing is enough. The script installs nothing, and imports
neither torch nor vLLM. Metadata, the driver and `nvidia-smi` provide the facts. The script uses
only the standard library.

Exit status: 0 nothing is missing; 77 this machine has no GPU; 78 something is missing.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # needed if PYTHONSAFEPATH is set

from driver import Gpu, first_gpu
from kit import LOAD

ROOT = Path(__file__).resolve().parents[2]
NO_GPU, MISSING = 77, 78  # automake's status of a skipped test; EX_CONFIG of sysexits.h
KERNELS_SINCE = (8, 0)  # oldest compute capability with kernels in kernels.cu
EXTENSION = "_C_stable_libtorch"  # the platform module vllm.platforms.cuda imports this extension
WORKERS_ON_ONE_GPU, SHARE_OF_ONE = 2, 0.3  # workers and memory shares of `r2serve demo --gpu`
CACHES_BYTES = 2 << 30  # a generous sum for torch.compile, Triton and logs of 2 engines
GIB = float(1 << 30)
LOAD_S = 20


@dataclass(frozen=True)
class Missing:
    what: str
    found: str
    right: str

    def __str__(self) -> str:
        return f"missing: {self.what}: found {self.found}; right: {self.right}"


@dataclass(frozen=True)
class Release:
    """A release of vLLM: installed, or a wheel."""

    version: str
    requires_python: str
    requires: tuple[str, ...]
    wheel: Path | None


class Site:
    """The distributions in some folders; of equal names the first counts, as in imports."""

    def __init__(self, folders: Sequence[str]) -> None:
        self._by_name: dict[str, metadata.Distribution] = {}
        for each in metadata.distributions(path=list(folders)):
            self._by_name.setdefault(normal(each.metadata["Name"] or ""), each)

    def get(self, name: str) -> metadata.Distribution | None:
        return self._by_name.get(normal(name))

    def file(self, name: str, pattern: str) -> Path | None:
        """Returns a file of a distribution; `pattern` matches the whole relative path."""
        distribution = self.get(name)
        for each in (distribution and distribution.files) or []:
            if re.fullmatch(pattern, each.as_posix()) and Path(str(each.locate())).is_file():
                return Path(str(each.locate()))
        return None


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def packaging() -> Any:
    """Returns the library `packaging` or pip's copy; None = neither is installed."""
    for root in ("packaging", "pip._vendor.packaging"):
        try:
            parts = ("requirements", "specifiers", "tags", "utils", "version")
            modules = [__import__(f"{root}.{part}", fromlist=["_"]) for part in parts]
        except ImportError:
            continue
        return argparse.Namespace(**dict(zip(parts, modules, strict=True)))
    return None


def release_pin(pyproject: Path) -> str:
    """Returns the range of vLLM releases supported by r2serve, as `>=a,<b`."""
    extras = tomllib.loads(pyproject.read_text())["project"]["optional-dependencies"]
    [pin] = [each for each in extras["vllm"] if re.match(r"vllm\b", each)]
    return str(pin).removeprefix("vllm").strip()


def releases(site: Site, wheels: Path) -> list[Release]:
    """Returns the installed vLLM, or else all vLLM wheels in the folder `wheels`."""
    installed = site.get("vllm")
    if installed is not None:
        return [_release(installed.metadata, None)]
    found = []
    for wheel in sorted(wheels.glob("vllm-*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            [name] = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
            text = archive.read(name).decode()
        found.append(_release(HeaderParser().parsestr(text), wheel))
    return found


def _release(headers: Any, wheel: Path | None) -> Release:
    return Release(
        headers["Version"],
        headers["Requires-Python"] or "",
        tuple(headers.get_all("Requires-Dist") or ()),
        wheel,
    )


def of_gpu(gpu: Gpu | str) -> Iterator[Missing]:
    if isinstance(gpu, str):
        yield Missing("GPU", gpu, "an NVIDIA GPU and its driver, libcuda.so.1")
        return
    capability = tuple(gpu.attributes[f"compute_capability_{part}"] for part in ("major", "minor"))
    if capability < KERNELS_SINCE:
        found, right = ("{}.{}".format(*each) for each in (capability, KERNELS_SINCE))
        yield Missing("GPU", f"{gpu.name}, compute capability {found}", f"{right} or later")


def of_release(
    found: list[Release], pin: str, site: Site, wheels: Path, lib: Any
) -> Iterator[Missing | Release]:
    """Yields the faults of the vLLM found; then the release, if r2serve supports it."""
    if not found:
        yield Missing("vllm", f"no installation and no {wheels}/vllm-*.whl", f"vllm{pin}")
        return
    supported = [each for each in found if lib is None or each.version in _specifiers(lib, pin)]
    if not supported:
        versions = ", ".join(each.version for each in found)
        yield Missing("vllm", versions, f"vllm{pin}, which r2serve supports")
    # Only the requirements of a supported release are checked further.
    for release in supported[-1:]:
        if release.wheel is not None:
            yield from _of_wheel(release.wheel, lib)
        elif site.file("vllm", rf"vllm/{EXTENSION}[.\w-]*\.so") is None:
            lacks = f"vllm {release.version} without vllm/{EXTENSION}"
            yield Missing("vllm's kernels", lacks, "vLLM's wheel for CUDA, not one for CPUs")
        yield release


def _of_wheel(wheel: Path, lib: Any) -> Iterator[Missing]:
    yield Missing("vllm", f"the wheel {wheel.name}, not installed", f"pip install {wheel}")
    if lib is None:
        return
    fits = lib.utils.parse_wheel_filename(wheel.name)[3]
    if fits.isdisjoint(lib.tags.sys_tags()):
        here = next(iter(lib.tags.sys_tags()))
        yield Missing("vllm", f"a wheel for {wheel.stem.split('-', 2)[2]}", f"one for {here}")


def _specifiers(lib: Any, text: str) -> Any:
    return lib.specifiers.SpecifierSet(text, prereleases=True)


def of_python(release: Release, lib: Any) -> Iterator[Missing]:
    here = ".".join(str(part) for part in sys.version_info[:3])
    if lib is not None and here not in _specifiers(lib, release.requires_python):
        right = f"{release.requires_python}, which vllm {release.version} asks for"
        yield Missing("Python", here, right)


def of_requirements(release: Release, site: Site, lib: Any) -> Iterator[Missing]:
    """Yields missing distributions: the requirements of vLLM, and their requirements; each once."""
    if lib is None:
        right = "pip or packaging, which compare versions and read markers"
        yield Missing("packaging", "neither packaging nor pip", right)
        for text in release.requires:
            name = re.match(r"[\w.-]+", text)
            if ";" not in text and name is not None and site.get(name[0]) is None:
                yield Missing(text, "none", f"{text}, for vllm {release.version}")
        return
    seen: set[tuple[str, str]] = set()
    said: set[str] = set()
    queue = [(f"vllm {release.version}", text, frozenset({""})) for text in release.requires]
    for asker, text, extras in queue:
        wanted = lib.requirements.Requirement(text)
        marker = wanted.marker
        if marker is not None and not any(marker.evaluate({"extra": each}) for each in extras):
            continue
        found = site.get(wanted.name)
        if found is None or not wanted.specifier.contains(found.version, prereleases=True):
            with_extras = f"[{','.join(sorted(wanted.extras))}]" if wanted.extras else ""
            right = f"{wanted.name}{with_extras}{wanted.specifier}"
            if right not in said:
                said.add(right)
                here = "none" if found is None else found.version
                yield Missing(wanted.name, here, f"{right}, for {asker}")
        if found is None or found.metadata["Name"] is None:
            continue
        for extra in ("", *sorted(wanted.extras)):
            if (normal(wanted.name), extra) not in seen:
                seen.add((normal(wanted.name), extra))
                of_it = f"{wanted.name} {found.version}"
                queue += [(of_it, each, frozenset({"", extra})) for each in found.requires or ()]


def of_torch(release: Release | None, site: Site, gpu: Gpu | str) -> Iterator[Missing]:
    """Yields a fault if torch lacks CUDA, or needs a CUDA release newer than the driver."""
    installed = site.get("torch")
    if installed is None:
        if release is None:  # otherwise the requirements include torch
            yield Missing("torch", "none", "the torch that vLLM's release asks for, with CUDA")
        return
    stated = site.file("torch", r"torch/version\.py")
    text = "" if stated is None else stated.read_text()
    cuda = re.search(r"^cuda\b[^=]*= *'(\d+)\.(\d+)", text, re.MULTILINE)
    if cuda is None:
        lacks = f"torch {installed.version} without CUDA"
        yield Missing("torch for CUDA", lacks, "torch's build for CUDA")
    elif isinstance(gpu, Gpu) and gpu.version is not None and gpu.version < 1000 * int(cuda[1]):
        # A driver runs programs of every toolkit of the same major release ("minor version
        # compatibility", CUDA Compatibility guide).
        found = f"a driver for CUDA {gpu.version // 1000}.{gpu.version % 1000 // 10}"
        yield Missing("driver", found, f"one for CUDA {cuda[1]} or later, as torch's libraries")


def of_r2serve(site: Site) -> Iterator[Missing]:
    """Yields faults of the installed r2serve, its core and the core's kernels."""
    right = "`pip install .` where nvcc is, or a wheel made there"
    if site.get("r2serve") is None:
        yield Missing("r2serve", "none", right)
        return
    core = site.file("r2serve", r"r2serve/_core\.[.\w-]*so")
    if core is None:
        yield Missing("r2serve's core", "r2serve without r2serve/_core", right)
        return
    # A separate process loads the core, because a core for another machine may crash the process.
    # The process does not import the package, which needs torch.
    command = [sys.executable, "-I", "-c", LOAD, str(core)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LOAD_S, check=False)
    except subprocess.TimeoutExpired:
        late = f"{core.name}, which does not load within {LOAD_S} s"
        yield Missing("r2serve's core", late, right)
        return
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        yield Missing("r2serve's core", f"{core.name}, which does not load ({last})", right)
    elif done.stdout.strip() != "True":
        yield Missing("r2serve's kernels", f"{core.name} without kernels", right)


def of_compiler() -> Iterator[Missing]:
    """Yields what Triton lacks: Triton compiles a launcher in C for each kernel of vLLM."""
    if not any(shutil.which(name) for name in (os.environ.get("CC", ""), "gcc", "clang")):
        yield Missing("C compiler", "neither gcc nor clang, and no CC", "gcc, for Triton")
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if not header.is_file():
        yield Missing("Python.h", f"no {header}", "the headers of this Python, for Triton")


def of_memory() -> Iterator[Missing]:
    """Yields a fault if the first GPU has too little free memory; needs nvidia-smi."""
    query = ["nvidia-smi", "-i", "0", "--query-gpu=memory.free,memory.total"]
    try:
        done = subprocess.run(
            [*query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return  # vLLM runs without nvidia-smi
    found = re.match(r"(\d+), (\d+)\n", done.stdout)
    if found is None:
        return
    free, total = (int(each) / 1024 for each in found.groups())
    needed = WORKERS_ON_ONE_GPU * SHARE_OF_ONE * total
    if free < needed:
        right = f"{needed:.1f} GiB: {WORKERS_ON_ONE_GPU} workers take {SHARE_OF_ONE:.0%} each"
        yield Missing("GPU memory", f"{free:.1f} of {total:.1f} GiB free", right)


def of_disk(release: Release | None) -> Iterator[Missing]:
    """Yields a fault if compiled code, or the unpacked files of a wheel, do not fit on the disk."""
    needs = {Path(os.environ.get("TMPDIR", "/tmp")): CACHES_BYTES, Path.home(): CACHES_BYTES}
    if release is not None and release.wheel is not None:
        with zipfile.ZipFile(release.wheel) as archive:
            unpacked = sum(each.file_size for each in archive.infolist())
        purelib = Path(sysconfig.get_paths()["purelib"])
        needs[purelib] = needs.get(purelib, 0) + unpacked
    for folder, needed in needs.items():
        there = next(each for each in (folder, *folder.parents) if each.exists())
        free = shutil.disk_usage(there).free
        if free < needed:
            right = f"{needed / GIB:.1f} GiB"
            yield Missing("disk space", f"{free / GIB:.1f} GiB free in {folder}", right)


def everything(
    library: str,
    folders: Sequence[str],
    wheels: Path,
    pyproject: Path,
    *,
    with_r2serve: bool = True,
) -> tuple[Gpu | str, list[Missing]]:
    """Returns the GPU, or the reason why there is none, and all missing requirements."""
    gpu, site, lib = first_gpu(library), Site(folders), packaging()
    missing = [*of_gpu(gpu)]
    release = None
    for each in of_release(releases(site, wheels), release_pin(pyproject), site, wheels, lib):
        if isinstance(each, Release):
            release = each
        else:
            missing.append(each)
    if release is not None:
        missing += [*of_python(release, lib), *of_requirements(release, site, lib)]
    missing += of_torch(release, site, gpu)
    if with_r2serve:
        missing += of_r2serve(site)
    missing += [*of_compiler(), *of_memory()]
    return gpu, [*missing, *of_disk(release)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--library", default="libcuda.so.1", help="the CUDA driver")
    parser.add_argument(
        "--site",
        action="append",
        metavar="FOLDER",
        help="folder with installed packages; may be repeated (default: sys.path of this Python)",
    )
    parser.add_argument(
        "--wheels", type=Path, default=ROOT / "wheels", help="folder with wheels to be installed"
    )
    parser.add_argument("--pyproject", type=Path, default=ROOT / "pyproject.toml")
    parser.add_argument(
        "--without-r2serve", action="store_true", help="leave r2serve out: it is installed later"
    )
    options = parser.parse_args()
    gpu, missing = everything(
        options.library,
        options.site or sys.path,
        options.wheels,
        options.pyproject,
        with_r2serve=not options.without_r2serve,
    )
    for each in missing:
        sys.stdout.write(f"{each}\n")
    if isinstance(gpu, str):
        sys.stdout.write(f"no GPU here; things missing: {len(missing)}\n")
        return NO_GPU
    if missing:
        sys.stdout.write(f"vLLM on {gpu.name}: things missing: {len(missing)}\n")
        return MISSING
    sys.stdout.write(f"vLLM on {gpu.name}: nothing is missing\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
