"""The layout of a wheel, and a core that links only to the C++ runtime."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import r2serve
from r2serve import _core
from r2serve.cli.main import SUBCOMMANDS

ROOT = Path(__file__).resolve().parents[2]
BUILT = "build/native-plain"  # the build of `make setup` and of the plain native tests
LINKED = {"libc", "libm", "libstdc++", "libgcc_s", "libpthread", "libdl", "librt", "ld-linux"}


def needed(library: Path) -> set[str]:
    """Returns the shared libraries needed by a library, without versions."""
    listing = subprocess.run(
        ["readelf", "--dynamic", "--wide", str(library)], capture_output=True, text=True, check=True
    )
    names = re.findall(r"\(NEEDED\).*\[(.+?)\.so", listing.stdout)
    return {name.split("-x86-64")[0].split("-aarch64")[0] for name in names}


def test_the_core_links_neither_torch_nor_cuda_nor_verbs() -> None:
    assert _core.__file__ is not None
    libraries = needed(Path(_core.__file__))
    assert "libc" in libraries
    assert libraries <= LINKED


def test_importing_the_package_loads_nothing_heavy() -> None:
    heavy = ["torch", "numpy", "click", "r2serve._core"]
    program = f"import sys, r2serve; print([name for name in {heavy} if name in sys.modules])"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout == "[]\n"


WITHOUT_TENSORS = sorted(set(SUBCOMMANDS) - {"bench", "demo"})


def test_a_node_that_only_watches_needs_neither_torch_nor_numpy(tmp_path: Path) -> None:
    """A sidecar has 60 MB, and torch, which it never imports, 3 GB."""
    program = (
        "import sys\n"
        "sys.modules.update(torch=None, numpy=None)\n"  # an import of either fails
        "from click.testing import CliRunner\n"
        "from r2serve.cli import main\n"
        "import r2serve.observe.sidecar.app\n"
        "import r2serve.process\n"
        f"for words in {[[name, '--help'] for name in WITHOUT_TENSORS]} + [['topo', '--json'],"
        f" ['events', '--journal-dir', {str(tmp_path)!r}]]:\n"
        "    done = CliRunner().invoke(main, words, catch_exceptions=False)\n"
        "    assert done.exit_code in (0, 1) and 'needs the module' not in done.output, words\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_without_torch_an_error_says_what_to_install() -> None:
    program = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "import r2serve\n"
        "r2serve.Config(), r2serve.PeerLostError\n"
        "r2serve.Communicator\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1] == (
        "ModuleNotFoundError: r2serve.Communicator needs the package torch: in a checkout of "
        "r2serve, run: pip install '.[torch]'"
    )


def test_no_hint_names_a_package_that_a_stranger_could_register() -> None:
    sources = [
        *(ROOT / "r2serve").rglob("*.py"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "deploy").rglob("*.md"),
        ROOT / "README.md",
    ]
    found = re.compile(r"pip install ['\"]?r2serve\b")
    assert [path.name for path in sources if found.search(path.read_text())] == []


def test_public_names_resolve() -> None:
    for name in r2serve.__all__:
        assert getattr(r2serve, name) is not None
    with pytest.raises(AttributeError, match="nothing_of_ours"):
        _ = r2serve.nothing_of_ours


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--wheel-dir", str(folder)]
    if (ROOT / BUILT / "build.ninja").is_file():
        command += ["-C", f"build-dir={BUILT}"]  # compiled already
    else:
        # The layout of the wheel does not depend on optimisation, so the build skips it.
        quickly = ("CMAKE_CXX_FLAGS_RELWITHDEBINFO=-O0", "R2CCL_KERNELS=OFF")
        command += [word for define in quickly for word in ("-C", f"cmake.define.{define}")]
        command += ["-C", "build-dir=build/wheel"]
    subprocess.run(
        [*command, str(ROOT)],
        check=True,
        timeout=500,
    )
    (built,) = folder.glob("r2serve-*.whl")
    return built


@pytest.mark.slow
def test_a_wheel_holds_the_three_source_folders_and_both_libraries_stripped(
    wheel: Path, tmp_path: Path
) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    page = "observe/sidecar/static/index.html"
    for wanted in ("config.py", "py.typed", page, "kernels/__init__.py", "bench/__init__.py"):
        assert f"r2serve/{wanted}" in names
    assert [name for name in names if re.fullmatch(r"r2serve/_core\..*so", name)]
    assert "r2serve/libnccl-net-r2ccl.so" in names
    assert {name.split("/")[0] for name in names} == {"r2serve", wheel_info(names)}
    assert not [name for name in names if "__pycache__" in name]
    for library in (name for name in names if name.endswith(".so")):
        with zipfile.ZipFile(wheel) as archive:
            unpacked = archive.extract(library, tmp_path)
        listing = subprocess.run(
            ["readelf", "--sections", "--wide", unpacked],
            capture_output=True,
            text=True,
            check=True,
        )
        assert ".debug_info" not in listing.stdout  # 44 MB of 52 MB of the core
    # Up to Python 3.11 each version has a wheel; from 3.12 on the stable ABI serves all versions.
    abi = "abi3" if sys.version_info >= (3, 12) else f"cp3{sys.version_info.minor}"
    assert f"-{abi}-" in wheel.name


def wheel_info(names: list[str]) -> str:
    (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
    return info


@pytest.mark.slow
def test_an_installed_wheel_imports_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*command, "--target", str(tmp_path), str(wheel)], check=True, timeout=300)
    # -S disables the editable install of the checkout, which would be imported first.
    program = (
        "import sys\n"
        f"sys.path[:0] = [{str(tmp_path)!r}, {sysconfig.get_path('purelib')!r}]\n"
        "import r2serve.bench, r2serve.kernels, r2serve._core\n"
        "for module in (r2serve, r2serve.bench, r2serve.kernels, r2serve._core):\n"
        f"    assert module.__file__.startswith({str(tmp_path)!r}), module\n"
    )
    subprocess.run([sys.executable, "-S", "-c", program], cwd=tmp_path, check=True, timeout=300)
