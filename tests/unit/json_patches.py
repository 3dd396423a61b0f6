"""Patches of manifests as kustomize applies them (RFC 6902: add and replace)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any


def patched(given: Any, steps: Sequence[dict[str, Any]]) -> Any:
    """Returns a copy of the manifest after all steps, which must change something.

    Raises:
        KeyError: a path does not exist.
    """
    # YAML's anchors share parts of both templates; kustomize copies them.
    made = json.loads(json.dumps(given))
    for step in steps:
        assert set(step) == {"op", "path", "value"}
        at: Any = made
        names = (name.replace("~1", "/") for name in step["path"].split("/")[1:])
        *above, last = names
        for name in above:
            at = at[int(name)] if isinstance(at, list) else at[name]
        key = int(last) if isinstance(at, list) else last
        if step["op"] == "replace":
            assert at[key] != step["value"], f"{step['path']}: the patch changes nothing"
        else:
            assert step["op"] == "add"
            assert key not in at, f"{step['path']} is there already"
        at[key] = step["value"]
    return made
