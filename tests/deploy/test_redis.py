"""The Redis of the manifests, started as its pod starts it: it takes its settings, and its password by a pipe."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from pathlib import Path

import pytest
import redis
from redis.backoff import ConstantBackoff, NoBackoff
from redis.retry import Retry

from outrider.store.embedded import find_server
from tests.deploy.manifests import COMPONENT, environment, of_kind, pods, rendered


def test_it_starts_with_its_password_and_its_settings_and_ends_at_a_signal(tmp_path: Path) -> None:
    manifests = rendered("cpu-demo")
    (pod,) = (pod for pod in pods(manifests) if pod.labels[COMPONENT] == "redis")
    (container,) = pod.containers
    (data := tmp_path / "data").mkdir()
    settings = tmp_path / "redis.conf"
    text = of_kind(manifests, "ConfigMap")["redis"]["data"]["redis.conf"].replace("/data", str(data))
    listening = f"port 0\nunixsocket {tmp_path}/socket\n"  # and nowhere else
    settings.write_text(text + listening, encoding="utf-8")
    *shell, script = container["command"]
    here = {"valkey-server": shlex.quote(str(find_server())), "/etc/redis/redis.conf": shlex.quote(str(settings))}
    for name, ours in here.items():
        script = script.replace(name, ours)
    found = environment(manifests, container)
    server = subprocess.Popen([*shell, script], env={**os.environ, **found}, stdout=subprocess.DEVNULL)
    try:
        patient = Retry(ConstantBackoff(0.05), 100)
        with redis.Redis(
            unix_socket_path=f"{tmp_path}/socket", password=found["REDISCLI_AUTH"], retry=patient
        ) as client:
            assert client.ping()
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
            assert client.config_get("appendonly") == {"appendonly": "yes"}
        stranger = redis.Redis(unix_socket_path=f"{tmp_path}/socket", retry=Retry(NoBackoff(), 0))
        with stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()
        assert found["REDISCLI_AUTH"] not in Path(f"/proc/{server.pid}/cmdline").read_text(encoding="utf-8")
        server.send_signal(signal.SIGTERM)
        assert server.wait(10) == 0
    finally:
        server.kill()
        server.wait()
    assert any(data.rglob("*.aof"))
