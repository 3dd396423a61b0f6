"""``r2serve nccl``: the variables of NCCL, refused values, and the command."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from r2serve import children
from r2serve.cli import main, nccl, nccl_ranks
from r2serve.engines import flag
from r2serve.errors import ConfigError

PLUGIN = Path("/lib") / nccl.LIBRARY
TESTS = Path(__file__).parents[1]


def test_the_variables_name_the_plugin_and_its_network() -> None:
    wanted = nccl.variables({}, PLUGIN)
    assert wanted == {"NCCL_NET_PLUGIN": str(PLUGIN), **nccl.FIXED}
    assert nccl.variables(wanted, PLUGIN) == wanted


@pytest.mark.parametrize(
    "protocols",
    ["Simple", "LL,Simple", "^LL128", "^LL128,LL", "^LL128;allreduce:Simple", "LL;reduce:^LL128"],
)
def test_a_protocol_without_ll128_stays(protocols: str) -> None:
    assert nccl.variables({"NCCL_PROTO": protocols}, PLUGIN)["NCCL_PROTO"] == protocols


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_PROTO", "LL128"),
        ("NCCL_PROTO", "^LL"),
        ("NCCL_PROTO", "LL, ll128"),
        ("NCCL_PROTO", "allreduce:LL128"),
        ("NCCL_PROTO", "allreduce:Simple"),
        ("NCCL_PROTO", "^LL128;allreduce:LL128"),
        ("NCCL_NET", "IB"),
        ("NCCL_NET_PLUGIN", "spcx"),
        ("NCCL_RUNTIME_CONNECT", "1"),
    ],
)
def test_another_value_is_an_error_that_names_the_variable(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is '{value}'".replace("^", r"\^")):
        nccl.variables({name: value}, PLUGIN)


@pytest.mark.parametrize("option", ["--check", "--no-check"])
def test_the_command_runs_with_the_variables_and_gives_its_status(
    tmp_path: Path, option: str
) -> None:
    program = "import os; print(os.environ['NCCL_NET'], os.environ['NCCL_NET_PLUGIN']); os._exit(7)"
    start = "from r2serve.cli import main; main()"
    words = [sys.executable, "-c", start, "nccl", option, "--"]
    env = os.environ | {"R2CCL_JOURNAL_DIR": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    run = subprocess.run(
        [*words, sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=env,
        timeout=300,
        check=False,
    )
    assert (run.returncode, run.stdout) == (7, f"r2ccl {nccl.library()}\n"), run.stderr
    run = subprocess.run(
        [*words, "/no/such"], capture_output=True, text=True, env=env, timeout=300, check=False
    )
    assert run.returncode == 1
    assert "COMMAND: /no/such: No such file" in run.stderr


def test_ranks_keep_journals_in_the_folder_of_the_commands_that_read_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "journals"
    monkeypatch.setattr(flag, "default_folder", lambda: folder)
    monkeypatch.setenv("R2CCL_JOURNAL_DIR", "")
    monkeypatch.delenv("R2CCL_JOURNAL_DIR")
    given: dict[str, str] = {}

    def run(_argv: tuple[str, ...], env: Mapping[str, str], _check: bool) -> int:
        given.update(env)
        return 0

    monkeypatch.setattr(nccl, "run", run)
    result = CliRunner().invoke(main, ["nccl", "--", "true"])
    assert result.exit_code == 0, result.output
    assert given["R2CCL_JOURNAL_DIR"] == str(folder)
    assert folder.is_dir()


# ---- ranks without the plugin ----

SERVICE = "import ctypes; ctypes.CDLL(None).prctl(15, b'NCCL Service  0', 0, 0, 0)\n"
LOADED = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    loaded = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
"""
SLEEPS = "import os, time; time.sleep({seconds}); os._exit(7)\n"
FOR_EVER = SLEEPS.format(seconds=600)
A_WHILE = SLEEPS.format(seconds=1.5)


def watched(argv: list[str], env: Mapping[str, str]) -> tuple[int, list[str]]:
    told: list[str] = []
    with children.running(argv, env) as command:
        status = nccl_ranks.watched(command, told.append, within_s=0.3, every_s=0.05)
    return status, told


def with_plugin(**more: Any) -> dict[str, str]:
    return {**os.environ, **nccl.variables({}, nccl.library()), **more}


def test_a_rank_over_another_network_ends_the_command() -> None:
    argv = [sys.executable, "-c", SERVICE + FOR_EVER]
    status, [told] = watched(argv, with_plugin())
    assert status == children.FAILED
    assert "NCCL has a communicator over another network" in told
    assert "--no-check" in told


def test_a_rank_that_has_lost_the_variables_is_told_once(tmp_path: Path) -> None:
    """No end: a process may run without the plugin on purpose, and torch loads NCCL anyway."""
    library = tmp_path / "libnccl.so.2"
    library.write_bytes(b"x" * 4096)
    # A shell between, so that the rank is no child of this process.
    shell = ["sh", "-c", '"$@"; exit $?', "sh"]
    rank = [sys.executable, "-c", LOADED + A_WHILE, str(library)]
    status, [told] = watched([*shell, "env", "-u", "NCCL_NET", *rank], with_plugin())
    assert status == 7
    assert "warning: " in told
    assert "its environment has lost NCCL_NET" in told
    # A launcher of ranks has NCCL loaded, too, and makes no communicator.
    launcher = [sys.executable, "-c", LOADED + A_WHILE, str(library)]
    assert watched([*shell, *launcher], with_plugin()) == (7, [])


def test_a_process_whose_environment_is_not_seen_goes_on(tmp_path: Path) -> None:
    """A title has replaced the environment in /proc, as in vLLM's and SGLang's processes."""
    library = tmp_path / "libnccl.so.2"
    library.write_bytes(b"x" * 4096)
    process = [sys.executable, "-c", LOADED + A_WHILE, str(library)]
    assert watched(["env", "-i", *process], with_plugin()) == (7, [])


def test_a_rank_with_the_plugin_goes_on(tmp_path: Path) -> None:
    takes = f"""
import os, sys
sys.path.insert(0, {str(TESTS)!r})
import nccl_player
net = nccl_player.Net(os.environ["NCCL_NET_PLUGIN"])
assert net.init() == 1
"""
    argv = [sys.executable, "-c", takes + SERVICE + A_WHILE]
    env = with_plugin(R2CCL_RAILS="127.0.0.1", R2CCL_JOURNAL_DIR=str(tmp_path))
    assert watched(argv, env) == (7, [])


def test_a_process_has_time_to_take_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    lost, proof = nccl_ranks.Signs(reason="lost"), nccl_ranks.Signs(reason="other", proved=True)
    none, plugin = nccl_ranks.Signs(), nccl_ranks.Signs(plugin=True)
    shown = iter([proof, proof, none, proof, proof, plugin, proof])
    monkeypatch.setattr(nccl_ranks, "signs", lambda _process: next(shown))
    here = nccl_ranks.psutil.Process()
    ranks = nccl_ranks.Ranks(within_s=10)
    # The time begins again after a look without a sign, and never after the plugin was taken.
    for now_s in (0.0, 9.0, 10.0, 11.0, 20.0, 21.0, 40.0, 60.0):
        assert ranks.look([here], now_s) == []
    assert next(shown) == proof
    # A hint is told once, and a proof after it as well.
    shown = iter([lost, lost, lost, proof])
    ranks = nccl_ranks.Ranks(within_s=10)
    found = [each.proved for now_s in (0, 10, 20, 30, 40) for each in ranks.look([here], now_s)]
    assert found == [False, True]


def test_the_variables_are_shown_for_a_shell() -> None:
    shown = CliRunner().invoke(main, ["nccl", "--show"])
    assert shown.exit_code == 0, shown.output
    assert "export NCCL_NET=r2ccl\n" in shown.output
    assert "export NCCL_PROTO='^LL128'\n" in shown.output


@pytest.mark.parametrize("words", [["nccl"], ["nccl", "--show", "--", "true"]])
def test_a_command_or_the_variables(words: list[str]) -> None:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert "--show" in result.output
