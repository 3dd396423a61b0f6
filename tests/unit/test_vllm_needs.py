"""The list of missing requirements of `make gpu-check-vllm`, on machines made of folders."""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "gpu/vllm_needs.py"
HERE = ".".join(str(part) for part in sys.version_info[:3])
RELEASE = {
    "Requires-Python": ">=3.11",
    "Requires-Dist": ("torch==2.14.0", "einops", 'six>=1; sys_platform == "win32"', "web[all]>=2"),
}


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vllm_needs", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules["vllm_needs"] = made  # dataclasses look up their module there
    spec.loader.exec_module(made)
    return made


needs = load()


def metadata_text(name: str, version: str, **fields: str | tuple[str, ...]) -> str:
    lines = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}"]
    for field, value in fields.items():
        lines += [f"{field}: {each}" for each in ([value] if isinstance(value, str) else value)]
    return "\n".join(lines) + "\n"


class Machine:
    """A folder as site-packages, a folder of wheels, a driver, and the pin of this test."""

    def __init__(self, folder: Path) -> None:
        self.site, self.wheels = folder / "site", folder / "wheels"
        self.site.mkdir()
        self.wheels.mkdir()
        self.folder = folder
        self.pyproject = folder / "pyproject.toml"
        self.pyproject.write_text(
            '[project.optional-dependencies]\nvllm = ["vllm>=0.32,<0.34"]\nother = ["vllm-x"]\n'
        )
        self.driver = "libcuda_that_is_not_there.so.1"

    def install(
        self, name: str, version: str, *files: str, **fields: str | tuple[str, ...]
    ) -> None:
        info = self.site / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(metadata_text(name, version, **fields))
        (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
        for file in files:
            (self.site / file).parent.mkdir(exist_ok=True)
            (self.site / file).touch()

    def wheel(self, version: str, tag: str) -> Path:
        made = self.wheels / f"vllm-{version}-{tag}.whl"
        with zipfile.ZipFile(made, "w") as archive:
            text = metadata_text("vllm", version, **RELEASE)
            archive.writestr(f"vllm-{version}.dist-info/METADATA", text)
        return made

    def complete(self) -> None:
        """Installs a GPU machine without gaps; r2serve's core is a copy from this environment."""
        self.install("vllm", "0.33.0", "vllm/_C_stable_libtorch.abi3.so", **RELEASE)
        self.install("torch", "2.14.0+cu130", "torch/version.py")
        (self.site / "torch/version.py").write_text("cuda: Optional[str] = '13.0'\n")
        self.install("einops", "0.8")
        self.install("Web", "2.1", **{"Requires-Dist": ('zstd>=1; extra == "all"', "h11")})
        self.install("zstd", "1.5")
        self.install("h11", "0.16")
        self.install("r2serve", "0.1.0", "r2serve/_core.abi3.so")
        from r2serve import _core

        shutil.copyfile(_core.__file__, self.site / "r2serve/_core.abi3.so")

    def with_driver(self, release: int = 13000, capability: str = "9, 0", count: int = 1) -> None:
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("no C compiler")
        source = self.folder / "driver.c"
        source.write_text(
            f"int cuInit(unsigned flags) {{ return flags; }}\n"
            f"int cuDeviceGetCount(int* n) {{ *n = {count}; return 0; }}\n"
            "int cuDeviceGet(int* device, int n) { *device = n; return 0; }\n"
            "int cuDeviceGetName(char* name, int n, int d) {\n"
            "  name[0] = 'G'; name[1] = 0; return 0; }\n"
            "int cuDeviceGetAttribute(int* value, int which, int device) {\n"
            f"  static const int is[] = {{{capability}}}; if (which > 76) return 1;\n"
            "  *value = is[which - 75]; return 0; }\n"
            f"int cuDriverGetVersion(int* version) {{ *version = {release}; return 0; }}\n"
        )
        made = self.folder / "libdriver.so"
        subprocess.run([compiler, "-shared", "-fPIC", source, "-o", made], check=True, timeout=300)
        self.driver = str(made)

    def smi(self, free_mib: int, monkeypatch: pytest.MonkeyPatch) -> None:
        tools = self.folder / "tools"
        tools.mkdir()
        script = tools / "nvidia-smi"
        script.write_text(f"#!/bin/sh\necho '{free_mib}, 81920'\n")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")

    def missing(self) -> dict[str, str]:
        """Returns the lines of the list, by missing requirement."""
        _, found = needs.everything(self.driver, [str(self.site)], self.wheels, self.pyproject)
        said = {each.what: str(each) for each in found}
        assert len(said) == len(found), found
        return said

    def run(self) -> subprocess.CompletedProcess[str]:
        where = ["--site", self.site, "--wheels", self.wheels, "--pyproject", self.pyproject]
        return subprocess.run(
            [sys.executable, SCRIPT, "--library", self.driver, *where],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    # Compiler, headers and disk of this machine differ from run to run.
    monkeypatch.setattr(needs, "of_compiler", lambda: iter(()))
    monkeypatch.setattr(needs, "of_disk", lambda release: iter(()))
    return Machine(tmp_path)


@pytest.fixture
def complete(machine: Machine) -> Machine:
    machine.complete()
    machine.with_driver()
    return machine


def test_a_complete_machine_lacks_nothing(complete: Machine) -> None:
    assert complete.missing() == {}


def test_the_list_is_complete_and_quick(machine: Machine) -> None:
    machine.install("torch", "2.13.0+cpu", "torch/version.py")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = machine.run()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == needs.NO_GPU, done.stderr
    *lines, last = done.stdout.splitlines()
    assert [line.split(":")[1].strip() for line in lines][:4] == [
        "GPU",
        "vllm",
        "torch for CUDA",
        "r2serve",
    ]
    assert last == f"no GPU here; things missing: {len(lines)}"
    # CPU seconds do not depend on the load of the machine.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


def test_the_exit_status_shows_missing_requirements(complete: Machine) -> None:
    (complete.site / "einops-0.8.dist-info/METADATA").unlink()
    (complete.site / "einops-0.8.dist-info/RECORD").unlink()
    (complete.site / "einops-0.8.dist-info").rmdir()
    done = complete.run()
    assert done.returncode == needs.MISSING, done.stderr
    assert "missing: einops: found none; right: einops, for vllm 0.33.0" in done.stdout


def test_a_driver_without_a_gpu_counts_as_no_gpu(machine: Machine) -> None:
    machine.with_driver(count=0)
    assert "a CUDA driver that shows no GPU" in machine.missing()["GPU"]
    assert machine.run().returncode == needs.NO_GPU


def test_a_gpu_older_than_the_kernels(complete: Machine) -> None:
    complete.with_driver(capability="7, 5")
    assert complete.missing() == {
        "GPU": "missing: GPU: found G, compute capability 7.5; right: 8.0 or later"
    }


@pytest.mark.parametrize(("release", "enough"), [(12080, False), (13000, True), (14000, True)])
def test_a_driver_older_than_torchs_cuda(release: int, enough: bool, complete: Machine) -> None:
    complete.with_driver(release)
    expected = "missing: driver: found a driver for CUDA 12.8; right: one for CUDA 13 or later"
    said = complete.missing()
    assert said == {} if enough else said["driver"].startswith(expected)


def test_a_release_that_r2serve_does_not_support(complete: Machine) -> None:
    complete.pyproject.write_text('[project.optional-dependencies]\nvllm = ["vllm>=0.34,<0.35"]\n')
    right = "vllm>=0.34,<0.35, which r2serve supports"
    assert complete.missing() == {"vllm": f"missing: vllm: found 0.33.0; right: {right}"}


def test_the_build_for_cpus_has_no_kernels(complete: Machine) -> None:
    (complete.site / "vllm/_C_stable_libtorch.abi3.so").unlink()
    [(what, said)] = complete.missing().items()
    assert what == "vllm's kernels"
    assert "vllm 0.33.0 without vllm/_C_stable_libtorch" in said


def test_torch_of_another_release_and_without_cuda(complete: Machine) -> None:
    (complete.site / "torch-2.14.0+cu130.dist-info").rename(
        complete.site / "torch-2.13.0+cpu.dist-info"
    )
    (complete.site / "torch-2.13.0+cpu.dist-info/METADATA").write_text(
        metadata_text("torch", "2.13.0+cpu")
    )
    (complete.site / "torch/version.py").write_text("cuda: Optional[str] = None\n")
    assert complete.missing() == {
        "torch": "missing: torch: found 2.13.0+cpu; right: torch==2.14.0, for vllm 0.33.0",
        "torch for CUDA": "missing: torch for CUDA: found torch 2.13.0+cpu without CUDA; "
        "right: torch's build for CUDA",
    }


def test_requirements_of_requirements_are_checked(complete: Machine) -> None:
    for name in ("zstd-1.5", "h11-0.16"):
        shutil.rmtree(complete.site / f"{name}.dist-info")
    assert complete.missing() == {
        "zstd": "missing: zstd: found none; right: zstd>=1, for web 2.1",
        "h11": "missing: h11: found none; right: h11, for web 2.1",
    }


def test_without_packaging_the_names_are_looked_up(
    complete: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(needs, "packaging", lambda: None)
    shutil.rmtree(complete.site / "einops-0.8.dist-info")
    assert set(complete.missing()) == {"packaging", "einops"}


def test_a_wheel_counts_as_not_installed_and_lists_its_requirements(machine: Machine) -> None:
    machine.with_driver()
    made = machine.wheel("0.33.0", "py3-none-any")
    said = machine.missing()
    assert f"pip install {made}" in said["vllm"]
    assert "right: torch==2.14.0" in said["torch"]
    assert "right: web[all]>=2" in said["web"]


def test_a_wheel_for_another_machine(machine: Machine) -> None:
    made = machine.wheel("0.33.0", "cp38-abi3-manylinux_2_28_sparc")
    lines = [str(each) for each in needs._of_wheel(made, needs.packaging())]
    assert "found a wheel for cp38-abi3-manylinux_2_28_sparc; right: one for cp3" in lines[1]


def test_a_python_unsupported_by_the_release() -> None:
    release = needs.Release("0.33.0", ">=3.9,<3.10", (), None)
    [said] = needs.of_python(release, needs.packaging())
    assert str(said) == (
        f"missing: Python: found {HERE}; right: >=3.9,<3.10, which vllm 0.33.0 asks for"
    )


def test_r2serve_without_a_core_or_with_a_broken_core(complete: Machine) -> None:
    core = complete.site / "r2serve/_core.abi3.so"
    core.write_bytes(b"not an object file")
    assert "which does not load (ImportError" in complete.missing()["r2serve's core"]
    core.unlink()
    assert "found r2serve without r2serve/_core" in complete.missing()["r2serve's core"]


@pytest.mark.parametrize(("free_mib", "enough"), [(49000, False), (80000, True)])
def test_free_memory_of_the_gpu(
    free_mib: int, enough: bool, complete: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete.smi(free_mib, monkeypatch)
    said = complete.missing()
    expected = "missing: GPU memory: found 47.9 of 80.0 GiB free; right: 48.0 GiB: 2 workers"
    assert said == {} if enough else said["GPU memory"].startswith(expected)


def test_neither_compiler_nor_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(needs.sysconfig, "get_paths", lambda: {"include": "/nonexistent"})
    assert [each.what for each in needs.of_compiler()] == ["C compiler", "Python.h"]


def test_a_disk_that_is_full(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "not/yet"))
    monkeypatch.setenv("HOME", str(tmp_path))
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 30)
    monkeypatch.setattr(needs.shutil, "disk_usage", lambda folder: usage)
    said = [str(each) for each in needs.of_disk(None)]
    assert said == [
        f"missing: disk space: found 1.0 GiB free in {folder}; right: 2.0 GiB"
        for folder in (tmp_path / "not/yet", tmp_path)
    ]


def test_the_pin_is_read_from_this_project() -> None:
    pin = needs.release_pin(needs.ROOT / "pyproject.toml")
    assert pin.startswith(">=0.32")
    assert "0.33.0" in needs.packaging().specifiers.SpecifierSet(pin)


def test_the_demos_share_of_a_gpu() -> None:
    from r2serve.lab.serving.vllm import GPU_SHARE

    assert float(GPU_SHARE) == needs.SHARE_OF_ONE
