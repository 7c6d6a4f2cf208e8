"""What protects a cluster on Kubernetes, in each overlay: keys, TLS, passwords, bounds, and images by their digests."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from outrider.config import GatewayConfig, RouterConfig
from outrider.grammar.compiler import KEPT_BYTES, MAX_BYTES
from router.requests.template_sandbox import MOST_BYTES
from tests.deploy.commands import parsed
from tests.deploy.manifests import (
    COMPONENT,
    DEMO_IMAGE,
    DEMOS,
    DEPLOY,
    OVERLAYS,
    SECURED,
    Manifest,
    arguments,
    environment,
    of_kind,
    pods,
    render,
    rendered,
    servers,
)

ROUTER_BYTES = 1 << 30  # of a router without its processes: docs/security.md has what callers can take
UNITS = {"Mi": 1 << 20, "Gi": 1 << 30}
GUIDE = (DEPLOY.parent / "docs" / "kubernetes.md").read_text(encoding="utf-8")


def bytes_of(quantity: str) -> int:
    return int(quantity[:-2]) * UNITS[quantity[-2:]]


def section(overlay: str, role: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    (container,) = (container for pod, container in servers(overlay) if pod.component == role)
    manifests = rendered(overlay)
    return parsed(arguments(manifests, container), environment(manifests, container), monkeypatch).section


@pytest.mark.parametrize("overlay", SECURED)
def test_callers_need_keys_but_at_a_demo(overlay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    router = section(overlay, "router", monkeypatch)
    assert isinstance(router, RouterConfig)
    assert router.auth == "keys"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_tenants_that_may_give_samples_and_load_adapters_are_named(
    overlay: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = section(overlay, "router", monkeypatch)
    assert "*" not in (*router.teaches, *router.adapter_loaders, *router.adapter_publishers)
    trained = any(pod.component == "trainer" for pod in pods(rendered(overlay)))
    assert trained is bool(router.teaches)


@pytest.mark.parametrize("overlay", SECURED)
def test_every_server_outside_the_demo_speaks_tls(overlay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for role in ("router", "verifier", "drafter", "gateway"):
        found = section(overlay, role, monkeypatch)
        assert found.cert == Path("/tls/tls.crt"), role
        assert found.key == Path("/tls/tls.key"), role
        if not isinstance(found, GatewayConfig):  # it takes the CA from the environment as the SDK's client
            assert found.ca == Path("/tls/ca.crt"), role
    (gateway,) = (container for pod, container in servers(overlay) if pod.component == "gateway")
    assert gateway["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    assert environment(rendered(overlay), gateway)["OUTRIDER_CA"] == "/tls/ca.crt"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_ingress_speaks_tls_on_both_sides_and_knows_the_gateway(overlay: str) -> None:
    manifests = rendered(overlay)
    found = of_kind(manifests, "Ingress")
    assert bool(found) is (overlay in ("gpu", "kuberay"))
    for it in found.values():
        spec, notes = it["spec"], it["metadata"]["annotations"]
        hosts = {host for each in spec["tls"] for host in each["hosts"]}
        assert {rule["host"] for rule in spec["rules"]} == hosts
        gateway = of_kind(manifests, "Certificate")["gateway"]["spec"]
        # The public host's certificate is not the gateway's, which only the cluster's own CA has signed.
        assert gateway["secretName"] not in {each["secretName"] for each in spec["tls"]}
        its = {name.removeprefix("nginx.ingress.kubernetes.io/"): value for name, value in notes.items()}
        assert its["backend-protocol"] == "HTTPS"
        assert its["proxy-ssl-verify"] == its["proxy-ssl-server-name"] == "on"
        assert its["proxy-ssl-secret"] == f"{it['metadata']['namespace']}/{gateway['secretName']}"
        assert its["proxy-ssl-name"] in gateway["dnsNames"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_redis_has_passwords_of_the_operator_s_a_user_for_each_role_and_tls_but_at_a_demo(overlay: str) -> None:
    """Who reaches it at all is in test_network."""
    manifests = rendered(overlay)
    assert ("redis" in of_kind(manifests, "Secret")) is (overlay in DEMOS)
    scheme = "redis" if overlay in DEMOS else "rediss"
    for pod in pods(manifests):
        for container in pod.containers:
            given = environment(manifests, container)
            if "REDIS_URL" in given:
                assert given["REDIS_URL"].startswith(f"{scheme}://outrider-{pod.component}:")
                assert ("/tls" in {it["mountPath"] for it in container["volumeMounts"]}) is (overlay in SECURED)
            if pod.labels[COMPONENT] == "redis":
                assert all(given[name] for name in given if name.endswith(("PASSWORD", "AUTH")))
                assert bool(given.get("TLS")) is (overlay in SECURED)
                probes = [container[f"{kind}Probe"]["exec"]["command"][-1] for kind in ("startup", "readiness")]
                assert {"--tls" in probe for probe in probes} == {overlay in SECURED}
    policies = of_kind(manifests, "NetworkPolicy")
    assert policies["default-deny"]["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_disk_that_a_pod_writes_is_bounded(overlay: str) -> None:
    for pod in pods(rendered(overlay)):
        bounds = [bytes_of(container["resources"]["limits"]["ephemeral-storage"]) for container in pod.containers]
        for volume in pod.spec.get("volumes", []):
            if "emptyDir" in volume:
                size = bytes_of(volume["emptyDir"]["sizeLimit"])
                assert volume["emptyDir"].get("medium") == "Memory" or size <= sum(bounds), pod.owner


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_router_has_memory_beyond_its_template_and_grammar_processes(
    overlay: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = section(overlay, "router", monkeypatch)
    (container,) = (container for pod, container in servers(overlay) if pod.component == "router")
    limit = bytes_of(container["resources"]["limits"]["memory"])
    assert limit >= ROUTER_BYTES + (MOST_BYTES + MAX_BYTES + KEPT_BYTES) * len(router.models)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_image_can_be_pinned_by_digest(overlay: str, tmp_path: Path) -> None:
    """In an overlay of one's own, with the entries that the guide shows."""
    named = {*re.findall(r"- \{name: (\S+), .*digest: ", GUIDE), DEMO_IMAGE}
    images = {image(container) for pod in pods(rendered(overlay)) for container in pod.containers}
    assert images <= named
    digest = f"sha256:{'0123456789abcdef' * 4}"
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [os.path.relpath(DEPLOY / "overlays" / overlay, tmp_path)],
        "images": [{"name": name, "newName": f"registry.example/{name}", "digest": digest} for name in sorted(images)],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization), encoding="utf-8")
    for pod in pods(render(tmp_path)):
        for container in pod.containers:
            assert container["image"] in {f"registry.example/{name}@{digest}" for name in images}


def image(container: Manifest) -> str:
    """The name of a container's image, without its tag."""
    return str(container["image"]).partition(":")[0]
