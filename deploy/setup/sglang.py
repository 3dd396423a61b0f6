"""Install SGLang without its CUDA packages into the environment of the running interpreter.

For tests and demos on a machine without a GPU: users install SGLang as its own documentation says.
torch is the CPU build, and ``tests/engines/sglang/standins`` replaces modules without a CPU wheel.

``sglang.py install`` installs SGLang. ``sglang.py share SITE_PACKAGES`` takes r2serve from another
environment of the same Python: the core is compiled once, and Python sources stay in place.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STANDINS = ROOT / "tests" / "engines" / "sglang" / "standins"
TORCH = "2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
SGLANG = "0.5.23"
"""The tested release; ``r2serve/engines/sglang/relies_on.py`` names the same."""
# Packages for GPUs, and packages that no text model asks for.
UNWANTED = (
    *("build", "cuda-python", "datasets", "deepseek-recipe", "flash-attn-4"),
    *("flashinfer_python", "humming-kernels", "modelscope", "nvidia-cutlass-dsl", "nvidia-mathdx"),
    *("nvshmem4py-cu13", "quack-kernels", "sgl-deep-ep", "sgl-deep-gemm", "sgl-flash-mla"),
    *("sglang-kernel", "smg-grpc-servicer", "tilelang", "timm", "tml-renderers", "torch"),
    *("torch_memory_saver", "torchaudio", "torchcodec", "torchvision"),
)
OURS = ("click>=8.1", "cryptography>=44", "dill", "rich>=13", "safetensors", "triton")
"""Requirements of r2serve and its demo, and what SGLang imports of packages left out."""


def installed(*arguments: str) -> bool:
    """Runs ``pip install`` and returns its success."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", *arguments]
    return subprocess.run(command, check=False).returncode == 0


def must(done: bool, what: str) -> None:
    if not done:
        raise SystemExit(f"{what} failed; see pip's message above")


def requirements(listed: list[str]) -> list[str]:
    """Returns SGLang's requirements without extras and without the unwanted packages."""
    unwanted = {_normal(name) for name in UNWANTED}
    wanted = []
    for requirement in listed:
        match = re.match(r"[A-Za-z0-9._-]+", requirement)
        assert match is not None, requirement
        if _normal(match[0]) not in unwanted and "extra ==" not in requirement:
            wanted.append(requirement)
    return wanted


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def install() -> None:
    """Installs torch for CPUs, SGLang, and SGLang's other requirements."""
    torch = f"torch=={TORCH}"
    if not installed(f"{torch}+cpu"):
        sys.stderr.write(
            f"{torch}+cpu is in no package index of pip: installing {torch}, which may bring CUDA, "
            "a download of 3 GB. An index with the CPU build avoids the download: "
            f"PIP_EXTRA_INDEX_URL={CPU_INDEX} make setup-sglang\n"
        )
        must(installed(torch), "installing torch")
    must(installed("--no-deps", f"sglang=={SGLANG}"), "installing sglang")
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder, "requirements.txt")
        wanted.write_text("\n".join([*requirements(metadata.requires("sglang") or []), *OURS]))
        keep_torch = Path(folder, "constraints.txt")
        keep_torch.write_text(f"torch=={metadata.version('torch')}\n")
        # pip would otherwise warn of every package that is left out.
        given = ("--no-warn-conflicts", "-r", str(wanted), "-c", str(keep_torch))
        must(installed(*given), "installing SGLang's dependencies")


def share_r2serve(theirs: Path, ours: Path) -> None:
    """Copies the files of an editable r2serve from ``theirs`` to ``ours`` (site-packages).

    Raises:
        SystemExit: ``theirs`` has no editable installation of r2serve.
    """
    found = list(metadata.distributions(name="r2serve", path=[str(theirs)]))
    if not found or not found[0].files:
        raise SystemExit(f"{theirs} has no r2serve: run make setup first")
    for file in found[0].files:
        if ".." in file.parts:  # commands, which name the other environment's interpreter
            continue
        target = ours / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(theirs / file, target)
    command = ours.parents[2] / "bin" / "r2serve"
    command.write_text(
        f"#!{ours.parents[2] / 'bin' / 'python'}\nfrom r2serve.cli import main\n\nmain()\n"
    )
    command.chmod(0o755)


def main() -> None:
    ours = Path(sysconfig.get_path("purelib"))
    match sys.argv[1:]:
        case ["install"]:
            install()
            (ours / "r2serve-standins.pth").write_text(f"{STANDINS}\n")
        case ["share", theirs]:
            share_r2serve(Path(theirs), ours)
        case given:
            raise SystemExit(f"arguments are {given}: must be install, or share SITE_PACKAGES")


if __name__ == "__main__":
    main()
