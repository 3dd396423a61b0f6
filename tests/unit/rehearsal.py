"""Copies a machine with a GPU: a bare Python, a copied tree, a kit.

The Python sees torch, Triton, pytest, numpy, pip and their requirements. The kit is packed from the
environment of the tests, so no compiler runs.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from gpu_tools import ROOT, kit
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

MACHINE_S = ("torch", "triton", "pytest", "numpy", "pip")


def with_requirements(names: tuple[str, ...]) -> dict[str, metadata.Distribution]:
    """Returns the installed distributions of these names, with all requirements."""
    found: dict[str, metadata.Distribution] = {}
    queue = list(names)
    for name in queue:
        if canonicalize_name(name) in found:
            continue
        distribution = metadata.distribution(name)
        found[canonicalize_name(name)] = distribution
        for text in distribution.requires or ():
            wanted = Requirement(text)
            if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
                queue.append(wanted.name)
    return found


def bare_python(folder: Path) -> Path:
    """Creates an environment with links to the machine's distributions, and nothing else."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    [site] = folder.glob("lib/python*/site-packages")
    for distribution in with_requirements(MACHINE_S).values():
        for top, source in _top_level(distribution):
            if not (site / top).exists():
                (site / top).symlink_to(source)
    return folder / "bin/python"


def _top_level(distribution: metadata.Distribution) -> Iterator[tuple[str, Path]]:
    for name in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
        yield name, Path(str(distribution.locate_file(name)))


def copy_tree(folder: Path) -> None:
    """Copies tracked files and files not ignored by git, without the history."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():  # a deleted file stays listed until the commit
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def pack_kit(tree: Path) -> None:
    """Packs a kit for this Python: r2serve's installed core, and the packages missing there."""
    made = tree / "build/gpu-kit"
    made.mkdir(parents=True)
    r2serve = metadata.distribution("r2serve")
    [core] = [Path(str(f.locate())) for f in r2serve.files or () if f.match("r2serve/_core*.so")]
    stripped = made / core.name
    subprocess.run(["strip", "-o", str(stripped), str(core)], check=True)
    contents = {f"r2serve/{core.name}": stripped.read_bytes()}
    stripped.unlink()
    for path in (ROOT / "r2serve").rglob("*.py"):
        contents[path.relative_to(ROOT).as_posix()] = path.read_bytes()
    _write_wheel(made, r2serve, contents)
    theirs = with_requirements(MACHINE_S)
    here = {canonicalize_name(each.metadata["Name"]) for each in metadata.distributions()}
    wanted = tuple(name for name in kit.REQUIREMENTS if name in here)  # xdist may be missing
    for name, distribution in with_requirements(wanted).items():
        if name not in theirs:
            _write_wheel(made, distribution, _contents(distribution))
    (made / "core.sha256").write_text(kit.core_digest(tree))


def _contents(distribution: metadata.Distribution) -> dict[str, bytes]:
    return {
        file.as_posix(): Path(str(file.locate())).read_bytes()
        for file in distribution.files or ()
        if ".." not in file.parts and file.suffix != ".pyc" and ".dist-info" not in file.parts[0]
    }


def _write_wheel(
    folder: Path, distribution: metadata.Distribution, contents: dict[str, bytes]
) -> None:
    """Writes a wheel (PEP 427)."""
    name = distribution.metadata["Name"].replace("-", "_")
    information = f"{name}-{distribution.version}.dist-info"
    for kept in ("METADATA", "WHEEL", "entry_points.txt"):
        text = distribution.read_text(kept)
        if text is not None:
            contents[f"{information}/{kept}"] = text.encode()
    rows = io.StringIO()
    writer = csv.writer(rows, lineterminator="\n")
    for path, content in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        writer.writerow([path, f"sha256={digest}", len(content)])
    writer.writerow([f"{information}/RECORD", "", ""])
    contents[f"{information}/RECORD"] = rows.getvalue().encode()
    lines = contents[f"{information}/WHEEL"].decode().splitlines()
    tags = [line.split()[1].split("-") for line in lines if line.startswith("Tag:")]
    # Python, ABI and platform, each with the parts of all tags: py2.py3-none-any.
    tag = "-".join(".".join(sorted(set(parts))) for parts in zip(*tags, strict=True))
    with zipfile.ZipFile(folder / f"{name}-{distribution.version}-{tag}.whl", "w") as archive:
        for path, content in contents.items():
            archive.writestr(path, content)
