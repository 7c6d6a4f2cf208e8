"""Servers' command lines, environments and addresses are what the code takes, and agree with each other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer

from outrider.config import GatewayConfig, RouterConfig, WorkerConfig
from outrider.fleet import ray_session
from outrider.store.redis.client import connect
from tests.deploy.commands import Command, parsed, read_from_environment
from tests.deploy.manifests import (
    DEMO_IMAGE,
    OVERLAYS,
    ROLES,
    Manifest,
    Pod,
    arguments,
    cpus,
    environment,
    of_kind,
    pods,
    rendered,
    role,
    servers,
)

MISUSE = typer.BadParameter.__mro__[1]  # what a command line that is none is refused with

PORTS = {"router": 7070, "verifier": 7071, "drafter": 7072, "gateway": 8000}
HEALTH, METRICS = 7079, 9464
# Read by telemetry and by Ray; what is in a command line as $(NAME) or "$NAME" is used, too.
OTHERS = {
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_METRICS_EXPORTER",
    "RAY_AUTH_MODE",
    "RAY_AUTH_TOKEN",
}

SERVERS = [(overlay, pod, container) for overlay in OVERLAYS for pod, container in servers(overlay)]
each_server = pytest.mark.parametrize(
    ("overlay", "pod", "container"), SERVERS, ids=[f"{overlay}-{pod.owner}" for overlay, pod, _ in SERVERS]
)


def command(overlay: str, container: Manifest, monkeypatch: pytest.MonkeyPatch) -> Command:
    manifests = rendered(overlay)
    return parsed(arguments(manifests, container), environment(manifests, container), monkeypatch)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_role_is_deployed_once(overlay: str) -> None:
    assert sorted(role(container) for _, container in servers(overlay)) == sorted(ROLES)


@each_server
def test_every_command_line_is_accepted_by_its_server(
    overlay: str, pod: Pod, container: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = command(overlay, container, monkeypatch)
    assert it.role == pod.component
    assert not re.findall(r"\$\(\w+\)", " ".join(arguments(rendered(overlay), container)))
    if it.redis is not None:
        connect(it.redis)  # raises ConfigError for what is no address
    assert not any("redis://" in argument for argument in container["args"])  # it may hold a password


@each_server
def test_an_environment_has_only_variables_that_are_read(
    overlay: str, pod: Pod, container: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = " ".join([*container.get("command", []), *container["args"]])
    used = {name for pair in re.findall(r"\$\((\w+)\)|\"\$(\w+)", written) for name in pair}
    settings = of_kind(rendered(overlay), "ConfigMap")["outrider"]["data"].keys()
    for name in environment(rendered(overlay), container).keys() - settings:
        assert name in read_from_environment(role(container)) | OTHERS | used, name


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_common_settings_are_read_by_every_server(overlay: str) -> None:
    settings = of_kind(rendered(overlay), "ConfigMap")["outrider"]["data"]
    for name in settings:
        assert all(name in read_from_environment(role) | OTHERS for role in ROLES), name


@each_server
def test_servers_listen_on_the_ports_of_their_role(
    overlay: str, pod: Pod, container: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = command(overlay, container, monkeypatch)
    section: Any = it.section
    assert pod.ports["http" if it.role == "gateway" else "grpc"] == PORTS[it.role]
    ranked = isinstance(section, WorkerConfig) and section.tensor_parallel > 1
    # Of several ranks the first listens on its own node's address, which stands for the loopback's.
    assert section.listen == f"{'127.0.0.1' if ranked else '0.0.0.0'}:{PORTS[it.role]}"
    if isinstance(section, WorkerConfig):
        assert section.advertise == (None if ranked else f"10.0.0.1:{PORTS[it.role]}")
    if it.role != "gateway":
        assert section.health == f"0.0.0.0:{HEALTH}"
        assert pod.ports["health"] == HEALTH
    assert section.metrics == f"0.0.0.0:{METRICS}"
    assert pod.ports["metrics"] == METRICS


@each_server
def test_models_are_mounted_where_they_are_read_and_the_router_knows_the_verifiers(
    overlay: str, pod: Pod, container: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = command(overlay, container, monkeypatch)
    folders: list[Path] = []
    if isinstance(it.section, RouterConfig):
        folders = [*it.section.models.values()]
        known = [command(overlay, other, monkeypatch) for _, other in servers(overlay) if role(other) == "verifier"]
        assert [other.section.model_name for other in known] == [*it.section.models]  # type: ignore[attr-defined]
    elif isinstance(it.section, WorkerConfig):
        folders = [it.section.model]
    mounted = {Path(mount["mountPath"]) for mount in container["volumeMounts"]}
    for folder in folders:
        assert (folder.parent in mounted) is (DEMO_IMAGE not in container["image"]), folder
        assert folder.parent == Path("/models")


@each_server
def test_a_cpu_worker_has_a_thread_for_each_of_its_cpus(
    overlay: str, pod: Pod, container: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = command(overlay, container, monkeypatch).section
    limits = container["resources"]["limits"]
    if isinstance(section, WorkerConfig) and section.device == "cpu":
        assert section.threads == cpus(limits["cpu"])
    if isinstance(section, WorkerConfig):
        assert (section.device == "cuda") is ("nvidia.com/gpu" in limits)


def test_the_gateway_and_certificates_name_services(monkeypatch: pytest.MonkeyPatch) -> None:
    for overlay, _, container in SERVERS:
        section = command(overlay, container, monkeypatch).section
        if isinstance(section, GatewayConfig):
            name, _, port = section.router.partition(":")
            ports = {it["port"] for it in of_kind(rendered(overlay), "Service")[name]["spec"]["ports"]}
            assert int(port) in ports
            secured = "OUTRIDER_CA" in environment(rendered(overlay), container)
            certificates = of_kind(rendered(overlay), "Certificate")
            assert secured is bool(certificates)
            assert not secured or name in certificates["router"]["spec"]["dnsNames"]


@pytest.mark.parametrize("overlay", ["gpu", "kuberay"])
def test_ranks_fit_the_nodes_that_join(overlay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    group = [pod for pod in pods(rendered(overlay)) if pod.component == "verifier"]
    leader, *others = group
    assert leader.server is not None
    section = command(overlay, leader.server, monkeypatch).section
    assert isinstance(section, WorkerConfig)
    nodes = [leader, *others * (_group_size(overlay) - 1)]
    wanted = ray_session.needs(section, section.threads)
    room = 0
    for node in nodes:
        limits = node.containers[0]["resources"]["limits"]
        has = {"CPU": cpus(limits["cpu"]), "GPU": float(limits["nvidia.com/gpu"])}
        room += int(min(has[name] / amount for name, amount in wanted.items()))
    assert room == section.tensor_parallel
    assert section.ray == f"10.0.0.1:{leader.ports['gcs']}"  # its own, whatever RAY_ADDRESS a controller sets
    assert section.join_s > 600  # an image of gigabytes is pulled


@pytest.mark.parametrize("overlay", ["gpu", "kuberay"])
def test_nodes_join_the_leaders_ray_with_its_token(overlay: str) -> None:
    leader, worker = (pod.containers[0] for pod in pods(rendered(overlay)) if pod.component == "verifier")
    starts = [next(part for part in it["command"] if "ray start" in part) for it in (leader, worker)]
    assert "--head --port=6379" in starts[0]
    assert starts[0].rstrip().endswith('exec outrider "$@"')
    host = {"gpu": "$LWS_LEADER_ADDRESS", "kuberay": "$FQ_RAY_IP"}[overlay]  # as the controllers set it
    assert f'--address="{host}:6379" --block' in starts[1]
    ports = [{port["name"]: port["containerPort"] for port in it["ports"]} for it in (leader, worker)]
    assert ports[0]["gcs"] == 6379
    for start, own, it in zip(starts, ports, (leader, worker), strict=True):
        assert f"--node-manager-port={own['raylet']}" in start
        found = environment(rendered(overlay), it)
        assert (found["RAY_AUTH_MODE"], found["RAY_AUTH_TOKEN"]) == ("token", "secret")
        assert {"--", "sh", "tini"} < {*it["command"]}
    if overlay == "kuberay":
        cluster = of_kind(rendered(overlay), "RayCluster")["verifier"]
        assert cluster["metadata"]["annotations"] == {"ray.io/overwrite-container-cmd": "true"}


def _group_size(overlay: str) -> int:
    manifests = rendered(overlay)
    if overlay == "gpu":
        return int(of_kind(manifests, "LeaderWorkerSet")["verifiers"]["spec"]["leaderWorkerTemplate"]["size"])
    return 1 + sum(it["replicas"] for it in of_kind(manifests, "RayCluster")["verifier"]["spec"]["workerGroupSpecs"])


@pytest.mark.parametrize(
    "given",
    [
        ["drafter", "--model=/m", "--no-such-flag"],
        ["drafter", "--model=/m", "--device=abacus"],
        ["router", "--model=target"],
        ["gateway", "--listen=8000"],
    ],
)
def test_an_unknown_flag_or_value_is_noticed(given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((SystemExit, MISUSE)):
        parsed(given, {"REDIS_URL": "redis://x"}, monkeypatch)
