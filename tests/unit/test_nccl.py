"""``r2serve nccl``: the variables of NCCL, refused values, and the command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from r2serve.cli import main, nccl
from r2serve.errors import ConfigError

PLUGIN = Path("/lib") / nccl.LIBRARY


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


def test_the_command_runs_with_the_variables() -> None:
    program = "import os; print(os.environ['NCCL_NET'], os.environ['NCCL_NET_PLUGIN'])"
    start = "from r2serve.cli import main; main()"
    command = [sys.executable, "-c", start, "nccl", "--", sys.executable, "-c", program]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert run.stdout == f"r2ccl {nccl.library()}\n"


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
