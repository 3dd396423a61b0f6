"""Checks the contents of deploy/ with the tools and schemas of the programs reading them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from cloudcoil.models.prometheus_operator.v1 import PodMonitor, PrometheusRule
from fastapi.testclient import TestClient
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Dashboard
from json_patches import patched
from modelled import faults, lost
from pairs import Pair
from prometheus_client.parser import text_string_to_metric_families

from r2serve.config import options
from r2serve.observe.sidecar import app as sidecar
from r2serve.observe.sidecar.cli import command as sidecar_command
from r2serve.observe.sidecar.metrics import Metrics
from r2serve.observe.watch import Watch

ROOT = Path(__file__).resolve().parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
RULES = PROMETHEUS / "r2serve.rules.yml"
RULES_TEST = PROMETHEUS / "r2serve.rules_test.yml"
KUBERNETES = ROOT / "deploy" / "kubernetes"
GPUS = ROOT / "deploy" / "kubernetes-gpu"

SCRAPED = {"job", "instance"}
"""Labels added by a scrape."""
ENDS_WITHIN_S = 20
"""Time of vLLM's processes to end after the last request: 5 s, SIGTERM, 4 s, SIGKILL, a node."""
KUBERNETES_VERSIONS = ("1.29", kubernetes_validate.latest_version())

Json = dict[str, Any]


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def dashboard() -> Json:
    found: Json = json.loads((ROOT / "deploy/grafana/r2serve.json").read_text())
    return found


def panels() -> list[Json]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def annotations() -> list[Json]:
    return list(dashboard()["annotations"]["list"])


def alerts() -> list[Json]:
    (group,) = load(RULES)["groups"]
    return list(group["rules"])


# ---- metrics in use exist ----


def exported(folder: Path) -> dict[str, set[str]]:
    """Returns the labels of every series of a sidecar, including series without samples now."""
    found = {}
    for family in Metrics(Watch(folder)).collect():
        # prometheus_client has no public access to label names
        labels = set(getattr(family, "_labelnames", ()))
        if family.type == "histogram":
            found[f"{family.name}_bucket"] = labels | {"le"}
            found[f"{family.name}_sum"] = found[f"{family.name}_count"] = labels
        else:
            found[family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")] = (
                labels
            )
    return found


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"\br2serve_\w+", expression))


def labels_in(text: str) -> set[str]:
    """Returns the labels in a PromQL expression, or in a text with templates."""
    grouped = re.findall(r"\b(?:by|without|on)\s*\(([^)]*)\)", text)
    found = {label.strip() for labels in grouped for label in labels.split(",")}
    found |= set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", text))
    found |= set(re.findall(r"\{\{\s*(?:\$labels\.)?([a-z]\w*)", text))
    return found - {"with", "end"}  # words of the template language


def dashboard_queries() -> list[tuple[str, str]]:
    """Returns every expression, with the text that shows its labels."""
    found = [
        (target["expr"], target["legendFormat"])
        for panel in panels()
        for target in panel["targets"]
    ]
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            call = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
            assert call, variable["query"]
            found.append((call[1], f"{{{{{call[2]}}}}}"))
    found += [(one["expr"], one["titleFormat"] + one["textFormat"]) for one in annotations()]
    return found


def alert_queries() -> list[tuple[str, str]]:
    return [(rule["expr"], " ".join(rule["annotations"].values())) for rule in alerts()]


def test_the_series_of_a_real_journal_match_the_checked_list(pair: Pair) -> None:
    pair.cut_and_heal(1)
    with TestClient(sidecar.make_app(Watch(pair.folder)), base_url="http://localhost") as client:
        text = client.get("/metrics").text
    known = exported(pair.folder)
    known["r2serve_build_info"] = {"version"}  # the value of an info family is its labels
    samples = [sample for one in text_string_to_metric_families(text) for sample in one.samples]
    assert {"r2serve_ready", "r2serve_rail_up", "r2serve_rail_bytes_total"} <= {
        sample.name for sample in samples
    }
    for sample in samples:
        if not sample.name.startswith("process_"):  # the client's own metrics of the sidecar
            assert set(sample.labels) == known[sample.name], sample.name


@pytest.mark.parametrize(("expression", "shown"), [*dashboard_queries(), *alert_queries()])
def test_queries_use_only_metrics_and_labels_of_the_sidecar(
    expression: str, shown: str, tmp_path: Path
) -> None:
    known = exported(tmp_path)
    names = names_in(expression)
    assert names <= set(known), names - set(known)
    labels = set().union(SCRAPED, *(known[name] for name in names))
    assert labels_in(expression) | labels_in(shown) <= labels


def test_the_alerts_are_tested_with_the_sidecars_series(tmp_path: Path) -> None:
    known = exported(tmp_path)
    for test in load(RULES_TEST)["tests"]:
        for series in test["input_series"]:
            name = series["series"].partition("{")[0]
            if name != "up":
                assert labels_in(series["series"]) == known[name] | SCRAPED, series


def test_the_dashboard_shows_every_metric(tmp_path: Path) -> None:
    shown = {
        name for panel in panels() for one in panel["targets"] for name in names_in(one["expr"])
    }
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
    for name in exported(tmp_path):
        family = re.sub(r"_(bucket|sum|count)$", "", name)
        # Exceptions: the version, the labels for joins with vLLM's metrics, metrics for an alert
        # or for the balancer of several engines, times for queries, and the peers' state, which
        # Prometheus shows as `up`.
        about = (
            "r2serve_build_info",
            "r2serve_engine_info",
            "r2serve_rail_connections_total",
            "r2serve_rail_state_since_timestamp_seconds",
            "r2serve_serving_engine_ready",
            "r2serve_workers_without_journal",
            "r2serve_peer_up",
        )
        assert family in families or family in about, name


# ---- the dashboard ----


def test_grafana_knows_every_field_of_the_dashboard() -> None:
    assert faults(dashboard()) == []
    assert dashboard()["schemaVersion"] == Dashboard().schema_version


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data, panel: data.update(schemVersion=41),
        lambda data, panel: data.update(refresh=15),
        lambda data, panel: data["templating"]["list"][1].update(multi="yes"),
        lambda data, panel: panel.update(type="timesseries"),
        lambda data, panel: panel["gridPos"].update(w="12"),
        lambda data, panel: panel["targets"][0].update(legend="x"),
        lambda data, panel: panel["targets"][0].update(instant="true"),
        lambda data, panel: panel["fieldConfig"]["defaults"].update(units="s"),
        lambda data, panel: panel["fieldConfig"]["defaults"]["custom"].update(drawStyle="dots"),
        lambda data, panel: panel["options"]["legend"].update(placement="top"),
    ],
)
def test_a_wrong_field_is_found(spoil: Any) -> None:
    data = dashboard()
    spoil(data, next(one for one in data["panels"] if one["type"] == "timeseries"))
    assert faults(data) != []


def test_panels_have_titles_descriptions_and_units() -> None:
    known = {value for name, value in vars(units).items() if not name.startswith("_")}
    for panel in panels():
        assert panel["title"], panel
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"] in known, panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        for target in panel["targets"]:
            assert target["legendFormat"], panel["title"]
            assert target["datasource"] == panel["datasource"]
    assert len({panel["title"] for panel in panels()}) == len(panels())


def test_the_graphs_mark_lost_rails_and_drills() -> None:
    """A reader of any graph sees the reason of a dent, and a drill apart from a fault."""
    lost_rails, drills = annotations()
    for one in (lost_rails, drills):
        assert one["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert one["enable"]
        assert "{{rail}} on {{host}}" in one["titleFormat"]
    assert 'injected="false"' in lost_rails["expr"]
    assert names_in(drills["expr"]) == {"r2serve_drill_active"}


def test_panels_do_not_overlap() -> None:
    everything = dashboard()["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)
    cells = {
        panel["id"]: {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        for panel in everything
        for at in [panel["gridPos"]]
    }
    assert all(0 <= x < 24 for taken in cells.values() for x, _ in taken)
    for one, other in combinations(cells, 2):
        assert not cells[one] & cells[other], (one, other)


def test_every_variable_is_used() -> None:
    variables = {variable["name"] for variable in dashboard()["templating"]["list"]}
    assert variables == {"datasource", "instance", "node", "worker", "group"}
    text = json.dumps(dashboard()["panels"])
    used = set(re.findall(r"\$\{?(\w+)", text))
    assert variables <= used
    assert used - variables == {"__rate_interval", "__interval", "__range"}


# ---- Prometheus ----


@pytest.fixture(scope="module")
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("no promtool; deploy/setup/system.sh test brings it")
    return found


def run(*command: str | Path) -> None:
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_promtool_accepts_rules_and_configuration(promtool: str) -> None:
    run(promtool, "check", "rules", "--lint=all", "--lint-fatal", RULES)
    run(promtool, "check", "config", "--lint=all", "--lint-fatal", PROMETHEUS / "prometheus.yml")


def test_alerts_fire_only_when_they_should(promtool: str) -> None:
    run(promtool, "test", "rules", RULES_TEST)


def test_every_alert_is_tested_firing_and_silent() -> None:
    seen = [
        (case["alertname"], bool(case["exp_alerts"]))
        for test in load(RULES_TEST)["tests"]
        for case in test["alert_rule_test"]
    ]
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names)
    assert set(seen) == {(name, fires) for name in names for fires in (True, False)}


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_alerts_have_a_severity_and_a_runbook(rule: Json) -> None:
    assert rule["labels"] in ({"severity": "critical"}, {"severity": "warning"})
    told = rule["annotations"]
    assert set(told) == {"summary", "description", "runbook_url", "dashboard_url"}
    begin = "{{{{ with $externalLabels.r2serve_{} }}}}{{{{ . }}}}/{{{{ end }}}}"
    assert told["dashboard_url"] == begin.format("grafana") + f"d/{dashboard()['uid']}"
    docs = begin.format("docs")
    assert told["runbook_url"].startswith(docs)
    page, _, anchor = told["runbook_url"].removeprefix(docs).partition("#")
    headings = re.findall(r"^#+ (.*)$", (ROOT / page).read_text(), re.MULTILINE)
    assert anchor in {re.sub(r"[^\w -]", "", one).lower().replace(" ", "-") for one in headings}


def test_the_labels_of_links_are_configured_and_kept_from_alertmanager() -> None:
    config = load(PROMETHEUS / "prometheus.yml")
    labels = set(config["global"]["external_labels"])
    assert set(re.findall(r"\$externalLabels\.(\w+)", RULES.read_text())) == labels
    (relabel,) = config["alerting"]["alert_relabel_configs"]
    assert relabel["action"] == "labeldrop"
    assert all(re.fullmatch(relabel["regex"], label) for label in labels)


def test_every_query_of_the_dashboard_finds_something(promtool: str, tmp_path: Path) -> None:
    series = []
    for name, labels in exported(tmp_path).items():
        counts = name.endswith(("_total", "_bucket", "_sum", "_count"))
        for direction in ("tx", "rx") if "direction" in labels else ("",):
            for edge in ("0.5", "+Inf") if "le" in labels else ("",):
                given = {"state": "UP", "kind": "tcp", "direction": direction, "le": edge}
                given["injected"] = "false"
                pairs = [f'{one}="{given.get(one, "x")}"' for one in sorted(labels | SCRAPED)]
                values = "1+1x60" if counts else "1x60"
                series.append({"series": f"{name}{{{', '.join(pairs)}}}", "values": values})
    cases = []
    for expression, _ in dashboard_queries():
        for macro in ("$__rate_interval", "$__interval", "$__range"):
            expression = expression.replace(macro, "1m")
        asked = f"count({re.sub(r'[$][a-z]+', 'x', expression)}) > bool 0"
        found = [{"labels": "{}", "value": 1}]
        cases.append({"expr": asked, "eval_time": "12m", "exp_samples": found})
    test = {"interval": "15s", "input_series": series, "promql_expr_test": cases}
    (tmp_path / "queries.yml").write_text(yaml.safe_dump({"tests": [test]}))
    run(promtool, "test", "rules", tmp_path / "queries.yml")


# ---- Kubernetes ----


def manifests(*, with_gpus: bool = False) -> list[Json]:
    """Returns the manifests as they are, or with the component for GPUs and RDMA."""
    found = []
    for path in sorted(KUBERNETES.glob("*.yaml")):
        text = path.read_text()
        found += [one for one in yaml.safe_load_all(text) if one["kind"] != "Kustomization"]
    if not with_gpus:
        return found
    (patch,) = load(GPUS / "kustomization.yaml")["patches"]
    target, steps = patch["target"], load(GPUS / patch["path"])
    wanted = target["kind"], target["name"]
    return [
        patched(one, steps) if (one["kind"], one["metadata"]["name"]) == wanted else one
        for one in found
    ]


def of_kind(kind: str, *, with_gpus: bool = False) -> list[Json]:
    return [one for one in manifests(with_gpus=with_gpus) if one["kind"] == kind]


def pod_templates(*, with_gpus: bool = False) -> tuple[Json, Json]:
    """Returns the pod templates of leader and worker."""
    (workers,) = of_kind("LeaderWorkerSet", with_gpus=with_gpus)
    template = workers["spec"]["leaderWorkerTemplate"]
    return template["leaderTemplate"], template["workerTemplate"]


def container(template: Json, name: str) -> Json:
    found: Json
    (found,) = [one for one in template["spec"]["containers"] if one["name"] == name]
    return found


def command_line(given: Json) -> list[str]:
    """Returns the command line with the variables set by LeaderWorkerSet for workers."""
    line = " ".join([*given["command"], *given["args"]])
    line = line.replace("$(LWS_LEADER_ADDRESS)", "r2serve-0.r2serve.default")
    line = line.replace("$(LWS_WORKER_INDEX)", "1")
    assert "$(" not in line
    return line.split()


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
@pytest.mark.parametrize("with_gpus", [False, True])
def test_core_objects_match_the_kubernetes_schemas(version: str, with_gpus: bool) -> None:
    objects = [
        *of_kind("Service"),
        *of_kind("PodDisruptionBudget"),
        *of_kind("NetworkPolicy"),
    ]
    for template in pod_templates(with_gpus=with_gpus):
        metadata = {"name": "x", **template["metadata"]}
        objects.append(
            {
                "apiVersion": "v1",
                "kind": "PodTemplate",
                "metadata": {"name": "x"},
                "template": template,
            }
        )
        objects.append(
            {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        )
    assert len(objects) == 7
    for one in objects:
        kubernetes_validate.validate(one, version, strict=True)


def test_a_field_unknown_to_kubernetes_is_found() -> None:
    (template, _) = pod_templates()
    spec = {**template["spec"], "terminationGracePeriod": 60}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(pod, KUBERNETES_VERSIONS[-1], strict=True)


def test_the_leader_worker_set_and_the_networks() -> None:
    """No package has the schemas of LeaderWorkerSet and Multus, so the test checks each field."""
    (workers,) = of_kind("LeaderWorkerSet")
    assert workers["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    spec = workers["spec"]
    assert set(spec) == {"replicas", "startupPolicy", "leaderWorkerTemplate"}
    assert (spec["replicas"], spec["startupPolicy"]) == (1, "LeaderCreated")
    template = dict(spec["leaderWorkerTemplate"])
    assert set(template) == {"size", "restartPolicy", "leaderTemplate", "workerTemplate"}
    assert (template["size"], template["restartPolicy"]) == (2, "RecreateGroupOnPodRestart")
    for network in of_kind("NetworkAttachmentDefinition"):
        assert network["apiVersion"] == "k8s.cni.cncf.io/v1"
        assert set(network["spec"]) == {"config"}
        config = json.loads(network["spec"]["config"])
        assert set(config) == {"cniVersion", "type", "master", "mode", "ipam"}
        assert config["ipam"]["type"] == "whereabouts"


def test_the_operators_objects_match_its_models() -> None:
    """The alerts are checked as well, as a PrometheusRule of the operator (deploy/README.md)."""
    rule: Json = {"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule"}
    rule |= {"metadata": {"name": "r2serve"}, "spec": load(RULES)}
    for model, given in ((PodMonitor, of_kind("PodMonitor")[0]), (PrometheusRule, rule)):
        kept = model.model_validate(given).model_dump(by_alias=True, exclude_none=True, mode="json")
        assert list(lost(given, kept)) == []


def test_kustomize_accepts_all_manifests() -> None:
    listed = set(load(KUBERNETES / "kustomization.yaml")["resources"])
    assert listed == {path.name for path in KUBERNETES.glob("*.yaml")} - {"kustomization.yaml"}
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl: what it makes of them is not seen")
    assert kustomized(KUBERNETES) == sorted(manifests(), key=kind_and_name)


def test_the_component_for_gpus_applies_to_both_examples(tmp_path: Path) -> None:
    page = (ROOT / "deploy/README.md").read_text()
    (written,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    overlay = yaml.safe_load(written)
    assert overlay == {
        "resources": ["r2serve/deploy/kubernetes"],
        "components": ["r2serve/deploy/kubernetes-gpu"],
    }
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl: what it makes of them is not seen")
    shutil.copytree(ROOT / "deploy", tmp_path / "r2serve" / "deploy")
    (tmp_path / "kustomization.yaml").write_text(written)
    assert kustomized(tmp_path) == sorted(manifests(with_gpus=True), key=kind_and_name)
    overlay["resources"] = ["r2serve/deploy/kubernetes-sglang"]
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    (made,) = [one for one in kustomized(tmp_path) if one["kind"] == "LeaderWorkerSet"]
    for pod in made["spec"]["leaderWorkerTemplate"].values():
        if isinstance(pod, dict):
            engine = container(pod, "engine")
            assert engine["command"][0] == "sglang"
            assert engine["resources"]["limits"]["nvidia.com/gpu"] == "1"


def kind_and_name(one: Json) -> tuple[str, str]:
    return one["kind"], one["metadata"]["name"]


def kustomized(folder: Path) -> list[Json]:
    """Returns what kubectl makes of a folder, without tags of images."""
    command = ["kubectl", "kustomize", str(folder)]
    made = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    (image,) = load(KUBERNETES / "kustomization.yaml")["images"]
    text = made.replace(f"{image['name']}:{image['newTag']}", image["name"])
    return sorted(yaml.safe_load_all(text), key=kind_and_name)


def test_names_within_the_manifests_match() -> None:
    leader, worker = pod_templates()
    (service,) = of_kind("Service")
    (budget,) = of_kind("PodDisruptionBudget")
    (monitor,) = of_kind("PodMonitor")
    assert service["spec"]["selector"].items() <= leader["metadata"]["labels"].items()
    assert not service["spec"]["selector"].items() <= worker["metadata"]["labels"].items()
    networks = [one["metadata"]["name"] for one in of_kind("NetworkAttachmentDefinition")]
    for template in (leader, worker):
        labels = template["metadata"]["labels"]
        for selector in (budget["spec"]["selector"], monitor["spec"]["selector"]):
            assert selector["matchLabels"].items() <= labels.items()
        assert labels[monitor["spec"]["jobLabel"]] == "r2serve"
        annotation = template["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"]
        assert annotation.split(", ") == networks
        volumes = {volume["name"] for volume in template["spec"]["volumes"]}
        for one in (*template["spec"]["containers"], *template["spec"]["initContainers"]):
            assert {mount["name"] for mount in one.get("volumeMounts", [])} <= volumes
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["port"] in [
            port["name"] for port in container(template, "sidecar")["ports"]
        ]
    assert (
        service["spec"]["ports"][0]["targetPort"] == container(leader, "engine")["ports"][0]["name"]
    )


def test_only_own_pods_and_prometheus_reach_the_sidecar() -> None:
    (policy,) = of_kind("NetworkPolicy")
    spec = policy["spec"]
    assert spec["policyTypes"] == ["Ingress"]
    named = set()
    for template in pod_templates():
        assert spec["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        for one in template["spec"]["containers"]:
            named |= {port["name"] for port in one.get("ports", [])}
    own, clients, monitoring = spec["ingress"]
    assert own == {"from": [{"podSelector": spec["podSelector"]}]}
    assert set(clients) == {"ports"}
    (source,) = monitoring["from"]
    assert set(source) == {"namespaceSelector"}
    opened = [[port["port"] for port in rule["ports"]] for rule in (clients, monitoring)]
    assert opened == [["api"], ["r2serve"]]
    assert named == {"api", "r2serve"}


def test_the_job_has_one_name() -> None:
    (job,) = load(PROMETHEUS / "prometheus.yml")["scrape_configs"]
    asked = {name for rule in alerts() for name in re.findall(r'job="(\w+)"', rule["expr"])}
    assert asked == {job["job_name"]} == {"r2serve"}
    default = next(one for one in sidecar_command.params if one.name == "port").default
    (targets,) = job["static_configs"]
    assert all(target.endswith(f":{default}") for target in targets["targets"])


def test_probes_use_existing_paths_and_ports(tmp_path: Path) -> None:
    with TestClient(sidecar.make_app(Watch(tmp_path)), base_url="http://localhost") as client:
        paths = set(client.get("/openapi.json").json()["paths"])
    for template in pod_templates():
        own = container(template, "sidecar")
        ports = {"r2serve": own["ports"][0]["containerPort"]}
        assert {own[probe]["httpGet"]["path"] for probe in ("readinessProbe", "livenessProbe")} == {
            "/readyz",
            "/livez",
        }
        for one in template["spec"]["containers"]:
            named = {port["name"]: port["containerPort"] for port in one.get("ports", [])}
            for name, probe in one.items():
                if name.endswith("Probe"):
                    asked = probe["httpGet"]
                    port = named.get(asked["port"], asked["port"])
                    assert isinstance(port, int), (one["name"], name)
                    if port == ports["r2serve"]:
                        assert asked["path"] in paths
                    else:
                        assert (one["name"], asked["path"]) == ("engine", "/health")


def test_the_sidecar_can_read_the_engines_journals() -> None:
    for template in pod_templates():
        assert template["spec"]["securityContext"]["runAsUser"] > 0
        own, engine = container(template, "sidecar"), container(template, "engine")
        for one in (own, engine):
            assert "runAsUser" not in one["securityContext"], "the pod's is that of both"
        (mounted,) = own["volumeMounts"]
        assert mounted["readOnly"]
        environment = {one["name"]: one.get("value") for one in engine["env"]}
        asked = sidecar_command.make_context("sidecar", command_line(own)[2:]).params
        assert str(asked["journal_dir"]) == mounted["mountPath"] == environment["R2CCL_JOURNAL_DIR"]
        assert (asked["host"], asked["port"]) == ("0.0.0.0", own["ports"][0]["containerPort"])
        assert mounted["name"] in [
            one["name"]
            for one in engine["volumeMounts"]
            if one["mountPath"] == mounted["mountPath"] and not one.get("readOnly")
        ]
        (volume,) = [one for one in template["spec"]["volumes"] if one["name"] == mounted["name"]]
        assert volume["emptyDir"]["medium"] == "Memory"


def test_pods_need_no_privilege_except_for_rdma() -> None:
    """Pods fit Pod Security's restricted profile, unless the component for RDMA is there."""
    for with_gpus in (False, True):
        for template in pod_templates(with_gpus=with_gpus):
            pod = template["spec"]
            assert pod["securityContext"]["runAsNonRoot"]
            assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            assert not pod["automountServiceAccountToken"]
            assert not pod.keys() & {"hostNetwork", "hostPID", "hostIPC"}
            for one in (*pod["containers"], *pod["initContainers"]):
                rights = one["securityContext"]
                assert rights["allowPrivilegeEscalation"] is False
                rdma = with_gpus and one["name"] == "engine"
                added = {"add": ["IPC_LOCK"]} if rdma else {}
                assert rights["capabilities"] == {"drop": ["ALL"], **added}
                asked = one["resources"]["limits"].keys() - {"memory"}
                assert asked == ({"nvidia.com/gpu", "rdma/rail0", "rdma/rail1"} if rdma else set())


def test_options_of_r2ccl_in_the_manifests_exist() -> None:
    known = {option.variable for option in options()}
    for template in pod_templates():
        given = {one["name"]: one.get("value") for one in container(template, "engine")["env"]}
        ours = {name for name in given if name.startswith(("R2CCL_", "R2SERVE_"))}
        assert {"R2CCL_JOURNAL_DIR", "R2CCL_RAILS"} <= ours <= known
        networks = template["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"].split(",")
        # Multus counts from net1
        rails = [f"net{number}" for number in range(1, len(networks) + 1)]
        assert given["R2CCL_RAILS"] == ",".join(rails)


def seconds_before_stop(engine: Json) -> int:
    command, seconds = engine["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    return int(seconds)


def shutdown_timeout(engine: Json) -> int:
    (found,) = [word for word in engine["args"] if word.startswith("--shutdown-timeout=")]
    return int(found.partition("=")[2])


@pytest.mark.case("28", "the follower ended its workers, and no stream finished")
def test_a_stopped_pod_has_time_for_its_requests() -> None:
    """The worker is stopped after the leader, outlasts it, and no pod is killed meanwhile."""
    leader, worker = (container(template, "engine") for template in pod_templates())
    assert shutdown_timeout(leader) == shutdown_timeout(worker) > 0
    assert 0 < seconds_before_stop(leader) < seconds_before_stop(worker)
    for template in pod_templates():
        engine = container(template, "engine")
        needed = seconds_before_stop(engine) + shutdown_timeout(engine) + ENDS_WITHIN_S
        assert template["spec"]["terminationGracePeriodSeconds"] >= needed


PARSE = """
import json, sys
from vllm.entrypoints.cli.serve import cmd_init
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
(serve,) = cmd_init()
serve.subparser_init(parser.add_subparsers())
asked = ("model_tag", "tensor_parallel_size", "nnodes", "node_rank", "master_addr", "master_port",
    "headless", "distributed_backend", "shutdown_timeout")
for line in json.loads(sys.argv[1]):
    found = vars(parser.parse_args(line))
    print(json.dumps({name: found[name] for name in asked}))
"""


@pytest.mark.skipif(find_spec("vllm") is None, reason="no vLLM")
@pytest.mark.slow
def test_vllm_accepts_the_command_lines(tmp_path: Path) -> None:
    """vLLM's parser with our flag, which also reads the R2CCL_ variables."""
    engines = [container(template, "engine") for template in pod_templates()]
    lines = [command_line(engine) for engine in engines]
    assert all(line[:2] == ["vllm", "serve"] for line in lines)
    environment = {one["name"]: one["value"] for one in engines[0]["env"] if "value" in one}
    environment = {name: value for name, value in environment.items() if name.startswith("R2CCL_")}
    environment["R2CCL_JOURNAL_DIR"] = str(tmp_path)
    ran = subprocess.run(
        [sys.executable, "-c", PARSE, json.dumps([line[1:] for line in lines])],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    leader, worker = map(json.loads, ran.stdout.splitlines()[-2:])
    differing = {name for name in leader if leader[name] != worker[name]}
    assert differing == {"node_rank", "headless"}
    assert (leader["node_rank"], worker["node_rank"]) == (0, 1)
    assert (leader["headless"], worker["headless"]) == (False, True)
    assert (leader["nnodes"], leader["distributed_backend"]) == (2, "r2ccl")
    assert leader["shutdown_timeout"] == shutdown_timeout(engines[0])
    gpus = container(pod_templates(with_gpus=True)[0], "engine")["resources"]["limits"]
    assert leader["tensor_parallel_size"] == 2 * int(gpus["nvidia.com/gpu"])
