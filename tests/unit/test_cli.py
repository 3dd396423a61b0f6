"""The command line: quick, complete, and helpful if a package is missing."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import click
import pytest
from click.testing import CliRunner

import r2serve
from r2serve.cli import main
from r2serve.cli.main import SUBCOMMANDS, LazyCommand
from r2serve.config import options


def test_version_is_the_package_s() -> None:
    result = CliRunner().invoke(main, ["--version"])
    assert result.output == f"r2serve {version('r2serve')}\n"
    assert r2serve.__version__ == version("r2serve")


def test_help_names_every_subcommand_and_loads_none() -> None:
    heavy = ["torch", "numpy", "vllm", "r2serve.demo", "r2serve.bench", "r2serve._core"]
    program = (
        "import sys\n"
        "from r2serve.cli import main\n"
        "main(['--help'], standalone_mode=False)\n"
        f"print('LOADED', [name for name in {heavy} if name in sys.modules])\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300
    )
    assert run.stdout.endswith("LOADED []\n")
    for name in SUBCOMMANDS:
        assert f"\n  {name} " in run.stdout
    operation, development = run.stdout.split("tests and measurements:")
    assert "operation of a node:" in operation
    assert all(f"\n  {name} " in operation for name in ("rails", "events", "drill", "sidecar"))
    assert all(f"\n  {name} " in development for name in ("bench", "demo", "sim"))


def test_a_typing_error_gets_a_suggestion() -> None:
    done = CliRunner().invoke(main, ["raisl"])
    assert done.exit_code == 2
    assert "Did you mean 'rails'?" in done.output
    assert "Did you mean" not in CliRunner().invoke(main, ["xyzzy"]).output
    assert CliRunner().invoke(main, ["--", "--xyzzy"]).exit_code == 2


@pytest.mark.parametrize("name", sorted(SUBCOMMANDS))
def test_every_subcommand_has_help(name: str) -> None:
    result = CliRunner().invoke(main, [name, "--help"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert result.output.startswith(f"Usage: main {name}")


def test_a_drills_help_shows_the_defaults() -> None:
    result = CliRunner().invoke(main, ["drill", "black_hole", "--help"])
    assert "[default: auto]" in " ".join(result.output.split())


def test_config_shows_every_option_and_changed_values() -> None:
    result = CliRunner().invoke(main, ["config"], env={"R2CCL_SLOTS": "16"})
    assert result.exit_code == 0
    for option in options():
        assert f"{option.variable} = " in result.output
    assert "R2CCL_SLOTS = 16 slots  (default 8)" in result.output


def test_config_names_a_wrong_value() -> None:
    result = CliRunner().invoke(main, ["config"], env={"R2CCL_SLOTS": "3"})
    assert result.exit_code == 1
    assert (
        result.output == "Error: slots (R2CCL_SLOTS) is 3: must be a power of two from 2 to 256\n"
    )


def test_a_missing_extra_is_named(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    with open(f"{tmp_path}/needs_plotting.py", "w") as module:
        module.write("import a_plotting_library_that_is_not_here\n")
    command = LazyCommand("needs_plotting", "Plots.", "bench")
    with pytest.raises(click.ClickException) as caught:
        command.load("bench")
    assert caught.value.message == (
        "`r2serve bench` needs the module a_plotting_library_that_is_not_here; "
        "in a checkout of r2serve, run: pip install '.[bench]'"
    )


def test_a_missing_module_of_r2serve_is_not_blamed_on_an_extra() -> None:
    with pytest.raises(ModuleNotFoundError):
        LazyCommand("r2serve.no_such_module", "None.").load("none")
