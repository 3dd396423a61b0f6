"""The Kubernetes example for SGLang: patches of the example for vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from json_patches import patched

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


def example() -> dict[str, Any]:
    """Returns the LeaderWorkerSet after the patches."""
    given = yaml.safe_load((DEPLOY / "kubernetes" / "lws.yaml").read_text())
    steps = yaml.safe_load((DEPLOY / "kubernetes-sglang" / "engine.yaml").read_text())
    made: dict[str, Any] = patched(given, steps)
    return made


def pods() -> list[dict[str, Any]]:
    template = example()["spec"]["leaderWorkerTemplate"]
    return [template["leaderTemplate"], template["workerTemplate"]]


def test_the_patches_apply_to_the_example_for_vllm() -> None:
    whole = yaml.safe_load((DEPLOY / "kubernetes-sglang" / "kustomization.yaml").read_text())
    assert whole["resources"] == ["../kubernetes"]
    [patch] = whole["patches"]
    assert patch["target"] == {"kind": "LeaderWorkerSet", "name": example()["metadata"]["name"]}
    [image] = whole["images"]
    listed = yaml.safe_load((DEPLOY / "kubernetes" / "kustomization.yaml").read_text())["images"]
    assert image["name"] == listed[0]["name"]


@pytest.mark.parametrize("index", [0, 1])
def test_the_pods_match_the_schema_and_name_each_other(index: int) -> None:
    pod = pods()[index]
    kubernetes_validate.validate(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "x", **pod["metadata"]},
            "spec": pod["spec"],
        },
        kubernetes_validate.latest_version(),
        strict=True,
    )
    engine = pod["spec"]["containers"][0]
    assert engine["command"] == ["sglang", "serve", "/models/llm"]
    rank = ("0", "$(LWS_WORKER_INDEX)")[index]
    assert {
        "--distributed-backend=r2ccl",
        "--nnodes=2",
        f"--node-rank={rank}",
        "--dist-init-addr=$(LWS_LEADER_ADDRESS):29500",
    } <= set(engine["args"])
    names = [each["name"] for each in engine["env"]]
    assert "SGLANG_HOST_IP" in names
    assert "VLLM_HOST_IP" not in names
    assert not [each for each in engine["args"] if "headless" in each]


def test_probes_wait_for_the_answer_of_health() -> None:
    """SGLang answers after 20 s at the latest; a pod outlives a link without rails for 30 s."""
    engine = pods()[0]["spec"]["containers"][0]
    for name in ("livenessProbe", "readinessProbe"):
        assert engine[name]["timeoutSeconds"] > 20
    alive = engine["livenessProbe"]
    assert alive["failureThreshold"] * alive["periodSeconds"] > 30
