"""Extracts facts from a small wheel; an import of the wheel would fail."""

from __future__ import annotations

import subprocess
import zipfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from contracts import wheels
from contracts.facts import extract
from contracts.projects import Project
from contracts.sources import Sources

from r2serve.seams import (
    Accepts,
    Expectation,
    Has,
    InOrder,
    Row,
    Says,
    StoodInFor,
    Subclass,
    Takes,
    There,
    fits,
)

FILES = {
    "engine/__init__.py": """
        raise RuntimeError("imported")
        from .groups import *
        from . import groups as aliased
        import engine.groups
        if TYPE_CHECKING:
            current: Platform
        from .platform import Platform
        """,
    "engine/groups.py": """
        import abc
        from engine.platform import Fast as Imported
        GROUP = "engine.plugins"
        _groups: dict[str, Group] = {}
        class Base(abc.ABC):
            def __init__(self, group, device=None): self.group, self.rank = group, 0
            @abc.abstractmethod
            def reduce(self, tensor: Tensor) -> Tensor: ...
            @property
            @abc.abstractmethod
            def size(self): ...
        class Group(Base, Imported[int]):
            kind: int
            def reduce(self, tensor: Tensor, *, out: Tensor | None = None) -> Tensor:
                def inner(): first.call()
                if out is None:
                    made = make(name=self.group)
                return getattr(second.then().third, 'tensor_dict', made)
            def __call__(self): ...
        """,
    "engine/platform.py": """
        try:
            import there
            class Slow: ...
        except ImportError:
            class Fallback: ...
        class Fast:
            backend = 'fast'
            def count(cls): ...
        class _Other: ...
        Platform = Fast if there else _Other
        made = Fast()
        """,
    "engine/_C.pyi": """
        from typing import overload
        class Store:
            @overload
            def wait(self, keys: list[str]) -> None: ...
            @overload
            def wait(self, keys: list[str], timeout: float = ...) -> None: ...
        """,
    "engine/include/py/group.hpp": """
        CALL(Group, /* the name */ reduce, // one
             tensor);
        """,
}


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    made = tmp_path / "engine-1.0-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as archive:
        for name, text in FILES.items():
            lines = text.splitlines()[1:]
            indent = len(lines[0]) - len(lines[0].lstrip())
            archive.writestr(name, "\n".join(line[indent:] for line in lines))
    return made


@pytest.fixture
def sources(wheel: Path) -> Iterator[Sources]:
    with closing(Sources(wheel)) as opened:
        yield opened


def facts(sources: Sources, *expects: Expectation) -> dict[str, Any]:
    return extract(sources, [Row("seam", "purpose", "", expects, ("1.0",))])


def fact(sources: Sources, expectation: Expectation) -> Any:
    return facts(sources, expectation)[expectation.subject]


@pytest.mark.parametrize(
    ("subject", "found"),
    [
        ("engine", {"is": "module"}),
        ("engine.groups.GROUP", {"is": "value", "value": "'engine.plugins'"}),
        ("engine.GROUP", {"is": "value", "value": "'engine.plugins'"}),
        ("engine.aliased.GROUP", {"is": "value", "value": "'engine.plugins'"}),
        ("engine.engine.groups.GROUP", {"is": "value", "value": "'engine.plugins'"}),
        ("engine.Group", {"is": "class"}),
        ("engine.Platform", {"is": "class"}),
        ("engine.current", {"is": "value"}),
        ("engine.platform.Slow", {"is": "class"}),
        ("engine.platform.Fallback", {"is": "class"}),
        ("engine.platform.made.backend", {"is": "value", "value": "'fast'"}),
        ("engine.platform.none_such", None),
        ("engine.none_such.Group", None),
        ("engine.GROUP.upper", None),
        ("elsewhere.Group", None),
    ],
)
def test_a_name_is_resolved_to_its_definition(
    sources: Sources, subject: str, found: dict[str, Any] | None
) -> None:
    assert fact(sources, There(subject)) == found


@pytest.mark.parametrize(
    ("subject", "parameters"),
    [
        ("engine.Group.reduce", ["self, tensor, *, out=None"]),
        ("engine.Group.__init__", ["self, group, device=None"]),
        ("engine.current.count", ["cls"]),
        ("engine._C.Store.wait", ["self, keys", "self, keys, timeout=..."]),
    ],
)
def test_parameters_come_without_types_one_text_an_overload(
    sources: Sources, subject: str, parameters: list[str]
) -> None:
    assert fact(sources, Takes(subject, ""))["parameters"] == parameters


def test_attributes_are_own_inherited_and_set_on_self(sources: Sources) -> None:
    asked = ("kind", "rank", "group", "backend", "reduce", "made", "nothing")
    found = fact(sources, Has("engine.Group", asked))["has"]
    assert found == ["backend", "group", "kind", "rank", "reduce"]


def test_abstract_methods_are_those_left_undefined_by_subclasses(sources: Sources) -> None:
    assert fact(sources, Subclass("engine.Base"))["abstract"] == ["reduce", "size"]
    of_group = fact(sources, Subclass("engine.Group"))
    assert of_group["abstract"] == ["size"]
    assert of_group["methods"] == ["__call__", "__init__", "count", "reduce", "size"]
    assert fact(sources, StoodInFor("engine.Group", "reduce"))["special"] == ["__call__"]
    assert fact(sources, StoodInFor("engine.Base", "reduce"))["special"] == []


def test_order_is_the_order_of_first_mentions(sources: Sources) -> None:
    marks = ("made", "make", "first.call", "name=", "'tensor_dict'", "second.then", ".third", "x")
    found = fact(sources, InOrder("engine.Group.reduce", marks))["order"]
    order = ["first.call", "make", "name=", "made", "second.then", ".third", "'tensor_dict'"]
    assert found == order


def test_texts_of_files_count_without_blanks_and_comments(sources: Sources) -> None:
    texts = ("CALL(Group, reduce, tensor);", "CALL(Group, gather")
    assert fact(sources, Says("file:engine/include/*group.hpp", texts)) == {
        "is": "file",
        "texts": [texts[0]],
    }
    assert fact(sources, Says("file:engine/include/*none.hpp", texts)) is None


@pytest.mark.parametrize(
    ("parameters", "call", "accepted"),
    [
        ("self, a, b=1", "self, x", True),
        ("self, a, b=1", "self", False),
        ("self, a, b=1", "self, x, b=", True),
        ("self, a, b=1", "self, x, y, b=", False),
        ("self, a, b=1", "self, x, c=", False),
        ("a, /, *, b", "x, b=", True),
        ("a, /, *, b", "x", False),
        ("a, /, *, b=None", "a=", False),
        ("*args, **kwargs", "x, y, z=", True),
        ("", "", True),
        ("", "x", False),
    ],
)
def test_a_call_fits_or_does_not(parameters: str, call: str, accepted: bool) -> None:
    assert fits(parameters, call) is accepted
    broken = Accepts("engine.f", call).broken({"is": "function", "parameters": [parameters]})
    assert (broken is None) is accepted


def test_an_unavailable_wheel_is_an_error_with_pips_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    project = Project("r2serve-none-such", (), ("1.0",))
    with (
        pytest.raises(wheels.WheelError, match=r"(?s)==1\.0: no wheel \(status 1\).*No matching"),
        wheels.fetched(project, "1.0"),
    ):
        pytest.fail("a wheel came")


def test_a_wheel_that_takes_too_long_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: object, timeout: float, **__: object) -> None:
        raise subprocess.TimeoutExpired("pip", timeout, output="Downloading")

    monkeypatch.setattr(subprocess, "run", late)
    project = Project("engine", (), ("1.0",))
    with (
        pytest.raises(wheels.WheelError, match=r"(?s)no wheel within 540 s.*Downloading"),
        wheels.fetched(project, "1.0"),
    ):
        pytest.fail("a wheel came")


def test_a_wheel_is_read_with_its_hash(wheel: Path) -> None:
    row = Row("seam", "purpose", "", (There("engine.GROUP"),), ("1.0",))
    kept = wheels.read(Project("engine", (row,), ("1.0",)), wheel)
    assert kept.wheel == wheel.name
    assert len(kept.sha256) == 64
    assert list(kept.facts) == ["engine.GROUP"]
