"""The compose file: a cluster on one machine, whose servers take their command lines and find each other."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from outrider.config import GatewayConfig, RouterConfig, WorkerConfig
from outrider.store.redis.acl import ACL_ROLES
from tests.deploy.commands import KINDS, parsed, read_from_environment
from tests.deploy.images import stages
from tests.deploy.manifests import DEPLOY, ROLES

FILE = DEPLOY / "compose.yaml"
COMPOSE: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
SERVICES: dict[str, Any] = COMPOSE["services"]
OTEL = {"OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_METRICS_EXPORTER"}


def port(address: str) -> str:
    return address.rpartition(":")[2]


@pytest.mark.parametrize("role", ROLES)
def test_servers_take_their_command_lines_and_read_their_environment(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = SERVICES[role]
    named = {name: value for name, value in service["environment"].items() if name == "REDIS_URL"}
    assert bool(named) == (role != "gateway")
    it = parsed(service["command"], named, monkeypatch)
    assert it.role == role
    assert isinstance(it.section, KINDS[role])
    assert service["environment"].keys() - OTEL <= read_from_environment(role) | read_from_environment("router")
    assert int(service["stop_grace_period"].removesuffix("s")) >= it.section.drain_s + 10


def test_compose_servers_find_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {role: parsed(SERVICES[role]["command"], {"REDIS_URL": "redis://x"}, monkeypatch).section for role in ROLES}
    router, gateway = found["router"], found["gateway"]
    assert isinstance(router, RouterConfig)
    assert isinstance(gateway, GatewayConfig)
    assert gateway.router == f"router:{port(router.listen)}"
    for role in ("verifier", "drafter"):
        worker = found[role]
        assert isinstance(worker, WorkerConfig)
        assert worker.advertise == f"{role}:{port(worker.listen)}"
    assert [*router.models] == [found["verifier"].model_name]  # type: ignore[attr-defined]
    assert SERVICES["gateway"]["ports"] == [f"127.0.0.1:{port(gateway.listen)}:{port(gateway.listen)}"]
    for role in ("router", "verifier", "drafter"):  # each with the password that Redis has for its user
        password = SERVICES["redis"]["environment"][f"{role.upper()}_PASSWORD"]
        assert SERVICES[role]["environment"]["REDIS_URL"] == f"redis://outrider-{role}:{password}@redis:6379/0"
    assert SERVICES["redis"]["command"] == ["sh", "/etc/redis/start.sh"]
    assert {"REDISCLI_AUTH", *(f"{role.upper()}_PASSWORD" for role in ACL_ROLES)} == {*SERVICES["redis"]["environment"]}
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text(encoding="utf-8"))["scrape_configs"]
    pages = {role: found[role].metrics for role in ROLES}
    for it in scraped:
        role, page = it["job_name"], port(pages[it["job_name"]])
        by_name = [(name, str(one["port"])) for one in it.get("dns_sd_configs", []) for name in one["names"]]
        by_address = [tuple(one.split(":")) for given in it.get("static_configs", []) for one in given["targets"]]
        assert by_name + by_address == [(role, page)]
    assert {it["job_name"] for it in scraped} == pages.keys()


def test_only_this_machine_is_let_in_and_servers_have_no_rights_to_spare() -> None:
    for name, service in SERVICES.items():
        assert all(published.startswith("127.0.0.1:") for published in service.get("ports", [])), name
        if name in ROLES:
            assert service["read_only"] is True
            assert service["cap_drop"] == ["ALL"]
            assert service["security_opt"] == ["no-new-privileges:true"]


def test_builds_mounts_and_dependencies_of_compose_services_exist() -> None:
    for name, service in SERVICES.items():
        assert set(service.get("depends_on", [])) <= SERVICES.keys()
        if "build" in service:
            build = service["build"]
            assert (DEPLOY / build["context"] / build["dockerfile"]).samefile(DEPLOY / "docker" / "Dockerfile")
            assert build["target"] in stages()
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            assert source in COMPOSE["volumes"] or (DEPLOY / source).exists(), f"{name}: {volume}"


def test_observability_services_have_a_profile_of_their_own() -> None:  # bites: COMPOSE is the file that ships
    watching = {name for name, service in SERVICES.items() if service.get("profiles") == ["observability"]}
    assert watching == {"collector", "prometheus", "grafana"}
    assert not [name for name, service in SERVICES.items() if name not in watching and "profiles" in service]


def test_compose_images_have_versions_and_equal_those_of_the_manifests() -> None:
    manifests = "".join(file.read_text(encoding="utf-8") for file in DEPLOY.glob("*/*/*.yaml"))
    for service in SERVICES.values():
        image = service["image"].replace("${REGISTRY-}", "").replace("${TAG:-0.1.0}", "0.1.0")
        name, _, tag = image.partition(":")
        assert tag not in ("", "latest")
        if re.search(rf"\b{name}\b", manifests):
            assert re.search(rf"\b{name}(:|, newTag: ){re.escape(tag)}", manifests), image
