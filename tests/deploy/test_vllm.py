"""The examples of vLLM with remote drafts: manifests that Kubernetes takes, and command lines that the servers take."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import outrider_vllm
from outrider.config import DrafterConfig
from outrider_vllm.settings import Settings
from tests.deploy.commands import parsed
from tests.deploy.validation import problems

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples/vllm"
MANIFESTS = [*yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text(encoding="utf-8"))]
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))


def of(kind: str) -> dict[str, Any]:
    [found] = [it for it in MANIFESTS if it["kind"] == kind]
    container: dict[str, Any] = found["spec"]["template"]["spec"]["containers"][0]
    return container


VLLM = {"compose": COMPOSE["services"]["vllm"]["command"], "kubernetes": of("Deployment")["args"]}
DRAFTER = {"compose": COMPOSE["services"]["drafter"]["command"], "kubernetes": of("StatefulSet")["args"]}


def test_kubernetes_takes_the_manifests() -> None:
    assert problems(MANIFESTS) == []


@pytest.mark.parametrize("where", DRAFTER)
def test_drafters_take_their_command_lines(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    line = [re.sub(r"\$\{DRAFTER:.*\}", "/models/drafter", it) for it in DRAFTER[where]]
    section = parsed(line, {}, monkeypatch).section
    assert isinstance(section, DrafterConfig)
    assert section.listen == "0.0.0.0:7072"


@pytest.mark.parametrize("where", VLLM)
def test_vllm_is_told_of_a_proposer_and_of_drafters(where: str) -> None:
    told = dict(it.removeprefix("--").split("=", 1) for it in VLLM[where])
    module, _, name = json.loads(told["speculative-config"])["model"].partition(".")
    assert module == outrider_vllm.__name__
    assert name in outrider_vllm.__all__
    found = Settings.read(json.loads(told["additional-config"]))
    assert found.drafters
    assert found.advertise is not None
    assert found.advertise.endswith(":7080")
    assert found.listen == "0.0.0.0:7080"
