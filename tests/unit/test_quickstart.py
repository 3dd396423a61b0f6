"""The commands of docs/quickstart.md parse: options, variables, extras and JSON are right.

`tests/engines/page_reader.py` follows the page with a real engine of each kind.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tomllib
from pathlib import Path

import click
import pytest
from quickstart import BOTH, PAGE, commands, environment

from r2serve.cli import main
from r2serve.config import Config
from r2serve.engines import flag, sidecar
from r2serve.observe import fault_report
from r2serve.ports.management_address import VARIABLES
from r2serve.topo.host_name import GLOO_VARIABLE

ROOT = PAGE.parents[1]
KNOWN = {"pip", "export", "vllm", "sglang", "curl", "ip", "r2serve"}


def of(program: str) -> list[list[str]]:
    return [each.words for each in commands() if each.words[0] == program]


def test_the_page_has_a_command_for_every_step() -> None:
    assert {each.words[0] for each in commands()} == KNOWN
    nodes = {each.words[0]: each.nodes for each in commands() if each.words[0] != "r2serve"}
    assert nodes["export"] == nodes["pip"] == BOTH
    servers = [each for each in commands() if each.words[0] in ("vllm", "sglang")]
    assert [each.nodes for each in servers] == [(0,), (1,), (0,), (1,)]
    for each in servers:
        rank = each.words[each.words.index("--node-rank") + 1]
        assert (int(rank),) == each.nodes


def test_the_commands_of_r2serve_parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("node1.json").touch()
    assert {words[1] for words in of("r2serve")} == {"topo", "doctor", "rails"}
    for words in of("r2serve"):
        with click.Context(main, info_name="r2serve") as around:
            command = main.get_command(around, words[1])
            assert command is not None
            command.make_context(words[1], words[2:], parent=around)


def test_the_servers_options_of_r2serve_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (flag.VARIABLE, sidecar.VARIABLE):
        monkeypatch.setenv(variable, "")
    for words in [*of("vllm"), *of("sglang")]:
        parser = argparse.ArgumentParser(exit_on_error=False)
        flag.add_to(parser)
        options, _ = parser.parse_known_args(words[2:])
        assert options.distributed_backend == "r2ccl"
        assert sidecar.address(os.environ[sidecar.VARIABLE]) == ("127.0.0.1", 8199)
        assert {"--nnodes", "--node-rank", "--tensor-parallel-size"} < set(words)


def test_the_variables_are_known_and_their_values_right() -> None:
    exported = environment(commands())
    ours = {name: value for name, value in exported.items() if name.startswith("R2CCL_")}
    config = Config.from_env(ours)
    assert (config.rails, config.ports) == ("eth1,eth2", "40000-40050")
    assert exported.keys() - ours.keys() == {VARIABLES[0], GLOO_VARIABLE}
    for name in (*exported, VARIABLES[1]):
        assert f"`{name}`" in PAGE.read_text()


def test_the_extras_exist_and_the_request_is_json() -> None:
    [install, remove] = of("pip")
    extras = re.fullmatch(r"\.\[(.+)\]", install[2])
    assert extras is not None
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras[1].split(",")) <= set(project["optional-dependencies"])
    assert remove == ["pip", "uninstall", "-y", project["name"]]
    [request] = of("curl")
    assert json.loads(request[request.index("-d") + 1])["stream"] is True


def test_the_lines_of_logs_are_those_of_the_sources() -> None:
    text = PAGE.read_text()
    line = '"group %s: %d ranks on %d nodes, carried by r2ccl over %s; algorithm: %s'
    for engine in ("vllm", "sglang"):
        sources = (ROOT / "r2serve" / "engines" / engine).rglob("*.py")
        assert any(line in source.read_text() for source in sources)
    assert "group tp:0: 2 ranks on 2 nodes, carried by r2ccl over rail0@node0" in text
    told = Path(fault_report.__file__).read_text()
    for part in ("was lost (", "ms stall in", "carried by ", "requests: ", "the fault is "):
        assert part in text
        assert part in told


def test_the_readme_points_to_the_page_in_its_first_screen() -> None:
    assert "docs/quickstart.md" in "".join((ROOT / "README.md").read_text().splitlines()[:30])
