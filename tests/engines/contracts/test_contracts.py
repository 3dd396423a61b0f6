"""Compares every row of every table with the facts of every release named by the row."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from contracts import table
from contracts.projects import FOLDER, PROJECTS, Project, file_of, judge, load, releases
from contracts.wheels import fetched, read

from r2serve.engines.releases import is_supported
from r2serve.engines.vllm import relies_on as vllm_rows
from r2serve.kernels import relies_on as triton_rows
from r2serve.seams import Row, StoodInFor, Subclass

Facts = dict[str, Any]
ASYNC_OUTPUT = "vllm.v1.outputs.AsyncModelRunnerOutput"


def _each_row() -> Iterator[Any]:
    for project, release in releases():
        for row in project.rows:
            if release in row.releases:
                name = re.sub(r"\W+", "-", row.seam).strip("-")
                yield pytest.param(project, release, row, id=f"{project.name}-{release}-{name}")


@pytest.mark.parametrize(("project", "release", "row"), list(_each_row()))
def test_a_release_keeps_the_row(project: Project, release: str, row: Row) -> None:
    judge(project, release, row, load(project, release).facts)


@pytest.mark.parametrize("project", PROJECTS, ids=lambda project: project.name)
def test_rows_and_releases_fit_together(project: Project) -> None:
    seams = [row.seam for row in project.rows]
    assert len(seams) == len(set(seams))
    for row in project.rows:
        assert row.purpose, row.seam
        assert row.expects, row.seam
        assert row.releases, row.seam
        assert set(row.releases) <= set(project.releases), row.seam
        if row.releases != project.releases:
            assert row.exit, f"{row.seam}: holds for some releases alone, so its end is known"
        for expectation in row.expects:
            assert re.match(rf"(file:)?{project.name}[./]", expectation.subject), row.seam


def test_facts_exist_for_each_release_of_the_rows() -> None:
    assert {path.name for path in FOLDER.glob("*.json")} == {
        file_of(*each).name for each in releases()
    }


@pytest.mark.parametrize(
    ("project", "release"), list(releases()), ids=lambda value: getattr(value, "name", value)
)
def test_facts_are_about_the_subjects_of_rows(project: Project, release: str) -> None:
    kept = load(project, release)
    assert kept.wheel.startswith(f"{project.name}-{release}-")
    assert re.fullmatch(r"[0-9a-f]{64}", kept.sha256)
    subjects = {each.subject for row in project.rows for each in row.expects}
    assert set(kept.facts) == subjects, "write the facts again: python -m contracts.extract"


def test_the_rows_can_be_read_without_the_engines() -> None:
    code = (
        "import sys; sys.modules['vllm'] = sys.modules['triton'] = None\n"
        "from r2serve.engines.vllm.relies_on import ROWS as vllm\n"
        "from r2serve.kernels.relies_on import ROWS as triton\n"
        "print(len(vllm), len(triton))"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert told.stdout.split() == [str(len(vllm_rows.ROWS)), str(len(triton_rows.ROWS))]


def test_the_releases_are_the_tested_releases_of_the_plugin() -> None:
    assert all(is_supported("vllm", release) for release in vllm_rows.RELEASES)
    beyond = [
        f"0.{int(each.split('.')[1]) + step}" for each in vllm_rows.RELEASES for step in (-1, 1)
    ]
    tested = {release.rpartition(".")[0] for release in vllm_rows.RELEASES}
    assert not [
        release for release in beyond if is_supported("vllm", release) and release not in tested
    ]


def test_the_table_of_seams_is_up_to_date() -> None:
    assert table.written() == table.rendered(), "write it again: python -m contracts.table --write"


# ---- a row can fail ----


def _changed(subject: str, **fields: Any) -> Callable[[Facts], None]:
    def change(facts: Facts) -> None:
        assert subject in facts
        facts[subject] |= fields

    return change


def _gone(subject: str) -> Callable[[Facts], None]:
    def change(facts: Facts) -> None:
        assert facts[subject] is not None
        facts[subject] = None

    return change


def _without(subject: str, field: str, name: str) -> Callable[[Facts], None]:
    def change(facts: Facts) -> None:
        facts[subject][field].remove(name)

    return change


def _turned(subject: str) -> Callable[[Facts], None]:
    def change(facts: Facts) -> None:
        facts[subject]["order"].reverse()

    return change


_CUDA = "vllm.distributed.device_communicators.cuda_communicator.CudaCommunicator"
_GROUP = "vllm.distributed.parallel_state.GroupCoordinator.__init__"
_C10D = "file:torch/include/torch/csrc/distributed/c10d/*PyProcessGroup.hpp"


@pytest.mark.parametrize(
    ("name", "release", "change", "broken", "says"),
    [
        pytest.param(
            "vllm",
            "0.33.0",
            _changed(f"{_CUDA}.all_gather", parameters=["self, input_, dim=-1, sizes=None"]),
            ["collectives of a device communicator"],
            r"takes \(self, input_, dim=-1, sizes=None\), expected \(self, input_, dim=-1\)",
            id="the signature of an overridden method",
        ),
        pytest.param(
            "vllm",
            "0.32.0",
            _changed("vllm.utils.network_utils.get_ip", parameters=["interface"]),
            ["get_ip"],
            r"takes \(interface\), does not accept \(\)",
            id="the signature of a called function",
        ),
        pytest.param(
            "vllm",
            "0.33.0",
            _gone("vllm.distributed.get_tp_group"),
            ["operations of the fused pattern"],
            "get_tp_group does not exist",
            id="a missing name",
        ),
        pytest.param(
            "vllm",
            "0.33.0",
            _without("vllm.v1.core.sched.output.NewRequestData", "has", "prompt_len"),
            ["SchedulerOutput"],
            "NewRequestData has no prompt_len",
            id="a missing attribute",
        ),
        pytest.param(
            "vllm",
            "0.33.0",
            _changed(
                "vllm.v1.metrics.loggers.StatLoggerBase",
                abstract=["__init__", "flush", "log_engine_initialized", "record"],
            ),
            ["entry point vllm.stat_logger_plugins"],
            "abstract methods are .*'flush'",
            id="a new abstract method of a subclassed class",
        ),
        pytest.param(
            "vllm",
            "0.33.0",
            _turned(_GROUP),
            [
                "GroupCoordinator makes the communicator",
                "Platform.use_custom_op_collectives",
                "supports_tensor_dict (CPU)",
            ],
            "has .*'current_platform.use_custom_op_collectives', .*, expected",
            id="an order of calls",
        ),
        pytest.param(
            "vllm",
            "0.33.0",
            _changed("vllm.plugins.PLATFORM_PLUGINS_GROUP", value="'vllm.platforms'"),
            ["entry point vllm.platform_plugins"],
            "is 'vllm.platforms', expected 'vllm.platform_plugins'",
            id="the name of an entry point",
        ),
        pytest.param(
            "vllm",
            "0.33.0",
            _changed(ASYNC_OUTPUT, special=["__call__"]),
            ["AsyncModelRunnerOutput.get_output"],
            "has __call__, which a stand-in does not forward",
            id="a special method of an object with a stand-in",
        ),
        pytest.param(
            "torch",
            "2.15.0",
            _without(_C10D, "texts", "WORK_OVERRIDE(ProcessGroup, barrier, opts)"),
            ["methods of a group, as C++ calls them"],
            r"does not say WORK_OVERRIDE\(ProcessGroup, barrier, opts\)",
            id="a method called by C++",
        ),
        pytest.param(
            "torch",
            "2.14.0",
            _turned("torch.cuda.graph.__enter__"),
            ["graphs"],
            "graph.__enter__ has .*, expected",
            id="the first calls of a capture",
        ),
        pytest.param(
            "triton",
            "3.9.0",
            _gone("triton.language.debug_barrier"),
            ["debug_barrier"],
            "debug_barrier does not exist",
            id="a function of Triton's language",
        ),
    ],
)
def test_a_release_that_breaks_a_row_is_named(
    name: str, release: str, change: Callable[[Facts], None], broken: list[str], says: str
) -> None:
    [project] = [each for each in PROJECTS if each.name == name]
    facts = copy.deepcopy(load(project, release).facts)
    change(facts)
    failed = [row for row in project.rows if release in row.releases and row.broken(facts)]
    assert sorted(row.seam for row in failed) == sorted(broken)
    messages = []
    for row in failed:
        with pytest.raises(AssertionError) as error:
            judge(project, release, row, facts)
        messages.append(str(error.value))
        assert messages[-1].startswith(f"{name} {release}, row {row.seam!r} does not hold")
    assert any(re.search(says, message) for message in messages), messages


@pytest.mark.parametrize("project", PROJECTS, ids=lambda project: project.name)
def test_no_expectation_holds_for_a_missing_subject(project: Project) -> None:
    """A missing subject breaks every expectation; a value without fields breaks all with fields."""
    for row in project.rows:
        for expectation in row.expects:
            alone = Row(row.seam, row.purpose, row.exit, (expectation,), row.releases)
            assert alone.broken({expectation.subject: None})
            if expectation.asks():
                assert expectation.broken({"is": "value"}) is not None, (row.seam, expectation)


def test_a_subject_that_is_no_class_has_no_subclass() -> None:
    assert Subclass("vllm.x").broken({"is": "class", "abstract": []}) is None
    assert Subclass("vllm.x").broken({"is": "value"}) == "is a value, no class"


def test_facts_that_are_older_than_a_row_are_no_pass() -> None:
    project = PROJECTS[0]
    with pytest.raises(AssertionError, match=r"vllm 0\.33\.0, row .* write them again"):
        judge(project, "0.33.0", project.rows[0], {})


def test_a_subclass_of_the_async_output_breaks_with_033_and_a_stand_in_does_not() -> None:
    """vLLM 0.33 added an abstract method, so a subclass with only get_output has no instances."""
    project = PROJECTS[0]
    facts = {release: load(project, release).facts[ASYNC_OUTPUT] for release in project.releases}
    subclassed = Subclass(ASYNC_OUTPUT, ("get_output",))
    assert subclassed.broken(facts["0.32.0"]) is None
    assert "'get_kv_connector_output'" in str(subclassed.broken(facts["0.33.0"]))
    stands_in = StoodInFor(ASYNC_OUTPUT, "get_output")
    assert [stands_in.broken(facts[release]) for release in project.releases] == [None, None]
    [row] = [row for row in project.rows if stands_in in row.expects]
    assert not [each for each in row.expects if isinstance(each, Subclass)]


# ---- the facts come from the wheels ----


@pytest.mark.long
@pytest.mark.parametrize(
    ("project", "release"), list(releases()), ids=lambda value: getattr(value, "name", value)
)
def test_the_wheel_has_these_facts(project: Project, release: str) -> None:
    kept = load(project, release)
    with fetched(project, release) as wheel:
        found = read(project, wheel)
    assert (found.wheel, found.sha256) == (kept.wheel, kept.sha256)
    changed = [name for name, fact in kept.facts.items() if found.facts[name] != fact]
    assert not changed, {name: (kept.facts[name], found.facts[name]) for name in changed}
