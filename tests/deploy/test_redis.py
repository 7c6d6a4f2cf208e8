"""The Redis of the manifests, started as its pod starts it: it takes its settings, and its passwords by a pipe."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import aclosing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis
from redis.backoff import ConstantBackoff, NoBackoff
from redis.retry import Retry

from outrider.errors import Unavailable
from outrider.rpc.certificates import make
from outrider.store.redis.acl import ACL_ROLES, rules, user_name
from outrider.store.redis.client import connect, ping
from outrider.store.redis.embedded import find_server
from tests.deploy.manifests import COMPONENT, DEPLOY, environment, of_kind, pods, rendered, servers
from tests.e2e.test_faults import free_port
from tests.store.role_work import WORK, denied, works


def started(
    folder: Path, *, overlay: str = "cpu-demo", here: Mapping[str, str] = {}, **changes: str
) -> tuple[subprocess.Popen[bytes], dict[str, str]]:
    """The server of an overlay with its files in `folder`, and the environment of its container, with changes. `here`:
    more of what stands in place of what its files say."""
    manifests = rendered(overlay)
    (pod,) = (pod for pod in pods(manifests) if pod.labels[COMPONENT] == "redis")
    (container,) = pod.containers
    (folder / "data").mkdir()
    found = environment(manifests, container) | changes
    wheel = {"valkey-server": shlex.quote(str(find_server())), "/etc/redis": str(folder), "/data": f"{folder}/data"}
    for name, text in of_kind(manifests, "ConfigMap")["redis"]["data"].items():
        for its, ours in (wheel | here).items():
            text = text.replace(its, ours)
        if name == "redis.conf" and not here:
            text += f"port 0\nunixsocket {folder}/socket\n"  # and nowhere else
        (folder / name).write_text(text, encoding="utf-8")
    command = [word.replace("/etc/redis", str(folder)) for word in container["command"]]
    return subprocess.Popen(command, env={**os.environ, **found}, stdout=subprocess.DEVNULL), found


@contextmanager
def running(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, str], redis.Redis]]:
    """The server, its environment, and a client of the operator."""
    server, found = started(folder)
    patient = Retry(ConstantBackoff(0.05), 100)
    try:
        with redis.Redis(
            unix_socket_path=f"{folder}/socket", password=found["REDISCLI_AUTH"], retry=patient
        ) as operator:
            assert operator.ping()
            yield server, found, operator
    finally:
        server.kill()
        server.wait()


def test_redis_starts_with_its_passwords_and_settings_and_ends_at_a_signal(tmp_path: Path) -> None:
    with running(tmp_path) as (server, found, operator):
        assert operator.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        assert operator.config_get("appendonly") == {"appendonly": "yes"}
        stranger = redis.Redis(unix_socket_path=f"{tmp_path}/socket", retry=Retry(NoBackoff(), 0))
        with stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()
        line = Path(f"/proc/{server.pid}/cmdline").read_text(encoding="utf-8")
        assert not any(value in line for name, value in found.items() if name.endswith(("PASSWORD", "AUTH")))
        server.send_signal(signal.SIGTERM)
        assert server.wait(10) == 0
    assert any((tmp_path / "data").rglob("*.aof"))


async def test_each_role_does_its_work_with_the_url_of_its_pods(tmp_path: Path) -> None:
    manifests = rendered("cpu-demo")
    urls = {pod.component: environment(manifests, container).get("REDIS_URL") for pod, container in servers("cpu-demo")}
    assert urls.pop("gateway") is None
    with running(tmp_path) as (_, found, operator):
        passwords = {role: found[f"{role.upper()}_PASSWORD"] for role in ACL_ROLES}
        for role, url in urls.items():
            parts = urlsplit(url or "")
            assert (parts.username, parts.password) == (f"outrider-{role}", passwords[role])  # type: ignore[index]
        for role in WORK:
            ours = f"unix://{user_name(role)}@{tmp_path}/socket?password={passwords[role]}"
            await works(role, ours, f"unix://{tmp_path}/socket?password={found['REDISCLI_AUTH']}")
        assert denied(operator) == []


def test_redis_does_not_start_without_all_of_its_passwords(tmp_path: Path) -> None:
    """A user with an empty password would let everybody in."""
    for number, name in enumerate(("REDISCLI_AUTH", *(f"{role.upper()}_PASSWORD" for role in ACL_ROLES))):
        (folder := tmp_path / str(number)).mkdir()
        server, _ = started(folder, **{name: ""})
        try:
            assert server.wait(10) != 0, name
        finally:
            server.kill()
            server.wait()


async def test_redis_with_tls_is_known_by_its_certificate_and_refuses_plaintext(tmp_path: Path) -> None:
    """The server of Debian's redis-tools, for the wheel's speaks no TLS: of an older version, so one command less."""
    if shutil.which("redis-check-rdb") is None:
        pytest.skip("redis-tools are missing")
    certificates, port = tmp_path / "tls", free_port()
    make(certificates)
    for ours, its in (("ca.pem", "ca.crt"), ("redis.pem", "tls.crt"), ("redis.key", "tls.key")):
        (certificates / ours).rename(certificates / its)
    here = {
        "valkey-server": "bash -c 'exec -a redis-server redis-check-rdb \"$@\"' -",
        "/tls/": f"{certificates}/",
        "tls-port 6379": f"tls-port {port}",
        "+client|setinfo ": "",
    }
    server, found = started(tmp_path, overlay="gpu", here=here)
    try:
        mount, password = f"?ssl_ca_certs={certificates}/ca.crt", found["ROUTER_PASSWORD"]
        url = f"rediss://outrider-router:{password}@localhost:{port}/0{mount}"
        with pytest.raises(Unavailable, match="CERTIFICATE_VERIFY_FAILED"):  # "localhost" is not what it is called
            await pinged(url)
        await pinged(f"{url}&ssl_check_hostname=false")
        with pytest.raises(Unavailable):
            await pinged(f"rediss://outrider-router:{password}@localhost:{port}/0")
        with pytest.raises(Unavailable):
            await pinged(f"redis://outrider-router:{password}@localhost:{port}/0")
    finally:
        server.kill()
        server.wait()


async def pinged(url: str) -> None:
    """Ping a Redis, within its first seconds."""
    async with aclosing(connect(url)) as client:
        for _ in range(100):
            try:
                await ping(client)
            except Unavailable as error:
                if "refused" not in str(error):
                    raise
                await asyncio.sleep(0.05)
            else:
                return


def test_the_start_script_has_the_acl_rules_of_the_code() -> None:
    lines = (DEPLOY / "components" / "redis" / "start.sh").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith("user ")] == [
        f"user {user_name(role)} on >${{{role.upper()}_PASSWORD:?}} {rules(role)}" for role in ACL_ROLES
    ]
