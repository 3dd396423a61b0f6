"""`make gpu-kit`, and the installation of the kit: tests without a compiler."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from gpu_tools import ROOT, install, kit, stages, stepper

HERE = stages.Here(sys.executable, "libcuda_of_a_test.so", Path("/nonexistent"), on_gpu=False)


class Scripted:
    """A stepper without processes; the steps named in `failing` fail."""

    def __init__(self, *failing: str) -> None:
        self.failing = failing
        self.said: list[tuple[str, str]] = []
        self.given: list[Any] = []

    def run(self, given: Any) -> Any:
        self.given.append(given)
        rc = int(given.name in self.failing)
        self.said.append((given.name, f"rc {rc}"))
        return stepper.Outcome(given.name, rc, 0.0, 0.0, "")

    def skip(self, name: str, why: str) -> None:
        self.said.append((name, f"skipped: {why}"))

    def fail(self, name: str, why: str) -> None:
        self.said.append((name, why))


@pytest.mark.parametrize(
    ("why_not", "failing", "steps_taken"),
    [
        ("", (), ["install rc 0", "import rc 0"]),
        ("no kit", (), ["install skipped: no kit", "build rc 0", "import rc 0"]),
        ("", ("install",), ["install rc 1", "build rc 0", "import rc 0"]),
        ("", ("import",), ["install rc 0", "import rc 1", "build rc 0", "import rc 1"]),
        ("no kit", ("build",), ["install skipped: no kit", "build rc 1"]),
    ],
)
def test_the_kit_is_installed_or_r2serve_is_built(
    why_not: str,
    failing: tuple[str, ...],
    steps_taken: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = tmp_path / "kit"
    made.mkdir()
    for name in ("r2serve-0.1.0", "pytest-9", "package_of_no_machine-1.0"):
        (made / f"{name}-py3-none-any.whl").touch()
    monkeypatch.setattr(install, "KIT", made)
    monkeypatch.setattr(install, "why_not_the_kit", lambda: why_not)
    monkeypatch.setattr(install, "BUILD_TOOLS", ())
    monkeypatch.setattr(install.shutil, "which", lambda name: f"/usr/bin/{name}")
    steps = Scripted(*failing)
    install.install(steps, HERE, tmp_path / "site")
    assert [" ".join(each) for each in steps.said] == ["packages rc 0", *steps_taken]
    wheels = [[word for word in given.command if word.endswith(".whl")] for given in steps.given]
    assert wheels[0] == [str(made / "package_of_no_machine-1.0-py3-none-any.whl")]
    assert all(len(each) <= 1 for each in wheels)


def test_missing_build_tools_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "why_not_the_kit", lambda: "no kit")
    monkeypatch.setattr(install, "BUILD_TOOLS", ("os", "nanobind_of_no_machine"))
    monkeypatch.setenv("PATH", str(tmp_path))
    steps = Scripted()
    install.install(steps, HERE, tmp_path / "site")
    assert steps.said[-1] == ("build", "no nanobind_of_no_machine, nvcc, c++")


def test_cmake_and_ninja_may_be_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not any(install._found(name) for name in install.BUILD_TOOLS)
    for name in install.BUILD_TOOLS:
        executable(tmp_path / name, "exit 0")
    assert [name for name in install.BUILD_TOOLS if install._found(name)] == ["cmake", "ninja"]


def test_python_files_are_the_tree_s(tmp_path: Path) -> None:
    install._bring_python(tmp_path)
    for package, source in (("r2serve", "r2serve"), ("r2serve/kernels", "kernels")):
        brought = (tmp_path / package / "__init__.py").read_text()
        assert brought == (ROOT / source / "__init__.py").read_text()
    assert (tmp_path / "r2serve/bench/kernels/replay.py").is_file()


def test_the_kit_reports_a_missing_python_312(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert kit.main() == 1
    said = capsys.readouterr().err
    assert said.startswith("no kit: no Python 3.12: neither python3.12 in PATH nor ~/.pyenv")


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_an_unselected_python_312_of_pyenv_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """pyenv's python3.12 in PATH fails in this case; without nvcc no kit is built."""
    executable(tmp_path / "bin/python3.12", "exit 127")
    executable(tmp_path / ".pyenv/versions/3.12.9/bin/python", "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert kit.python_312() == str(tmp_path / ".pyenv/versions/3.12.9/bin/python")
    assert kit.main() == 1
    assert capsys.readouterr().err.startswith("no kit: no nvcc in PATH")


@pytest.mark.parametrize(
    ("tag", "padding", "answer", "said"),
    [
        ("cp312-cp312", 0, "print(True)", "tag is not cp312-abi3"),
        ("cp312-abi3", 4_000_000, "print(True)", "it must be under 4000000"),
        ("cp312-abi3", 0, "print(False)", "its core has no kernels"),
        ("cp312-abi3", 0, "raise ImportError('libx')", "does not load: .*libx"),
        ("cp312-abi3", 0, "print(True)", ""),
    ],
)
def test_an_unsuitable_wheel_is_refused(
    tag: str, padding: int, answer: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / f"r2serve-0.1.0-{tag}-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("r2serve/_core.abi3.so", b"")
        archive.writestr("padding", b"0" * padding)
    monkeypatch.setattr(kit, "LOAD", answer)
    if not said:
        kit.check(wheel, sys.executable)
        return
    with pytest.raises(kit.KitError, match=said):
        kit.check(wheel, sys.executable)


def test_a_kit_of_other_sources_is_not_installed(tmp_path: Path) -> None:
    assert "0 wheels of r2serve" in install.why_not_the_kit(tmp_path)
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    (tmp_path / f"r2serve-0.1.0-{tag}-{tag}-linux_x86_64.whl").touch()
    assert "is of other sources" in install.why_not_the_kit(tmp_path)
    (tmp_path / "core.sha256").write_text(kit.core_digest())
    assert install.why_not_the_kit(tmp_path) == ""


def test_the_digest_follows_the_sources_of_the_core(tmp_path: Path) -> None:
    (tmp_path / "csrc/rails").mkdir(parents=True)
    digests = [kit.core_digest(tmp_path)]
    for name in ("CMakeLists.txt", "pyproject.toml", "csrc/rails/tcp.cc"):
        (tmp_path / name).write_text("a")
        digests.append(kit.core_digest(tmp_path))
        (tmp_path / name).write_text("b")
        digests.append(kit.core_digest(tmp_path))
    (tmp_path / "csrc/rails/tcp.cc").rename(tmp_path / "csrc/rails/udp.cc")
    digests.append(kit.core_digest(tmp_path))
    assert len(set(digests)) == 8
