"""Every overlay renders, is valid by its schemas, and refers to what there is."""

from __future__ import annotations

import copy
import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.deploy.__main__ import main
from tests.deploy.manifests import DEPLOY, OVERLAYS, ROOT, SECRETS, Manifest, of_kind, pods, render, rendered
from tests.deploy.validation import SCHEMAS, problems

GUIDE = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
SPOILED = {  # a path in a kind, and what must not be there
    "Deployment": ("spec.template.spec.containers.0.readynessProbe", {}),
    "StatefulSet": ("spec.replicas", "one"),
    "Service": ("spec.ports.0.prot", 1),
    "NetworkPolicy": ("spec.ingres", []),
    "PodDisruptionBudget": ("spec.maxAvailable", 1),
    "LeaderWorkerSet": ("spec.leaderWorkerTemplate.workerTemplate.spec.containers.0.imagePolicy", "Always"),
    "RayCluster": ("spec.workerGroupSpecs.0.replica", 1),
    "ScaledObject": ("spec.triggers.0.metadata.querry", "1"),
    "ServiceMonitor": ("spec.endpoints.0.interval", "often"),
    "PrometheusRule": ("spec.groups.0.rules.0.for", "long"),
    "Certificate": ("spec.dnsName", []),
    "Issuer": ("spec.acmee", {}),
}


@pytest.fixture(scope="module", params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> list[Manifest]:
    return rendered(request.param)


def test_the_guide_describes_every_overlay() -> None:
    assert set(OVERLAYS) == {"cpu-demo", "gpu", "kuberay", "learning", "observability"}
    assert [name for name in OVERLAYS if f"`{name}`" not in GUIDE] == []


def test_make_manifests_writes_every_overlay_and_finds_nothing_wrong(tmp_path: Path) -> None:
    assert main(tmp_path) == 0
    assert {file.stem for file in tmp_path.iterdir()} == set(OVERLAYS)


def test_every_kind_has_a_schema_that_refuses_a_wrong_value() -> None:
    ours = [manifest for name in OVERLAYS for manifest in rendered(name)]
    assert {file.stem for file in SCHEMAS.iterdir()} <= SPOILED.keys()
    for kind, (path, value) in SPOILED.items():
        manifest = copy.deepcopy(next(it for it in ours if it["kind"] == kind))
        *way, last = path.split(".")
        at = manifest
        for step in way:
            at = at[int(step)] if step.isdigit() else at[step]  # type: ignore[index]
        at[last] = value
        assert problems([manifest]), kind
    assert problems([{"apiVersion": "v1", "kind": "Unheard", "metadata": {"name": "x"}}])


def test_names_are_unique_and_everything_is_in_one_namespace(overlay: list[Manifest]) -> None:
    twice = Counter((it["kind"], it["metadata"]["name"]) for it in overlay)
    assert max(twice.values()) == 1
    for it in overlay:
        assert it["metadata"].get("namespace") == (None if it["kind"] == "Namespace" else "outrider"), it
        assert it["metadata"]["labels"]["app.kubernetes.io/part-of"] == "outrider"
    assert of_kind(overlay, "Namespace").keys() == {"outrider"}


def test_secrets_and_volumes_of_pods_exist_or_are_asked_of_the_operator(overlay: list[Manifest]) -> None:
    made = {it["spec"]["secretName"] for it in of_kind(overlay, "Certificate").values()}
    secrets = of_kind(overlay, "Secret").keys() | made
    asked = {name for name, _ in SECRETS}
    for pod in pods(overlay):
        for volume in pod.spec.get("volumes", []):
            if "configMap" in volume:
                assert volume["configMap"]["name"] in of_kind(overlay, "ConfigMap")
            elif "secret" in volume:
                assert volume["secret"]["secretName"] in secrets
            elif "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in ("models", "learned")
            else:
                assert "emptyDir" in volume
        for container in pod.containers:
            mounted = {it["name"] for it in container.get("volumeMounts", [])}
            kept = {it["metadata"]["name"] for it in _claims(overlay, pod.owner)}
            assert mounted == {it["name"] for it in pod.spec.get("volumes", [])} | kept, pod.owner
            for entry in container.get("env", []):
                wanted = entry.get("valueFrom", {}).get("secretKeyRef")
                assert wanted is None or wanted["name"] in secrets | asked
    for name in asked:
        assert f"create secret generic {name} " in GUIDE


def test_the_demo_needs_nothing_but_its_image() -> None:
    demo = rendered("cpu-demo")
    assert {it["apiVersion"].partition("/")[0] for it in demo} <= {"v1", "apps", "networking.k8s.io", "policy"}
    assert not [volume for pod in pods(demo) for volume in pod.spec["volumes"] if "persistentVolumeClaim" in volume]
    secret = of_kind(demo, "Secret")["redis"]["data"]
    assert secret.keys() == {key for name, key in SECRETS if name == "redis"}


def test_a_component_that_nothing_uses_is_not_kept() -> None:
    used = {line for file in DEPLOY.glob("overlays/*/kustomization.yaml") for line in file.read_text().split()}
    for component in (DEPLOY / "components").iterdir():
        assert f"../../components/{component.name}" in used


def test_a_kustomization_that_does_not_render_is_an_error(tmp_path: Path) -> None:
    shutil.copytree(DEPLOY / "base", tmp_path / "base")
    (tmp_path / "base" / "network.yaml").unlink()
    with pytest.raises(AssertionError, match=r"network\.yaml"):
        render(tmp_path / "base")


def _claims(manifests: list[Manifest], owner: str) -> list[Manifest]:
    kind, _, name = owner.partition("/")
    claims: list[Manifest] = of_kind(manifests, kind)[name]["spec"].get("volumeClaimTemplates", [])
    return claims
