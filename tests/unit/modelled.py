"""What a model of a file drops or would refuse; for Grafana, by its Foundation SDK."""

from __future__ import annotations

import copy
import json
import types
import typing
from collections.abc import Iterator
from enum import Enum
from typing import Any

from grafana_foundation_sdk.cog import plugins, runtime
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard


def lost(given: Any, kept: Any, path: str = "") -> Iterator[str]:
    """Yields the parts of `given` missing in `kept`: a model ignores fields unknown to it."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for key, value in given.items():
            if key in kept:
                yield from lost(value, kept[key], f"{path}.{key}")
            else:
                yield f"{path}.{key}"
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for index, (one, other) in enumerate(zip(given, kept, strict=True)):
            yield from lost(one, other, f"{path}[{index}]")
    elif given != kept:
        yield f"{path}: {given!r}"


def fits(value: Any, hint: Any) -> bool:
    """Returns whether a value has the type given in Grafana's Foundation SDK."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, one) for one in args)
    if origin is list:
        return isinstance(value, list) and all(fits(one, args[0]) for one in value)
    if origin is dict:
        return isinstance(value, dict) and all(fits(one, args[1]) for one in value.values())
    if origin is typing.Literal:
        return value in args
    if isinstance(hint, type) and issubclass(hint, Enum):
        return value in [one.value for one in hint]
    if hint in (object, typing.Any):
        return True
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return isinstance(value, hint)


def misfits(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, list):
        for index, one in enumerate(value):
            yield from misfits(one, f"{path}[{index}]")
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from misfits(one, f"{path}.{key}")
    elif callable(getattr(value, "to_json", None)):
        for name, hint in typing.get_type_hints(type(value)).items():
            inner = getattr(value, name)
            if not fits(inner, hint):
                yield f"{path}.{name}: {inner!r} is not {hint}"
            yield from misfits(inner, f"{path}.{name}")


def faults(data: dict[str, Any]) -> list[str]:
    """Returns the parts of a dashboard not allowed by Grafana's Foundation SDK."""
    plugins.register_default_plugins()
    data = copy.deepcopy(data)
    for one in data["annotations"]["list"]:  # the SDK has no fields of Prometheus' annotations
        for name in ("step", "titleFormat", "textFormat", "tagKeys"):
            one.pop(name)
    unknown = [one["type"] for one in data["panels"] if one["type"] != "row"]
    unknown = [kind for kind in unknown if runtime.panelcfg_config(kind) is None]
    model = Dashboard.from_json(data)
    again = json.loads(json.dumps(model, cls=JSONEncoder))
    return [*unknown, *lost(data, again), *misfits(model)]
