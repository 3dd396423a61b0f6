"""Runs the fuzz targets over the corpus and for a limited time.

``make fuzz`` runs the targets for longer and keeps new inputs in ``build/fuzz/found``.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT / "tests" / "native" / "fuzz" / "corpus"
BUILD = ROOT / "build" / "fuzz"
TARGETS = ("frames", "handshake", "streams")
OPTIONS = (
    "-DCMAKE_CXX_COMPILER=clang++",
    "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O2 -g",
    "-DR2CCL_PYTHON=OFF",
    "-DR2CCL_FUZZ=ON",
)
MEMORY_MIB = 1024
SLOWEST_INPUT_S = 120
PROBE = 'extern "C" int LLVMFuzzerTestOneInput(const char *, long) { return 0; }\n'

Show = Callable[[str], None]

pytestmark = pytest.mark.timeout(1500)


def tool(name: str) -> str:
    """Returns the path of a program in the Python environment, else the name."""
    return shutil.which(name, path=str(Path(sys.executable).parent)) or name


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Builds the fuzz targets with clang."""
    probe = tmp_path_factory.mktemp("probe") / "probe"
    command = ["clang++", "-fsanitize=fuzzer", "-x", "c++", "-", "-o", str(probe)]
    if (
        shutil.which("clang++") is None
        or subprocess.run(
            command, input=PROBE, text=True, capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("clang's fuzzer runtime is not installed")
    # The environment's ninja, for test runs without make.
    ninja = f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"
    BUILD.parent.mkdir(exist_ok=True)
    # All workers of pytest-xdist use the same build folder.
    with BUILD.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for step in (
            ["-S", str(ROOT), "-B", str(BUILD), "-G", "Ninja", ninja, *OPTIONS],
            ["--build", str(BUILD), "--target", *(f"{name}_fuzz" for name in TARGETS)],
        ):
            command = [tool("cmake"), *step]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
    return {name: BUILD / f"{name}_fuzz" for name in TARGETS}


def fuzz(name: str, program: Path, folder: Path, seconds: int, memory_mib: int = MEMORY_MIB) -> str:
    """Runs a fuzz target; returns a summary, or fails with the failing input."""
    found = folder / "found"
    found.mkdir()
    # Inside the repository, so that failing inputs of a run on another machine can be collected.
    artifacts = BUILD / f"{name}-"
    done = subprocess.run(
        [
            str(program),
            f"-max_total_time={seconds}",
            "-seed=1",
            "-max_len=2000",
            f"-timeout={SLOWEST_INPUT_S}",
            # Disables libFuzzer's limit on the peak of getrusage(). On Linux, the peak of a new
            # program starts at the parent's memory: above the limit after an import of vLLM.
            "-rss_limit_mb=0",
            f"-malloc_limit_mb={memory_mib}",
            "-print_final_stats=1",
            f"-artifact_prefix={artifacts}",
            str(found),
            str(CORPUS / name),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        timeout=seconds + 600,
        check=False,
        env=os.environ | {"ASAN_OPTIONS": f"hard_rss_limit_mb={memory_mib}"},
    )
    if done.returncode != 0:
        written = re.search(r"Test unit written to (\S+)", done.stdout)
        what = re.search(
            r"does not hold: .*|runtime error: .*|ERROR: .*|hard rss limit .*", done.stdout
        )
        pytest.fail(
            f"{name}: {what[0] if what else f'status {done.returncode}'}; reproduce with "
            f"{program} {written[1] if written else '(no input was written)'}\n"
            + done.stdout[-4000:]
        )
    runs = re.search(r"Done (\d+) runs in (\d+) second", done.stdout)
    coverage = re.findall(r" cov: (\d+) ft: (\d+) ", done.stdout)
    assert runs is not None, done.stdout[-4000:]
    assert coverage, done.stdout[-4000:]
    kept = len(list((CORPUS / name).iterdir()))
    assert int(runs[1]) > kept
    edges, features = coverage[-1]
    return (
        f"{name}: {runs[1]} executions in {runs[2]} s, {edges} edges and {features} features "
        f"covered, {kept} inputs kept"
    )


@pytest.mark.long
@pytest.mark.parametrize("name", TARGETS)
def test_seconds_of_fuzzing_find_no_failure(
    programs: dict[str, Path], name: str, tmp_path: Path, show: Show
) -> None:
    show(fuzz(name, programs[name], tmp_path, 10))


@pytest.mark.long
@pytest.mark.parametrize("name", TARGETS)
def test_minutes_of_fuzzing_find_no_failure(
    programs: dict[str, Path], name: str, tmp_path: Path, show: Show
) -> None:
    show(fuzz(name, programs[name], tmp_path, 300))


@pytest.mark.long
def test_the_memory_limit_counts_only_the_fuzzed_program(
    programs: dict[str, Path], tmp_path: Path
) -> None:
    """The memory of the test run does not count, even above the fuzzed program's limit."""
    taken = bytes([1]) * ((MEMORY_MIB + 64) << 20)
    fuzz("handshake", programs["handshake"], tmp_path, 2)
    assert len(taken) > MEMORY_MIB << 20


@pytest.mark.long
def test_a_program_over_the_memory_limit_fails(
    programs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "BUILD", tmp_path)
    with pytest.raises(pytest.fail.Exception, match="frames: hard rss limit exhausted"):
        fuzz("frames", programs["frames"], tmp_path, 10, memory_mib=48)


def test_the_corpus_is_small() -> None:
    sizes = [path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()]
    assert sum(sizes) < 200 * 1024
    assert len(sizes) < 150
