"""The option table: parsing, validation, and the copies in the core and in the docs."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from pathlib import Path

import pytest

from r2serve import _core, cpus
from r2serve.cli.config import markdown
from r2serve.config import Config, options
from r2serve.errors import ConfigError
from r2serve.option import PREFIX, Option, show

ROOT = Path(__file__).resolve().parents[2]


def test_defaults_are_valid_and_complete() -> None:
    config = Config()
    assert [option.name for option, _ in config.describe()] == [
        field.name for field in dataclasses.fields(Config)
    ]
    for option, value in config.describe():
        assert value == option.default
        assert option.meaning
        assert not option.meaning.endswith(".")
        if option.kind in (int, float):
            assert option.low is not None
            assert option.high is not None
            unit_in_name = re.search(r"_(ms|us|s|bytes)$", option.name)
            if unit_in_name:
                assert option.unit == unit_in_name[1]


def test_core_has_the_same_fields_and_defaults() -> None:
    assert _core.config_defaults() == Config().core_fields()


# Values valid without other changes; every option not listed gets its upper limit.
SAMPLES = {
    "rails": "eth1,10.0.0.7",
    "node": "per-rank",
    "management": "eth0",
    "ports": "40000-40050",
    "control": "direct",
    "control_master": "10.0.0.1,10.0.1.1",
    "resilience": "off",
    "fallback": "off",
    "checksum": "on",
    "small_message_bytes": "1024",
    "chunk_bytes": "65536",
    "slot_bytes": "2097152",
    "ack_deadline_floor_ms": "200",
    "rejoin_backoff_min_ms": "0",
    "rejoin_backoff_max_ms": "50",
    "algorithm": "two_shot",
    "consensus": "site-error",
    "simd": "portable",
    "log_level": "debug",
    "rdma": "off",
    "drills": "on",
    "cuda_library": "libcuda_of_the_test.so",
    "fuse": "off",
    "gpu_direct": "off",
    "verbs_rnr_retry": "3",
    "serving_engine": "llama-a",
    "background_cpus": str(min(os.sched_getaffinity(0))),
}


@pytest.mark.parametrize("option", options(), ids=lambda option: option.name)
def test_every_option_is_read_from_its_variable(option: Option, tmp_path: Path) -> None:
    if option.name in ("journal_dir", "fault_file"):
        text = str(tmp_path)
    elif option.name == "secret_file":
        (tmp_path / "key").write_text("k" * 32)
        text = str(tmp_path / "key")
    elif option.name in SAMPLES:
        text = SAMPLES[option.name]
    else:
        assert option.high is not None
        text = show(option.kind(option.high))
    others = {"R2CCL_JOURNAL_DIR": str(tmp_path)} if option.name == "drills" else {}
    config = Config.from_env(others | {option.variable: f" {text} "})
    assert show(getattr(config, option.name)) == text
    assert getattr(config, option.name) != option.default
    assert Config.from_env(others) == dataclasses.replace(config, **{option.name: option.default})


def test_the_case_of_a_choice_does_not_matter() -> None:
    assert Config.from_env({"R2CCL_LOG_LEVEL": "INFO"}).log_level == "info"
    with pytest.raises(ConfigError, match="'LOUD'"):
        Config.from_env({"R2CCL_LOG_LEVEL": "LOUD"})


@pytest.mark.parametrize("option", options(), ids=lambda option: option.name)
def test_a_wrong_value_is_an_error_with_field_value_and_range(option: Option) -> None:
    wrong = {
        "journal_dir": "a\0b",
        "fault_file": "/nonexistent/folder/faults",
        "rails": "a,,b",
    }.get(option.name)
    if wrong is None:
        wrong = "two words" if option.kind is str and not option.choices else "nonsense"
    with pytest.raises(ConfigError) as caught:
        Config.from_env({option.variable: wrong})
    assert re.search(rf"\b{option.name} \({option.variable}\)", str(caught.value))
    assert wrong in str(caught.value) or repr(wrong) in str(caught.value)
    assert "must be" in str(caught.value)


@pytest.mark.parametrize(
    "option", [o for o in options() if o.low is not None], ids=lambda o: o.name
)
def test_values_outside_the_range_are_refused(option: Option) -> None:
    assert option.low is not None
    assert option.high is not None
    for outside in (option.low - 1, option.high + 1):
        with pytest.raises(ConfigError, match=option.name):
            Config(**{option.name: option.kind(outside)})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"slot_bytes": 200_000}, "slot_bytes"),
        ({"slot_bytes": 1 << 20, "chunk_bytes": 8192, "small_message_bytes": 0}, "slot_bytes"),
        (
            {"small_message_bytes": 4097, "chunk_bytes": 4096, "slot_bytes": 8192},
            "small_message_bytes",
        ),
        ({"ack_deadline_floor_ms": 201, "dead_deadline_ms": 200}, "ack_deadline_floor_ms"),
        ({"rejoin_backoff_min_ms": 2, "rejoin_backoff_max_ms": 1}, "rejoin_backoff_min_ms"),
        ({"slots": 6}, "slots"),
        ({"chunk_bytes": 100_000}, "chunk_bytes"),
        ({"rails": "eth0,eth0"}, "rails"),
        ({"rails": "eth0, eth1"}, "rails"),
        ({"node": "a b"}, "node"),
        ({"ports": "40050-40000"}, "ports"),
        ({"ports": "0-40000"}, "ports"),
        ({"ports": "40000-65536"}, "ports"),
        ({"ports": "40000-"}, "ports"),
        ({"background_cpus": "3-0"}, "background_cpus"),
        ({"background_cpus": "0,"}, "background_cpus"),
        ({"background_cpus": "0-8192"}, "background_cpus"),
        ({"background_cpus": "-1"}, "background_cpus"),
        ({"link_timeout_s": float("nan")}, "link_timeout_s"),
        ({"resilience": 1}, "resilience"),
        ({"slots": True}, "slots"),
        ({"slots": 8.0}, "slots"),
    ],
)
def test_rules_across_fields_and_types(fields: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{named} "):
        Config(**fields)  # type: ignore[arg-type]


def test_cpus_outside_the_cpuset_are_refused_with_the_right_ones() -> None:
    permitted = cpus.permitted()
    absent = max(permitted) + 1
    with pytest.raises(ConfigError) as caught:
        Config(background_cpus=f"0-{absent}")
    text = str(caught.value)
    assert text.startswith(f"background_cpus (R2CCL_BACKGROUND_CPUS) is '0-{absent}': must be ")
    assert text.endswith(f"CPUs that this process may use ({cpus.shown(permitted)})")


def test_a_whole_number_is_a_number_of_seconds() -> None:
    assert Config(link_timeout_s=5).link_timeout_s == 5.0
    assert type(Config(link_timeout_s=5).link_timeout_s) is float


def test_keywords_win_over_the_environment() -> None:
    config = Config.from_env({"R2CCL_SLOTS": "nonsense", "R2CCL_SPIN_US": "7"}, slots=16)
    assert (config.slots, config.spin_us) == (16, 7)


def test_a_misspelt_variable_logs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="r2serve"):
        assert Config.from_env({"R2CCL_RIALS": "eth0", "PATH": "/bin"}) == Config()
    (record,) = caplog.records
    assert "R2CCL_RIALS" in record.getMessage()
    assert "did you mean R2CCL_RAILS?" in record.getMessage()


def test_the_configuration_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert page == markdown(), "run `make docs`"


def test_options_are_read_only_through_the_table() -> None:
    """Only config.py turns an R2CCL_ variable into behaviour.

    The network plugin runs in programs without Python; test_netplugin_options.py compares its
    options with the table.
    """
    known = {option.variable for option in options()}
    readers = []
    for source in (ROOT / "csrc").rglob("*.[ch][cp]*"):
        if "getenv" in source.read_text():
            readers.append(source)
    assert readers == [ROOT / "csrc" / "netplugin" / "options.cc"]
    for source in (ROOT / "r2serve").rglob("*.py"):
        for variable in re.findall(rf"\b{PREFIX}[A-Z_]*[A-Z]\b", source.read_text()):
            assert variable in known, f"{source}: {variable}"
