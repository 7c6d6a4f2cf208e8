"""Whatever a user gets wrong on the command line: exit status 2, a message that names it, no traceback."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.cli.main import app

ROOT = Path(__file__).parents[2]
NO_REDIS = "redis://127.0.0.1:1"


@dataclass
class Done:
    """How a command ended."""

    returncode: int
    stderr: str


def invoked(*arguments: str, redis: str | None = None) -> Done:
    """The command in this process: quick, for what is refused before anything starts."""
    result = CliRunner().invoke(app, arguments, env={"REDIS_URL": redis, "COLUMNS": "200", "TERM": "dumb"})
    assert isinstance(result.exception, SystemExit)
    return Done(result.exit_code, result.stderr)


def outrider(*arguments: str, redis: str | None = None) -> Done:
    """The command as its own process."""
    environment = {"PATH": "/usr/bin:/bin", "COLUMNS": "200", "TERM": "dumb"}
    if redis is not None:
        environment["REDIS_URL"] = redis
    command = [sys.executable, "-m", "outrider.cli", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)


def assert_refused(done: Done, *fragments: str) -> None:
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    for fragment in fragments:
        assert fragment in done.stderr


@pytest.fixture
def busy() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def cluster_file(folder: Path, text: str) -> str:
    file = folder / "cluster.toml"
    file.write_text(text)
    return str(file)


VALID = f"""
[router]
listen = "127.0.0.1:0"
models = {{ target = "{ROOT}/models/target" }}
[[verifier]]
model = "{ROOT}/models/target"
"""


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        (VALID + "thread = 2", ("verifier.0.thread: unknown key; is threads meant?",)),
        (VALID + "slots = 0", ("verifier.0.slots:", "greater than or equal to 1")),
        (VALID + 'listen = "nowhere"', ("verifier.0.listen:", "HOST:PORT")),
        (VALID + 'name = "other"', ("verifier.0: serves", "as 'other'", "has target: add it there")),
        (VALID.replace("[[verifier]]", "[[verifiers]]"), ("verifiers: unknown key; is verifier meant?",)),
        (VALID.replace("[router]", "[[router]]"), ("router: must be one section: write [router]",)),
        ("[router", ("not valid TOML",)),
    ],
)
def test_a_wrong_cluster_file_is_named_with_the_key(tmp_path: Path, text: str, fragments: tuple[str, ...]) -> None:
    file = cluster_file(tmp_path, text)
    assert_refused(invoked("up", file), *fragments)


def test_a_missing_cluster_file_is_named() -> None:
    assert_refused(invoked("up", "no-such.toml"), "no-such.toml: No such file or directory")


def test_up_repeats_the_error_of_a_server_that_fails_to_start(tmp_path: Path, redis_url: str) -> None:
    missing = VALID.replace('model = "', 'model = "/no-such')
    done = outrider("up", cluster_file(tmp_path, missing), redis=redis_url)
    assert_refused(done, "outrider: verifier-0: ", f"/no-such{ROOT}/models/target")
    assert done.stderr.count("outrider: ") == 1


@pytest.mark.parametrize("role", ["router", "verifier", "drafter"])
def test_an_unreachable_redis_is_named(role: str) -> None:
    model = "target=models/target" if role == "router" else "models/drafter"
    done = outrider(role, "--model", model, "--listen", "127.0.0.1:0", redis=NO_REDIS)
    assert_refused(done, "Redis at 127.0.0.1:1 cannot be reached", "REDIS_URL")


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (("--layers", "3"), "layers: is 3, must be from 1 to 2"),
        (("--skip", "2"), "skip: the checkpoint has no layer 2; its layers are 0 to 1"),
        (("--skip", "0", "--skip", "1"), "skip: lists all 2 layers"),
        (("--layers", "1", "--skip", "0"), "skip: cannot be given together with layers"),
    ],
    ids=["too many", "unknown", "none left", "both"],
)
def test_layers_that_the_checkpoint_does_not_have_are_named(
    redis_url: str, arguments: tuple[str, ...], fragment: str
) -> None:
    assert_refused(outrider("drafter", "--model", "models/drafter", *arguments, redis=redis_url), fragment)


def test_a_busy_port_is_named(redis_url: str, busy: str) -> None:
    done = outrider("router", "--model", "target=models/target", "--listen", busy, redis=redis_url)
    assert_refused(done, f"cannot bind {busy} (Address already in use)", "port 0")


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (("router", "--model", "target"), ("--model", "NAME=FOLDER")),
        (("router", "--model", "t=x", "--wait-us", "-1"), ("wait_us", "greater than or equal to 0")),
        (("router", "--model", "t=x", "--policy", "best"), ("policy", "'heuristic', 'fixed', 'rounds' or 'off'")),
        (("verifier", "--model", "x", "--dtype", "int2"), ("dtype", "'bfloat16', 'float8', 'int8' or 'int4'")),
        (("verifier", "--model", "x", "--threads", "two"), ("threads", "valid integer")),
        (("drafter", "--model", "x", "--level-nodes", "0"), ("level_nodes", "greater than or equal to 1")),
        (("drafter", "--model", "x", "--speed", "9"), ("--speed",)),
        (("drafter", "--model", "x", "--dtype", "int2"), ("dtype", "'bfloat16', 'float8', 'int8' or 'int4'")),
        (("drafter", "--model", "x", "--layers", "0"), ("layers", "greater than or equal to 1")),
        (("drafter", "--model", "x", "--skip", "1", "--skip", "-1"), ("skip.1", "greater than or equal to 0")),
        (("drafter",), ("--model",)),
    ],
    ids=" ".join,
)
def test_a_wrong_flag_of_a_server_is_named(arguments: tuple[str, ...], fragments: tuple[str, ...]) -> None:
    assert_refused(invoked(*arguments, redis=NO_REDIS), *fragments)


def test_a_missing_redis_flag_is_named() -> None:
    assert_refused(invoked("verifier", "--model", "models/target"), "--redis", "REDIS_URL")


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (("generate", "x", "--temperature", "-1"), ("temperature: is -1.0, must be a number from 0 to 100",)),
        (("generate", "x", "--address", "here"), ("address: is 'here', must be HOST:PORT",)),
        (("generate", "x", "--address", "http://127.0.0.1:8000"), ("must be HOST:PORT of a router", "OpenAI's API")),
        (("generate", "x", "--address", "127.0.0.1:1"), ("no router can be reached at 127.0.0.1:1",)),
        (("generate", "x", "--speculation", "wild"), ("--speculation", "ema")),
        (("pad", "models/target", "x", "--parameters", "many"), ("--parameters", "150M")),
        (("pad", "models/nothing", "x", "--parameters", "9M"), ("models/nothing",)),
        (("demo", "--prompts", "11"), ("prompts: is 11, there are 10",)),
        (("demo", "--models", "nowhere"), ("nowhere/smollm2-drafter.gguf: no such file",)),
    ],
    ids=" ".join,
)
def test_a_wrong_argument_of_a_command_is_named(arguments: tuple[str, ...], fragments: tuple[str, ...]) -> None:
    assert_refused(invoked(*arguments), *fragments)


@pytest.fixture
def gateway() -> Iterator[str]:
    """Where a server speaks HTTP."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        serving.join()


def test_a_gateway_that_is_taken_for_a_router_is_called_one(gateway: str) -> None:
    assert_refused(invoked("generate", "x", "--address", gateway), "speaks HTTP, as a gateway does")


def test_a_router_that_is_taken_for_a_page_of_figures_is_no_bytes_on_the_screen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with server.accept()[0] as caller:
                caller.recv(4096)
                caller.sendall(b"\x00\x00\x12\x04\x00" * 9)  # as HTTP/2 begins

        answering = threading.Thread(target=answer)
        answering.start()
        done = invoked("top", f"127.0.0.1:{server.getsockname()[1]}", "--once")
        answering.join()
    assert_refused(done, "no such page is there", "`metrics`")
    assert done.stderr.strip().isprintable()


def test_the_client_alone_says_what_the_command_needs() -> None:
    """`pip install .` installs no typer."""
    program = "import sys; sys.modules['typer'] = None; from outrider.cli.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert_refused(Done(done.returncode, done.stderr), "typer is missing", "pip install 'outrider[serve]'")
