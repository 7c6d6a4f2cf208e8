"""`outrider demo`: starts a local cluster, generates the same texts without and with speculation, and compares them."""

from __future__ import annotations

import asyncio
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from outrider.cli.command import FAILURE, INTERRUPTED, parse_count
from outrider.rpc.lifecycle import run_until_signal

if TYPE_CHECKING:
    from rich.console import Console

    from outrider.cli.verification.compare import GenerationPair
    from outrider.client import AsyncClient, Generation
    from outrider.config import ClusterConfig

TEMPERATURES = (0.6, 0.0)
SEED = 2024  # of the first prompt; each further prompt has the next number
WARM_UP_TOKENS = 24


@dataclass(frozen=True, slots=True)
class _Options:
    prompts: list[tuple[str, str]]  # (name, text)
    max_tokens: int
    parameters: int
    dtype: Literal["float32", "bfloat16"]
    verifier_threads: int
    drafter_threads: int
    models: Path


def demo(
    prompts: Annotated[int, typer.Option(min=1, help="Number of held-out prompts; each runs at two temperatures.")] = 5,
    max_tokens: Annotated[int, typer.Option(min=2, help="New tokens of each text.")] = 80,
    parameters: Annotated[
        int, typer.Option(parser=parse_count, metavar="COUNT", help="Pad the target to this size.")
    ] = 150_000_000,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Type of the target's weights.")] = "bfloat16",
    verifier_threads: Annotated[int, typer.Option(min=1, help="Threads of the verifier's passes.")] = 2,
    drafter_threads: Annotated[int, typer.Option(min=1, help="Threads of the drafter's passes.")] = 1,
    models: Annotated[Path, typer.Option(help="Folder that holds target/ and drafter/.")] = Path("models"),
    texts: Annotated[Path, typer.Option(help="File of JSON lines, each with a prompt.")] = Path(
        "examples/held_out.jsonl"
    ),
) -> None:
    """Start a cluster on this machine, generate texts without and with speculation, compare and measure them."""
    from outrider.cli.command import reported
    from outrider.cli.performance.load import read_prompts
    from outrider.errors import ConfigError

    with reported():
        chosen = read_prompts(texts, "#short")
        if prompts > len(chosen):
            raise ConfigError(f"flags: prompts: is {prompts}, {texts} has {len(chosen)} short ones")
        chosen = chosen[:prompts]
    options = _Options(chosen, max_tokens, parameters, dtype, verifier_threads, drafter_threads, models)
    pairs: list[GenerationPair] = []
    run_until_signal(_run(options, pairs))
    if len(pairs) < len(chosen) * len(TEMPERATURES):
        raise SystemExit(INTERRUPTED)
    if any(pair.verdict == "bug" for pair in pairs):
        raise SystemExit(FAILURE)


async def _run(options: _Options, pairs: list[GenerationPair]) -> None:
    from rich.console import Console

    from outrider.cli.performance.report import last_line, print_report
    from outrider.client import AsyncClient
    from outrider.engine.checkpoints.padding import pad_checkpoint
    from outrider.fleet.cluster import LocalCluster

    began = time.monotonic()
    screen, progress = Console(highlight=False), Console(stderr=True, highlight=False)
    with tempfile.TemporaryDirectory(prefix="outrider-demo-") as folder:
        padded = Path(folder) / "target"
        with progress.status(f"padding {options.models / 'target'} to {options.parameters / 1e6:.0f}M parameters ..."):
            await asyncio.to_thread(pad_checkpoint, options.models / "target", padded, parameters=options.parameters)
        cluster = LocalCluster(
            _config(options, padded),
            forward=lambda name, line: progress.out(f"{name}: {line}", highlight=False),
            ready=lambda process: progress.print(f"{process.name} (pid {process.pid}) listens on {process.address}"),
        )
        with progress.status("starting Redis, a verifier, a drafter and a router ..."):
            await cluster.__aenter__()
        try:
            async with AsyncClient(cluster.router_address, tls=False) as client:
                await _warm_up(client, options)
                for temperature in TEMPERATURES:
                    numbers = range(len(options.prompts))
                    pairs.extend([await _pair(screen, client, options, number, temperature) for number in numbers])
        finally:
            await cluster.__aexit__(None, None, None)
    print_report(screen, pairs, options.dtype, time.monotonic() - began)
    print(last_line(pairs), flush=True)


def _config(options: _Options, padded: Path) -> ClusterConfig:
    from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, VerifierConfig

    return ClusterConfig(
        router=RouterConfig(listen="127.0.0.1:0", models={"target": padded}),
        verifier=[
            VerifierConfig(model=padded, name="target", dtype=options.dtype, threads=options.verifier_threads, slots=2)
        ],
        drafter=[DrafterConfig(model=options.models / "drafter", threads=options.drafter_threads, slots=2)],
    )


async def _warm_up(client: AsyncClient, options: _Options) -> None:
    """Generate once without and once with speculation, so that the figures contain no first-time costs."""
    for speculation in ("off", "ema"):
        await client.generate(options.prompts[0][1], speculation=speculation, max_tokens=WARM_UP_TOKENS)


async def _pair(
    screen: Console, client: AsyncClient, options: _Options, number: int, temperature: float
) -> GenerationPair:
    """Generate one prompt without and with speculation.

    The order alternates from prompt to prompt, so that a machine that becomes slower favours neither.
    """
    from outrider.cli.verification.compare import TOLERANCE, GenerationPair, verdict

    name, prompt = options.prompts[number]
    screen.rule(f"[bold]{name}[/]  temperature {temperature:g}  seed {SEED + number}", align="left")
    screen.out(f"... {prompt[-200:]}", style="dim", highlight=False, end="\n\n")

    async def generate(speculation: Literal["off", "ema"]) -> Generation:
        screen.print("speculative:" if speculation == "ema" else "plain:", style="bold cyan")
        stream = client.stream(
            prompt,
            temperature=temperature,
            seed=SEED + number,
            max_tokens=options.max_tokens,
            speculation=speculation,
        )
        async for chunk in stream:
            screen.out(chunk.text, end="", highlight=False)
        usage = stream.result.usage
        screen.print(
            f"\n[{usage.completion_tokens} tokens in {usage.steps} steps, {usage.tokens_per_second:.1f} tok/s]\n",
            style="green",
            markup=False,
        )
        return stream.result

    if number % 2:
        speculative, plain = await generate("ema"), await generate("off")
    else:
        plain, speculative = await generate("off"), await generate("ema")
    outcome = verdict(plain, speculative, TOLERANCE[options.dtype])
    screen.print(f"plain and speculative text: {outcome}\n", style="bold red" if outcome == "bug" else "bold")
    return GenerationPair(temperature, plain, speculative, outcome)
