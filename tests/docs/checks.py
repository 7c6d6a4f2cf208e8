"""What is done with a command of a page: run, where that takes seconds; else held against what it names."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib
from functools import cache
from typing import Any

import typer

from outrider.cli.main import app
from outrider.config import ClusterConfig, load_cluster, parse
from outrider.simulation.deployment import Scenario
from outrider.training.recipe import DrafterRecipe
from tests.docs.pages import ROOT
from tests.docs.sandbox import Sandbox

SERVERS = {"up", "router", "verifier", "drafter", "gateway"}
LONG = {
    "bench",
    "demo",
    "plan",
    "simulate",
    "verify",
    "top",
    "trace",
    "train",
    "chat",
}  # take from ten seconds to for ever
DIALS = "--connect"  # such a drafter listens nowhere, and goes on until it is stopped; tests/e2e/test_gate.py runs it
EXAMPLE = ["outrider", "up"]  # what the demo runs, with the default ports
DEPLOYING = {"docker", "helm", "kind", "kubectl", "kustomize", "podman"}  # there is no cluster of theirs
MADE = "models/large"  # by a command of the first page
MINIMAL: dict[str, Any] = {"router": {"models": {"target": "models/target"}}, "verifier": [{"model": "models/target"}]}


def check_shell(commands: list[str], sandbox: Sandbox) -> None:
    """All commands of a block. Raises AssertionError."""
    servers = [command for command in commands if _is_server(command)]
    for command in commands:
        named_paths_exist(shlex.split(command, comments=True))
    for command in commands:
        if command in servers:
            if command == servers[0]:
                sandbox.start(servers)
        else:
            check_command(command, sandbox)


def check_command(command: str, sandbox: Sandbox) -> None:
    """One command. Raises AssertionError for one that these checks do not cover."""
    words = shlex.split(command, comments=True)
    match words:
        case ["export", *assignments]:
            sandbox.environment |= dict(sandbox.placed(word).split("=", 1) for word in assignments)
        case ["make", *targets]:
            assert {word for word in targets if "=" not in word} <= make_targets(), command
        case ["pip", "install", *what]:
            extras = {
                extra for word in what if (found := re.search(r"\[(.+)\]", word)) for extra in found[1].split(",")
            }
            assert extras <= project()["optional-dependencies"].keys(), command
        case ["python", "-m", module, *arguments]:
            assert _flags(arguments) <= set(re.findall(r"--[\w-]+", module_help(module))), command
        case ["outrider", name, *arguments] if _is_long(name, arguments):
            parsed(name, arguments)
        case ["outrider" | "python", *_]:
            sandbox.need_cluster()
            sandbox.run(command)
        case ["pytest", *_] | ["source", ".venv/bin/activate"]:
            pass
        case [tool, *_] if tool in DEPLOYING:
            pass
        case _:
            raise AssertionError(f"{command}: teach tests/docs/checks.py to check it, or write <!-- not run: why -->")


def check_toml(text: str, sandbox: Sandbox) -> None:
    """A scenario, a recipe, or a cluster's file or a part of it. A whole one is what `outrider up cluster.toml` finds
    then."""
    values = tomllib.loads(text)
    if values.keys() & Scenario.model_fields.keys():
        parse(Scenario, values, "block")
        return
    if "text" in values:
        parse(DrafterRecipe, values, "block")
        return
    parse(ClusterConfig, _completed(values), "block")
    if {"router", "verifier"} <= values.keys():
        file = sandbox.folder / "cluster.toml"
        file.write_text(sandbox.placed(text), encoding="utf-8")
        load_cluster(file)


def parsed(name: str, arguments: list[str]) -> None:
    """Has the real command read its arguments, without running it. Raises AssertionError with its objection."""
    command: Any = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    while hasattr(command, "commands"):  # a group
        command, arguments = command.commands[arguments[0]], arguments[1:]
    try:
        command.make_context(name, arguments)
    except Exception as error:  # typer's usage errors have no public name
        raise AssertionError(f"outrider {name}: {error}") from error


def make_targets() -> set[str]:
    """The targets of the Makefile."""
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def project() -> dict[str, Any]:
    """The project table of pyproject.toml."""
    return dict(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"])


@cache
def module_help(module: str) -> str:
    """What `python -m MODULE --help` prints."""
    assert importlib.util.find_spec(module), module
    command = [sys.executable, "-m", module, "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def named_paths_exist(words: list[str]) -> None:
    """What a command names of this repository is there."""
    for word in words:
        top, slash, _ = word.partition("/")
        if slash and top in {"bench", "deploy", "docs", "examples", "models", "recipes", "tests"}:
            assert (ROOT / word.partition("::")[0]).exists() or top == "bench" or word == MADE, word


def _is_server(command: str) -> bool:
    words = command.split()
    return words[0] == "outrider" and words[1] in SERVERS and words != EXAMPLE and DIALS not in words


def _is_long(name: str, arguments: list[str]) -> bool:
    if name == "describe":  # of a checkpoint it measures passes
        return not re.fullmatch(r"[\w.]+:\d+", arguments[0])
    if DIALS in arguments or ["outrider", name, *arguments] == EXAMPLE:
        return True
    return name in LONG and "--once" not in arguments


def _flags(arguments: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in arguments if word.startswith("--")}


def _completed(values: dict[str, Any]) -> dict[str, Any]:
    """A part of a cluster's file, with the least that a whole one needs."""
    whole = {**MINIMAL, **values, "router": {**MINIMAL["router"], **values.get("router", {})}}
    return {**whole, "verifier": [{**MINIMAL["verifier"][0], **section} for section in whole["verifier"]]}
