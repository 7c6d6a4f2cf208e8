"""Pods are restricted, are given the time that they need to start and to end, and spread."""

from __future__ import annotations

import pytest

from outrider.config import WorkerConfig
from outrider.fleet.process import GRACE_S
from outrider.v1 import drafter_pb2, inference_pb2, verifier_pb2
from tests.deploy.commands import Command, parsed
from tests.deploy.manifests import OVERLAYS, Manifest, Pod, arguments, environment, pods, rendered, role

START_S = {"router": 60, "gateway": 60, "drafter": 300, "verifier": 300}  # the least, for small models from a disk
MARGIN_S = 10  # time for what follows a drain: messages to other servers, files that are written
SERVICES = {  # the services whose health a role reports
    "router": inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name,
    "verifier": verifier_pb2.DESCRIPTOR.services_by_name["Verifier"].full_name,
    "drafter": drafter_pb2.DESCRIPTOR.services_by_name["Drafter"].full_name,
}

PODS = [(overlay, pod) for overlay in OVERLAYS for pod in pods(rendered(overlay))]


def each(chosen: list[tuple[str, Pod]]) -> pytest.MarkDecorator:
    """A test for each of some pods."""
    names = [f"{overlay}-{pod.owner}-{number}" for number, (overlay, pod) in enumerate(chosen)]
    return pytest.mark.parametrize(("overlay", "pod"), chosen, ids=names)


each_pod = each(PODS)
each_probed_pod = each([(overlay, pod) for overlay, pod in PODS if pod.component != "trainer"])  # trainers serve nobody
each_server = each([(overlay, pod) for overlay, pod in PODS if pod.server is not None])
each_deployed_server = each([(overlay, pod) for overlay, pod in PODS if pod.server and "Deployment/" in pod.owner])


@each_pod
def test_pods_keep_to_the_restricted_standard_on_a_root_that_is_read_only(overlay: str, pod: Pod) -> None:
    own = pod.spec["securityContext"]
    assert own["runAsNonRoot"] is True
    assert own["runAsUser"] >= 10001
    assert own["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod.spec["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.spec.keys()
    for container in pod.containers:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert not any("hostPort" in port for port in container.get("ports", []))
        if role(container):
            assert {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")} >= {"/tmp"}


@each_pod
def test_memory_is_set_aside_and_images_are_of_one_version(overlay: str, pod: Pod) -> None:
    for container in pod.containers:
        asked, most = container["resources"]["requests"], container["resources"]["limits"]
        assert asked["memory"] == most["memory"]
        assert asked.get("nvidia.com/gpu") == most.get("nvidia.com/gpu")
        name, _, tag = container["image"].partition(":")
        assert tag not in ("", "latest"), name


@each_probed_pod
def test_probes_ask_for_ports_and_services_that_exist(overlay: str, pod: Pod) -> None:
    (container,) = pod.containers
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        if kind == "startupProbe" and pod.component == "collector":
            continue  # it is there at once
        probe = container[kind]
        if "grpc" in probe:
            assert probe["grpc"]["port"] == pod.ports["health"]
            service = probe["grpc"].get("service", "")
            assert service in ("", SERVICES[pod.component])
            # A service may be away while its process is well: only that is started again for being silent.
            assert kind != "livenessProbe" or not service
        elif "exec" not in probe:
            assert probe[next(iter(probe.keys() & {"httpGet", "tcpSocket"}))]["port"] in pod.ports
    liveness = container["livenessProbe"]
    assert liveness.get("failureThreshold", 3) * liveness.get("periodSeconds", 10) >= 30
    if pod.component in ("router", "drafter") or pod.owner == "Deployment/verifier":
        assert container["readinessProbe"]["grpc"]["service"] == SERVICES[pod.component]


@each_server
def test_servers_have_the_time_to_start_that_their_models_take(overlay: str, pod: Pod) -> None:
    assert pod.server is not None
    probe = pod.server["startupProbe"]
    budget = probe["failureThreshold"] * probe["periodSeconds"]
    assert budget >= START_S[pod.component]
    section = _command(overlay, pod.server).section
    if isinstance(section, WorkerConfig) and section.tensor_parallel > 1 and probe["grpc"].get("service"):
        assert budget >= section.join_s + START_S[pod.component]


@each_server
def test_pods_wait_for_the_drain_of_their_server(overlay: str, pod: Pod) -> None:
    assert pod.server is not None
    section = _command(overlay, pod.server).section
    drain = section.drain_s
    ranks = GRACE_S if getattr(section, "tensor_parallel", 1) > 1 else 0.0
    before = pod.server.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    assert pod.spec["terminationGracePeriodSeconds"] >= before + drain + ranks + MARGIN_S
    # Who is found by a name goes on serving until it has left the name; workers take themselves off the registry.
    assert bool(before) is (pod.component in ("router", "gateway"))


@each_deployed_server
def test_deployments_of_servers_spread_over_zones_and_nodes(overlay: str, pod: Pod) -> None:
    spread = pod.spec["topologySpreadConstraints"]
    assert {it["topologyKey"] for it in spread} == {"topology.kubernetes.io/zone", "kubernetes.io/hostname"}
    for it in spread:
        assert it["labelSelector"]["matchLabels"].items() <= pod.labels.items()


def _command(overlay: str, container: Manifest) -> Command:
    with pytest.MonkeyPatch.context() as patch:
        manifests = rendered(overlay)
        return parsed(arguments(manifests, container), environment(manifests, container), patch)
