"""The systemd unit of the sidecar: accepted by systemd, with a command line of the sidecar."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from r2serve.observe.sidecar.cli import command as sidecar

UNIT = Path(__file__).resolve().parents[2] / "deploy/systemd/r2serve-sidecar.service"


def service() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # systemd's case counts
    parser.read_string(UNIT.read_text())
    return parser["Service"]


def complaints(text: str, folder: Path) -> str:
    """Returns what systemd says about a unit, with a program that exists."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze: what systemd makes of the unit is not seen")
    path = folder / UNIT.name
    path.write_text(re.sub("^ExecStart=.*$", "ExecStart=/bin/true", text, flags=re.MULTILINE))
    asked = ["systemd-analyze", "verify", str(path)]
    ran = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=120)
    return "\n".join(line for line in ran.stderr.splitlines() if UNIT.name in line)


def test_systemd_knows_every_setting(tmp_path: Path) -> None:
    assert complaints(UNIT.read_text(), tmp_path) == ""


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("RestartSec=", "RestartSecs="), ("Restart=always", "Restart=alwys")],
)
def test_a_wrong_setting_is_found(right: str, wrong: str, tmp_path: Path) -> None:
    text = UNIT.read_text()
    assert right in text
    assert complaints(text.replace(right, wrong), tmp_path) != ""


def test_the_sidecar_accepts_the_command_line() -> None:
    program, name, *arguments = shlex.split(service()["ExecStart"])
    assert Path(program).is_absolute()
    assert (Path(program).name, name) == ("r2serve", sidecar.name)
    given = sidecar.make_context("sidecar", arguments).params
    assert given["host"] == "127.0.0.1"  # without a token, for clients of this host alone
    assert given["read_token_file"] is None


def test_the_sidecar_runs_as_the_engine_and_keeps_no_rights() -> None:
    settings = service()
    assert settings["User"] not in ("", "root", "0")
    assert "DynamicUser" not in settings  # another user could not read the journals
    assert settings["CapabilityBoundingSet"] == ""
    assert settings["NoNewPrivileges"] == "yes"
