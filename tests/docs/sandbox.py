"""A folder like a user's checkout, with servers that a page starts; addresses in pages stand for free ports."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from tests.docs.pages import ROOT
from tests.engine.taught import random_heads
from tests.fleet.conftest import free_port

RUN_S = 60.0
STOP_S = 15.0
PAD = "outrider pad models/target models/large"  # makes the target of CLUSTER, of any size
CLUSTER, GATEWAY = "outrider up examples/cluster.toml", "outrider gateway --router 127.0.0.1:7070"
BY_HAND = "by hand"
DEFAULTS = (  # a command, what in it shows that it names an address, and the address that it takes else
    ("outrider generate", "--address", "--address 127.0.0.1:7070"),
    ("outrider gateway", "--listen", "--listen 127.0.0.1:8000"),
    ("outrider top", ":", "127.0.0.1:9464"),
)

_REDIS = re.compile(r"redis://[\w.]+:6379")
_ADDRESS = re.compile(r"\b(127\.0\.0\.1|0\.0\.0\.0|10\.0\.0\.\d+):([1-9]\d+)\b")
_CHECKPOINTS = {
    **{f"models/{model}": model for model in ("target", "mid", "drafter")},
    "checkpoints/my-model": "target",
    "checkpoints/my-middle-model": "mid",
    "checkpoints/my-small-model": "drafter",
}
_CHAT = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"  # the reference models have no template


class Sandbox:
    """Where commands of pages run. Use as a context manager: the servers end with it."""

    def __init__(self, folder: Path, redis_url: str) -> None:
        self.folder = folder
        self._redis_url = redis_url
        self._ports: dict[str, int] = defaultdict(free_port)  # by address
        self._servers: dict[str, subprocess.Popen[str]] = {}  # by command
        self._session = ""
        self.environment: dict[str, str] = {}
        for name, model in _CHECKPOINTS.items():
            (folder / name).mkdir(parents=True)
            (folder / name / "chat_template.jinja").write_text(_CHAT, encoding="utf-8")
            for file in (ROOT / "models" / model).iterdir():
                (folder / name / file.name).symlink_to(file)
        random_heads("eagle-3", ROOT / "models" / "target", folder / "checkpoints" / "my-eagle")
        shutil.copytree(ROOT / "examples", folder / "examples")
        for file in (folder / "examples").rglob("*"):
            if file.suffix in (".py", ".toml"):
                file.write_text(self.placed(file.read_text(encoding="utf-8")), encoding="utf-8")

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(list(self._servers))

    def placed(self, text: str) -> str:
        """With addresses of this sandbox, a free port for each that is named or left to a command's default, and with
        the session that the last answer was of."""
        text = text.partition(" #")[0] if text.startswith("outrider ") else text
        for command, named, default in DEFAULTS:
            if text.startswith(command) and named not in text:
                text += f" {default}"
        text = _REDIS.sub(lambda _: self._redis_url, text).replace("SESSION", self._session)
        return _ADDRESS.sub(lambda match: f"127.0.0.1:{self._ports[match[0].replace('0.0.0.0', '127.0.0.1')]}", text)

    def run(self, command: str) -> None:
        """Runs it. Raises AssertionError with what it wrote if it fails. The cluster's target is made once."""
        if command.startswith(PAD) and (self.folder / "models" / "large").exists():
            return
        done = subprocess.run(
            ["bash", "-c", self.placed(command)],
            cwd=self.folder,
            env=self._environ(),
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=False,
        )
        assert done.returncode == 0, f"{command}\nended with status {done.returncode}:\n{done.stdout}{done.stderr}"
        if named := re.search(r"^outrider: session (\w+)", done.stderr, re.MULTILINE):
            self._session = named[1]

    def run_python(self, snippet: str) -> None:
        """Runs the snippet as a program."""
        (self.folder / "snippet.py").write_text(self.placed(snippet), encoding="utf-8")
        self.run("python snippet.py")

    def turn_page(self) -> None:
        """Forgets what a page has set, and stops what it has started, but for the cluster that all pages share."""
        self.environment.clear()
        self.stop([command for command in self._servers if command not in (CLUSTER, GATEWAY)])

    def need_cluster(self) -> None:
        """Sees to it that a cluster and a gateway run."""
        running = set(map(_kind, self._servers))
        self.run(f"{PAD} --parameters 8M")
        for command in (CLUSTER, GATEWAY):
            if _kind(command) not in running:
                self.start([command], {})

    def start(self, commands: list[str], environment: dict[str, str] | None = None) -> None:
        """Starts servers and waits until all listen. Those of their kind that ran before are stopped first, but for the
        cluster that all pages share."""
        if commands == [CLUSTER] and CLUSTER in self._servers:
            return
        kinds = set(map(_kind, commands))
        self.stop([command for command in self._servers if _kind(command) in kinds])
        for command in commands:
            log = (self.folder / "servers.log").open("a")
            self._servers[command] = subprocess.Popen(
                ["bash", "-c", f"exec {self.placed(command)}"],
                cwd=self.folder,
                env=self._environ(environment),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            log.close()
        for command in commands:
            output = self._servers[command].stdout
            assert output is not None
            if not any("listening on" in line or "Try: outrider generate" in line for line in output):
                raise AssertionError(f"{command}\ndid not start:\n{(self.folder / 'servers.log').read_text()}")

    def stop(self, commands: list[str]) -> None:
        """Ends servers in order."""
        ending = [self._servers.pop(command) for command in commands]
        for server in ending:
            server.send_signal(signal.SIGTERM)
        for server in ending:
            try:
                server.communicate(timeout=STOP_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.communicate()

    def _environ(self, environment: dict[str, str] | None = None) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        inherited = {name: it for name, it in os.environ.items() if not name.startswith(("REDIS_", "OUTRIDER_"))}
        return {
            **inherited,
            "PATH": path,
            "PYTHONPATH": str(ROOT),
            **(self.environment if environment is None else environment),
        }


def _kind(command: str) -> str:
    name = command.split()[1]
    return name if name in ("up", "gateway") else BY_HAND
