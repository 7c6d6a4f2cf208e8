"""A real server at a fixed address, which a test can kill and start again."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from types import TracebackType

import redis
import redis.exceptions

from outrider.store.redis.embedded import find_server

_START_S = 10.0


class Server:
    """Started by `with`, killed at its end. `options` are its configuration; its append-only file is in `folder`."""

    def __init__(self, folder: Path, **options: object) -> None:
        self.folder = folder
        self._socket = folder / "s"
        self.url = f"unix://{self._socket}"
        settings = {"port": 0, "unixsocket": self._socket, "dir": folder, "appendonly": "yes", "save": "", **options}
        self._command = [str(find_server())]
        for name, value in settings.items():
            self._command += (f"--{name.replace('_', '-')}", str(value))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def start(self) -> None:
        """Starts it and waits until it answers."""
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        until = time.monotonic() + _START_S
        with redis.Redis.from_url(self.url, socket_timeout=_START_S) as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.exceptions.ConnectionError:
                    if time.monotonic() > until:
                        self.kill()
                        raise
                    time.sleep(0.01)

    def kill(self) -> None:
        """SIGKILL, as a crash would be."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
