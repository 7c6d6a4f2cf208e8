"""Services, budgets, monitors and scalers point at what there is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import promql_parser as promql
import pytest
import yaml

from outrider.rpc.tls import NAMES
from outrider.telemetry import catalogue
from tests.deploy.__main__ import NAMESPACE
from tests.deploy.manifests import (
    COMPONENT,
    DEPLOY,
    OVERLAYS,
    ROLES,
    SECURED,
    Manifest,
    Pod,
    of_kind,
    pods,
    rendered,
    selects,
    servers,
)

METRICS = {metric.exposed for metric in catalogue.METRICS}
WATCHED = {"observability", "gpu", "kuberay"}


@pytest.fixture(scope="module", params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def selected(overlay: str, selector: Manifest) -> list[Pod]:
    return [pod for pod in pods(rendered(overlay)) if selects(selector, pod.labels)]


def test_workloads_select_exactly_their_own_pods(overlay: str) -> None:
    for kind in ("Deployment", "StatefulSet"):
        for name, it in of_kind(rendered(overlay), kind).items():
            assert [pod.owner for pod in selected(overlay, it["spec"]["selector"])] == [f"{kind}/{name}"]


def test_services_lead_to_ports_of_one_component(overlay: str) -> None:
    for name, it in of_kind(rendered(overlay), "Service").items():
        there = selected(overlay, {"matchLabels": it["spec"]["selector"]})
        assert {pod.component for pod in there} == {name}
        for port in it["spec"]["ports"]:
            for pod in there:
                assert pod.ports[port["targetPort"]] == port["port"], f"{name}: {port['name']}"
        # gRPC's clients balance by themselves, and are to see every pod; HTTP's are balanced.
        assert (it["spec"].get("clusterIP") == "None") is (name in {"router", "verifier", "drafter", "redis"})


def test_names_that_controllers_give_services_are_not_taken(overlay: str) -> None:
    services = of_kind(rendered(overlay), "Service").keys()
    assert not services & of_kind(rendered(overlay), "LeaderWorkerSet").keys()
    assert not services & {f"{name}-head-svc" for name in of_kind(rendered(overlay), "RayCluster")}


def test_every_disruption_budget_keeps_a_pod_and_blocks_no_node_for_ever(overlay: str) -> None:
    budgets = of_kind(rendered(overlay), "PodDisruptionBudget")
    assert budgets.keys() == {*ROLES}
    for name, it in budgets.items():
        there = selected(overlay, it["spec"]["selector"])
        assert {pod.component for pod in there} == {name}
        ray = [pod for pod in there if pod.owner.startswith("RayCluster/")]
        if ray:  # for pods that no controller scales, Kubernetes accepts only a number to keep
            assert 0 < it["spec"]["minAvailable"] < len(ray)
        else:
            assert it["spec"]["maxUnavailable"] in (1, "50%")


def test_deployments_start_a_new_pod_first_unless_it_needs_a_spare_gpu(overlay: str) -> None:
    for pod, container in servers(overlay):
        kind, _, name = pod.owner.partition("/")
        if kind == "Deployment":
            strategy = of_kind(rendered(overlay), kind)[name]["spec"]["strategy"]["rollingUpdate"]
            spare = "nvidia.com/gpu" not in container["resources"]["limits"]
            assert (strategy["maxSurge"], strategy["maxUnavailable"]) == ((1, 0) if spare else (0, 1))


def test_prometheus_finds_the_metrics_of_every_role(overlay: str) -> None:
    monitors = of_kind(rendered(overlay), "ServiceMonitor")
    assert monitors.keys() == ({*ROLES} if overlay in WATCHED else set())
    services = of_kind(rendered(overlay), "Service").values()
    for name, it in monitors.items():
        (service,) = (one for one in services if selects(it["spec"]["selector"], one["metadata"]["labels"]))
        assert service["metadata"]["name"] == name
        (endpoint,) = it["spec"]["endpoints"]
        assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
        assert service["metadata"]["labels"][it["spec"]["jobLabel"]] == name


def test_deployed_alerts_and_dashboards_equal_the_sources(overlay: str) -> None:
    watched = overlay in WATCHED
    rules = of_kind(rendered(overlay), "PrometheusRule").values()
    ours = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text(encoding="utf-8"))
    assert [_unbound(it["spec"]) for it in rules] == [ours] * watched
    for query in [rule["expr"] for it in rules for group in it["spec"]["groups"] for rule in group["rules"]]:
        for selector in _selectors(promql.parse(query)):
            assert ("namespace", "outrider") in {(it.name, it.value) for it in selector.matchers.matchers}, query
    found = [it for it in of_kind(rendered(overlay), "ConfigMap").values() if it["metadata"]["name"] == "dashboards"]
    assert len(found) == watched
    for it in found:
        assert it["metadata"]["labels"]["grafana_dashboard"] == "1"  # Grafana's sidecar finds it by this label
        shipped = {file.name: file.read_text(encoding="utf-8") for file in DEPLOY.glob("grafana/dashboards/*.json")}
        assert it["data"] == shipped


@pytest.mark.parametrize("overlay", ["gpu", "kuberay"])
def test_verifiers_scale_by_slots_and_drafters_by_verifiers(overlay: str) -> None:
    manifests = rendered(overlay)
    scalers = of_kind(manifests, "ScaledObject")
    assert scalers.keys() == ({"verifier", "drafter"} if overlay == "gpu" else {"drafter"})
    for it in scalers.values():
        target = it["spec"]["scaleTargetRef"]
        scaled = of_kind(manifests, target["kind"])[target["name"]]
        assert target.get("apiVersion", "apps/v1") == scaled["apiVersion"]
        assert "replicas" not in scaled["spec"]  # or applying the manifests would undo what KEDA did
        assert it["spec"]["minReplicaCount"] < it["spec"]["maxReplicaCount"]
    (trigger,) = scalers["drafter"]["spec"]["triggers"]
    labels = dict(pair.split("=") for pair in trigger["metadata"]["podSelector"].split(","))
    assert len(selected(overlay, {"matchLabels": labels})) == 1  # of the pods of one verifier
    if overlay == "gpu":
        (trigger,) = scalers["verifier"]["spec"]["triggers"]
        asked = set(re.findall(r"outrider_\w+", trigger["metadata"]["query"]))
        assert asked == {"outrider_sessions", "outrider_slots", "outrider_queue_depth"} <= METRICS
        window = scalers["verifier"]["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
        assert window["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": 120}]


@pytest.mark.parametrize("overlay", SECURED)
def test_certificates_have_the_names_of_their_roles_where_servers_look_for_them(overlay: str) -> None:
    manifests = rendered(overlay)
    certificates = of_kind(manifests, "Certificate")
    for role in ROLES:
        spec = certificates[role]["spec"]
        assert set(NAMES[role]) <= set(spec["dnsNames"])
        assert {"server auth"} | ({"client auth"} if role != "gateway" else set()) <= set(spec["usages"])
        assert spec["secretName"] == f"{role}-tls"
        assert (role not in ("router", "gateway")) == (set(spec["dnsNames"]) == set(NAMES[role]))
    issuers = of_kind(manifests, "Issuer")
    assert {it["spec"]["issuerRef"]["name"] for it in certificates.values()} <= issuers.keys()
    assert issuers["authority"]["spec"]["ca"]["secretName"] == certificates["authority"]["spec"]["secretName"]
    for pod, container in servers(overlay):
        (mount,) = (it for it in container["volumeMounts"] if it["name"] == "tls")
        (volume,) = (it for it in pod.spec["volumes"] if it["name"] == "tls")
        assert volume["secret"]["secretName"] == f"{pod.component}-tls"
        files = {it["value"] for it in container["env"] if it["name"].startswith("OUTRIDER_")}
        files |= {it.partition("=")[2] for it in container["args"] if it.startswith(("--cert=", "--key="))}
        assert files == {f"{mount['mountPath']}/{name}" for name in ("ca.crt", "tls.crt", "tls.key")}


def test_redis_persists_its_writes(overlay: str) -> None:
    manifests = rendered(overlay)
    settings = dict(
        line.split(" ", 1) for line in of_kind(manifests, "ConfigMap")["redis"]["data"]["redis.conf"].splitlines()
    )
    assert settings["maxmemory-policy"] == "noeviction"
    assert settings["appendonly"] == "yes"
    (pod,) = selected(overlay, {"matchLabels": {COMPONENT: "redis"}})
    mounts = {it["name"]: it["mountPath"] for it in pod.containers[0]["volumeMounts"]}
    assert settings["dir"] == mounts["data"]
    limit = pod.containers[0]["resources"]["limits"]["memory"]
    most_mib = 1024 * int(settings["maxmemory"].removesuffix("gb"))
    assert 2 * most_mib + 256 <= int(limit.removesuffix("Mi"))  # a fork may copy every page


def _unbound(value: Any) -> Any:
    """Rules as they are for any namespace."""
    if isinstance(value, dict):
        return {key: _unbound(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_unbound(inner) for inner in value]
    return value.replace(f"{{{NAMESPACE}}}", "").replace(f"{NAMESPACE},", "") if isinstance(value, str) else value


def _selectors(at: Any) -> Iterator[promql.VectorSelector]:
    """All series that a query selects."""
    if isinstance(at, promql.VectorSelector):
        yield at
    for name in ("expr", "lhs", "rhs", "vector_selector"):
        if (inner := getattr(at, name, None)) is not None:
            yield from _selectors(inner)
    for inner in getattr(at, "args", ()):
        yield from _selectors(inner)
