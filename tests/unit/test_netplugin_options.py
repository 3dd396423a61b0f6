"""The network plugin reads the options of the core from the environment, without Python."""

from __future__ import annotations

import re
from pathlib import Path

from r2serve.config import options

SOURCE = Path(__file__).parents[2] / "csrc" / "netplugin" / "options.cc"
ENTRY = re.compile(r'\{"(R2CCL_\w+)", &Config::(\w+)(?:, \{([^}]*)\})?\}')
WITHOUT_USE = {
    "algorithm",
    "call_timeout_s",
    "consensus",
    "consensus_result",
    "gid_index",
    "pkey_index",
    "service_level",
    "traffic_class",
    "verbs_retry_count",
    "verbs_rnr_retry",
    "verbs_rnr_timer",
    "verbs_timeout",
}
"""Options of the core that a plugin over TCP does not use."""


def test_the_plugin_has_the_names_and_ranges_of_the_table() -> None:
    entries = {
        name: (variable, limits) for variable, name, limits in ENTRY.findall(SOURCE.read_text())
    }
    core = {known.name: known for known in options() if known.core}
    assert set(entries) == set(core) - WITHOUT_USE
    for name, (variable, limits) in entries.items():
        known = core[name]
        assert variable == known.variable
        given = [each.strip().replace("'", "") for each in limits.split(",") if each.strip()]
        assert ("true" in given) == known.power_of_two, name
        numbers = [float(each) for each in given if each != "true"]
        assert numbers == [] if known.low is None else numbers == [known.low, known.high], name


def test_the_plugin_has_the_default_and_range_of_its_own_option() -> None:
    (known,) = (each for each in options() if each.name == "nccl_exit_s")
    header = SOURCE.with_suffix(".hpp").read_text()
    limits = f"{{{known.low:g}, {known.high:g}}}"
    assert f'"{known.variable}", {limits}, options.exit_s' in SOURCE.read_text()
    assert f"double exit_s = {known.default:g};" in header
