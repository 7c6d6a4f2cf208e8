"""Images: each role's holds what the role needs, runs as an unprivileged user, and is what the manifests name."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch

import pytest

from tests.deploy.images import DOCKERFILE, lineage, stages
from tests.deploy.manifests import DEMO_IMAGE, OVERLAYS, ROLES, ROOT, rendered, role, servers

IGNORED = DOCKERFILE.with_suffix(".dockerignore")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SOURCES = ROOT / "outrider" / "engine" / "cpu" / "src"
TARGETS = {*ROLES, "trainer", "demo"}


def copied(stage: str) -> list[str]:
    """What a stage copies from the repository."""
    lines = [line.split()[1:] for line in stages()[stage] if line.startswith("COPY ") and "--from=" not in line]
    return [source for words in lines for source in words[:-1]]


def test_every_build_target_is_a_role_and_manifests_name_no_other() -> None:
    assert [*stages()][-len(TARGETS) :] == ["router", "gateway", "verifier", "drafter", "trainer", "demo"]
    for overlay in OVERLAYS:
        for pod, container in servers(overlay):
            name = container["image"].partition(":")[0]
            assert name in (f"outrider-{role(container)}", DEMO_IMAGE), pod.owner
    assert rendered("cpu-demo")


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_servers_run_as_the_user_that_the_pods_name(target: str) -> None:
    instructions = lineage(target)
    users = {pod.spec["securityContext"]["runAsUser"] for overlay in OVERLAYS for pod, _ in servers(overlay)}
    assert [line for line in instructions if line.startswith("USER ")] == [f"USER {user}:{user}" for user in users]
    assert 'ENTRYPOINT ["tini", "--", "outrider"]' in instructions
    assert not any(line.startswith("ADD ") for line in instructions)


def test_bases_and_copied_stages_of_images_exist() -> None:
    for name, instructions in stages().items():
        base = instructions[0].split()[1]
        assert base in stages() or base.startswith("python:"), name
        for source in re.findall(r"--from=(\S+)", " ".join(instructions)):
            assert source in stages()


def test_the_build_context_has_exactly_the_copied_files() -> None:
    lines = IGNORED.read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    sent = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    assert sent == {source.strip("/") for stage in stages() for source in copied(stage)}
    assert all((ROOT / name).exists() for name in sent)
    assert not [name for name in (".git", ".venv", "tests") if any(fnmatch(name, rule) for rule in sent)]


def test_the_wheel_that_images_install_has_everything_of_our_packages() -> None:
    how = PROJECT["tool"]["setuptools"]
    (compiled,) = how["ext-modules"]
    packages = {name.removesuffix("*") for name in how["packages"]["find"]["include"]}
    assert packages < {*copied("wheel")}
    for package in packages:
        kept = [f"{package}/{pattern}" for pattern in how["package-data"].get(package, [])]
        for file in (ROOT / package).rglob("*.*"):
            name = str(file.relative_to(ROOT))
            if file.suffix == ".py":
                assert (file.parent / "__init__.py").exists(), name  # a folder without is no package, and left out
            elif file.is_relative_to(SOURCES):
                assert name in (*compiled["sources"], *compiled["depends"])
            elif file.is_file() and file.suffix not in (".pyc", ".pyi", ".so"):  # stubs are always taken along
                assert any(fnmatch(name, pattern) for pattern in kept), name


@pytest.mark.parametrize(("target", "module"), [("router", "router.server"), ("gateway", "outrider.gateway.server")])
def test_routers_and_gateways_run_without_torch(target: str, module: str) -> None:
    extra = re.findall(r"\[(\w+)\]\"", " ".join(stages()[f"{target}-packages"]))
    assert extra == [target]
    assert not [need for need in PROJECT["project"]["optional-dependencies"][target] if need.startswith("torch")]
    hidden = f"import sys; sys.modules.update(torch=None, safetensors=None); import {module}, outrider.cli.main"
    ran = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("module", ["verifier_svc.server", "drafter_svc.server"])
def test_workers_run_without_torch_unless_configured(module: str) -> None:
    assert "ARG EXTRAS=serve" in stages()["worker-packages"]
    assert not [need for need in PROJECT["project"]["optional-dependencies"]["serve"] if need.startswith("torch")]
    loading = "load_engine(Path('models/drafter'), dtype='bfloat16', slots=1, threads=1)"
    hidden = "import sys; sys.modules.update(torch=None); from pathlib import Path; "
    hidden += f"import {module}; from outrider.engine.loading import load_engine; {loading}"
    ran = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr


def test_extras_that_stages_install_exist() -> None:
    text = " ".join(line for stage in stages().values() for line in stage)
    named = re.findall(r"\.whl\)\[([\w,]+)\]", text) + re.findall(r"ARG EXTRAS=([\w,]+)", text)
    assert {extra for names in named for extra in names.split(",")} == {"router", "gateway", "serve", "train"}
    assert {"router", "gateway", "serve", "train", "ray"} <= PROJECT["project"]["optional-dependencies"].keys()
