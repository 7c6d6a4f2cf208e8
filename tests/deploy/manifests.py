"""The overlays as kustomize renders them, and what is in them, as tests ask for it."""

from __future__ import annotations

import base64
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from outrider.store.redis.acl import ACL_ROLES

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
OVERLAYS = sorted(file.parent.name for file in DEPLOY.glob("overlays/*/kustomization.yaml"))
DEMOS = {"cpu-demo", "observability"}  # on one machine: passwords that everybody knows, no keys and no TLS
SECURED = sorted({*OVERLAYS} - DEMOS)
ROLES = ("router", "verifier", "drafter", "gateway")
COMPONENT = "app.kubernetes.io/component"
DEMO_IMAGE = "outrider-demo"  # has the models at /models

# What is known once a pod runs, or to the operator.
FIELDS = {"status.podIP": "10.0.0.1", "metadata.labels['topology.kubernetes.io/zone']": "here"}
SECRETS = {
    ("redis", "password"): "secret",
    **{("redis", f"{role}-password"): f"secret{role}" for role in ACL_ROLES},
    **{
        ("redis", f"{role}-url"): f"rediss://outrider-{role}:secret{role}@redis:6379/0?ssl_ca_certs=/tls/ca.crt"
        for role in ACL_ROLES
    },
    ("ray", "token"): "secret",
}

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Pod:
    """A template of pods, and who has them made."""

    owner: str  # "Deployment/router"
    labels: dict[str, str]
    spec: Manifest

    @property
    def component(self) -> str:
        return self.labels.get(COMPONENT, "")

    @property
    def containers(self) -> list[Manifest]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def ports(self) -> dict[str, int]:
        """The numbers of its ports, by name."""
        return {port["name"]: port["containerPort"] for it in self.containers for port in it.get("ports", [])}

    @property
    def server(self) -> Manifest | None:
        """Its container that runs one of our servers."""
        return next((it for it in self.containers if role(it)), None)


def kubectl() -> str:
    """The wheel's, or the machine's."""
    beside = Path(sys.executable).parent / "kubectl"
    found = str(beside) if beside.exists() else shutil.which("kubectl")
    assert found, "kubectl is missing; `make .venv/.installed` installs it"
    return found


def render(folder: Path) -> list[Manifest]:
    """Everything that a folder's kustomization makes."""
    made = subprocess.run([kubectl(), "kustomize", str(folder)], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return [*yaml.safe_load_all(made.stdout)]


@cache
def rendered(overlay: str) -> list[Manifest]:
    return render(DEPLOY / "overlays" / overlay)


def of_kind(manifests: list[Manifest], kind: str) -> dict[str, Manifest]:
    """All manifests of a kind, by name."""
    return {it["metadata"]["name"]: it for it in manifests if it["kind"] == kind}


def pods(manifests: list[Manifest]) -> list[Pod]:
    """All templates of pods, with the labels that controllers add."""
    return [
        Pod(f"{it['kind']}/{it['metadata']['name']}", {**template["metadata"]["labels"], **added}, template["spec"])
        for it in manifests
        for template, added in _templates(it)
    ]


def servers(overlay: str) -> list[tuple[Pod, Manifest]]:
    """Pods with one of our servers in them, and its container."""
    return [(pod, pod.server) for pod in pods(rendered(overlay)) if pod.server is not None]


def role(container: Manifest) -> str:
    """Of a container that runs one of our servers: which. Others: empty."""
    first = (container.get("args") or [""])[0]
    return first if first in ROLES and "outrider-" in container["image"] else ""


def environment(manifests: list[Manifest], container: Manifest) -> dict[str, str]:
    """What its processes will find there."""
    maps, secrets = of_kind(manifests, "ConfigMap"), of_kind(manifests, "Secret")
    found: dict[str, str] = {}
    for source in container.get("envFrom", []):
        found |= maps[source["configMapRef"]["name"]]["data"]
    for entry in container.get("env", []):
        given = entry.get("valueFrom", {})
        if "secretKeyRef" in given:
            name, key = given["secretKeyRef"]["name"], given["secretKeyRef"]["key"]
            there = name in secrets
            value = base64.b64decode(secrets[name]["data"][key]).decode() if there else SECRETS[name, key]
        elif "fieldRef" in given:
            value = FIELDS[given["fieldRef"]["fieldPath"]]
        elif "resourceFieldRef" in given:
            asked = given["resourceFieldRef"]
            assert (asked["resource"], asked["divisor"]) == ("limits.cpu", "1")
            value = str(math.ceil(cpus(container["resources"]["limits"]["cpu"])))
        else:
            value = expanded(entry["value"], found)
        found[entry["name"]] = value
    return found


def expanded(text: str, found: dict[str, str]) -> str:
    """A text in which $(NAME) is what the environment has, as Kubernetes does it."""
    return re.sub(r"\$\((\w+)\)", lambda match: found.get(match[1], match[0]), text)


def arguments(manifests: list[Manifest], container: Manifest) -> list[str]:
    found = environment(manifests, container)
    return [expanded(argument, found) for argument in container["args"]]


def cpus(quantity: str) -> float:
    return float(quantity[:-1]) / 1000 if quantity.endswith("m") else float(quantity)


def selects(selector: Manifest | None, labels: dict[str, str]) -> bool:
    """Return whether a label selector fits; an empty one fits all, and none fits nothing."""
    if selector is None:
        return False
    wanted = selector.get("matchLabels", {})
    return all(labels.get(key) == value for key, value in wanted.items()) and all(
        _meets(rule, labels) for rule in selector.get("matchExpressions", [])
    )


def _meets(rule: Manifest, labels: dict[str, str]) -> bool:
    assert rule["operator"] == "In", "only what our manifests use"
    return labels.get(rule["key"]) in rule["values"]


def _templates(manifest: Manifest) -> Iterator[tuple[Manifest, dict[str, str]]]:
    spec = manifest.get("spec", {})
    match manifest["kind"]:
        case "Deployment" | "StatefulSet":
            yield spec["template"], {}
        case "LeaderWorkerSet":
            index = "leaderworkerset.sigs.k8s.io/worker-index"
            yield spec["leaderWorkerTemplate"]["leaderTemplate"], {index: "0"}
            yield spec["leaderWorkerTemplate"]["workerTemplate"], {index: "1"}
        case "RayCluster":
            yield spec["headGroupSpec"]["template"], {"ray.io/node-type": "head"}
            for group in spec["workerGroupSpecs"]:
                yield group["template"], {"ray.io/node-type": "worker"}
