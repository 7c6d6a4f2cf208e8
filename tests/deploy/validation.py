"""Manifests against schemas: Kubernetes' own, which a package brings along, and ours of what operators add to it.

Ours know the fields that we use and those beside them, as the operators document them; an unknown one is an error.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import jsonschema
import kubernetes_validate

from tests.deploy.manifests import Manifest, pods

VERSIONS = ("1.31", "1.37")  # the oldest that the manifests are for, and the newest that the package knows
SCHEMAS = Path(__file__).parent / "schemas"


def problems(manifests: list[Manifest]) -> list[str]:
    """What is wrong with them, a line each: where, and what."""
    found = []
    for manifest in manifests:
        where = f"{manifest['kind']}/{manifest['metadata']['name']}"
        schema = SCHEMAS / f"{manifest['kind']}.json"
        found += _foreign(manifest, schema, where) if schema.exists() else _core(manifest, where)
    return found


def _core(manifest: Manifest, where: str) -> list[str]:
    whole = json.dumps(manifest, sort_keys=True)
    return [f"{where} ({version}): {error}" for version in VERSIONS if (error := _refused(whole, version))]


@cache  # overlays have most of their objects in common
def _refused(manifest: str, version: str) -> str:
    try:
        kubernetes_validate.validate(json.loads(manifest), version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return f"{'.'.join(map(str, error.path))}: {error.message}"
    except kubernetes_validate.SchemaNotFoundError as error:
        return f"there is no schema of {error.api_version} {error.kind}"
    return ""


def _foreign(manifest: Manifest, schema: Path, where: str) -> list[str]:
    found = [f"{where}: {error.json_path}: {error.message}" for error in _validator(schema).iter_errors(manifest)]
    for pod in [] if found else pods([manifest]):  # what is inside is Kubernetes' own
        as_pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"labels": pod.labels}, "spec": pod.spec}
        found += _core(as_pod, f"{where}: pods")
    return found


@cache
def _validator(schema: Path) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json.loads(schema.read_text(encoding="utf-8")))
