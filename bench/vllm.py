"""vLLM with remote drafts beside vLLM alone, its n-grams and its own draft model: `make bench-vllm`.

usage: python -m bench.vllm [--target 150M] [--dtype float32] [--rounds 2] [--prompts 4] [--tokens 96]

Every way is a process that stays while the others run, and they take turns, so that a machine that gets slower gets
slower for all. vLLM has the first processor, drafters the second one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from bench.faults import FaultProxy
from bench.options import padded_model
from bench.peers.vllm import VLLM, vllm_environment
from outrider.cli.command import parse_count

ROOT = Path(__file__).parents[1]
DEPTH = 4  # drafts in a step
DRAFTER = ROOT / "models/drafter"


@dataclass
class Way:
    """A vLLM that is set up in one way."""

    name: str
    speculation: dict[str, Any] | None = None
    settings: dict[str, Any] = field(default_factory=dict)  # Outrider's


@dataclass(frozen=True)
class Load:
    """What a way is asked."""

    temperature: float
    callers: int = 1
    noise: bool = True  # shared noise
    round_trip_ms: float = 0.0  # between drafter and vLLM

    def __str__(self) -> str:
        noise = "" if self.noise or not self.temperature else ", own sampling"
        distance = f", {self.round_trip_ms:g} ms" if self.round_trip_ms else ""
        return f"T={self.temperature:g}, callers={self.callers}{noise}{distance}"


OURS = {"method": "custom_class", "model": "outrider_vllm.RemoteDrafter", "num_speculative_tokens": DEPTH}
NGRAM = {"method": "ngram", "num_speculative_tokens": DEPTH, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
DRAFT_MODEL = {"method": "draft_model", "model": str(DRAFTER), "num_speculative_tokens": DEPTH}

LOADS: dict[Load, tuple[str, ...]] = {
    Load(0.0): ("plain", "nobody", "ngram", "draft_model", "ours"),
    Load(0.7): ("plain", "ours"),
    Load(1.0): ("plain", "nobody", "ngram", "draft_model", "ours"),
    Load(1.0, noise=False): ("ours",),
    Load(0.0, callers=2): ("plain", "ours"),
    Load(0.0, callers=8): ("plain", "ours"),
    Load(1.0, callers=8): ("plain", "ours"),
    **{Load(0.0, round_trip_ms=distance): ("ours",) for distance in (5.0, 20.0, 50.0)},
}


@contextmanager
def worker(way: Way, model: Path, dtype: str) -> Iterator[subprocess.Popen[str]]:
    """A vLLM in its process."""
    told = {"model": str(model), "dtype": dtype, "speculative_config": way.speculation, "max_model_len": 512}
    told["additional_config"] = {"outrider": way.settings}
    # VLLM_CPU_OMP_THREADS_BIND is for workers in processes of their own.
    environment = vllm_environment() | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        ["taskset", "-c", "0", VLLM / "bin/python", "-P", "-m", "bench.peers.vllm_worker", json.dumps(told)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment, cwd=ROOT,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def drafter() -> Iterator[str]:
    """A drafter's address."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "outrider.cli",
        "drafter",
        "--model",
        str(DRAFTER),
        "--listen",
        "127.0.0.1:0",
    ]
    process = subprocess.Popen(["taskset", "-c", "1", *command], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().rpartition(" ")[2].strip()
    finally:
        process.terminate()
        process.wait()


def free_port() -> int:
    """A port that nobody uses."""
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        return int(it.getsockname()[1])


async def ask(process: subprocess.Popen[str], asked: dict[str, Any]) -> dict[str, Any]:
    """What a worker answers."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(asked) + "\n")
    process.stdin.flush()
    found: dict[str, Any] = json.loads(await asyncio.to_thread(process.stdout.readline))
    return found


async def measure(options: argparse.Namespace) -> None:
    """Print what each way takes, and the ratios that the documentation quotes."""
    prompts = read_prompts(max(options.prompts, *(load.callers for load in LOADS)))
    async with AsyncExitStack() as stack:
        model = await stack.enter_async_context(padded_model(ROOT / "models/target", parse_count(options.target)))
        inner = stack.enter_context(ExitStack())
        address, port = inner.enter_context(drafter()), free_port()
        proxy = await stack.enter_async_context(FaultProxy(f"127.0.0.1:{port}"))
        there = {"drafters": [address], "listen": f"127.0.0.1:{port}", "advertise": proxy.address}
        ways = [
            Way("plain"),
            Way("nobody", OURS),
            Way("ngram", NGRAM),
            Way("draft_model", DRAFT_MODEL),
            Way("ours", OURS, there),
        ]
        workers = {}
        for way in ways:
            report(f"starting {way.name}")
            workers[way.name] = inner.enter_context(worker(way, model, options.dtype))
            stdout = workers[way.name].stdout
            assert stdout is not None
            if (line := await asyncio.to_thread(stdout.readline)) != "ready\n":
                raise SystemExit(f"vLLM did not start as {way.name}: {line}")
        taken: dict[tuple[Load, str], list[dict[str, Any]]] = {}
        for number in range(-1, options.rounds):  # in the first one control learns
            for load, names in LOADS.items():
                proxy.delay_s = load.round_trip_ms / 2000
                for name in names if number % 2 else names[::-1]:
                    asked = {
                        "prompts": prompts[: max(options.prompts, load.callers)],
                        "temperature": load.temperature,
                        "tokens": options.tokens,
                    }
                    asked |= {"noise": int(load.noise), "callers": load.callers}
                    found = await ask(workers[name], asked)
                    report(f"round {number + 1} of {options.rounds}: {load}: {name} {found['seconds']:.1f} s")
                    if number >= 0:
                        taken.setdefault((load, name), []).append(found)
    show(options, taken)


def show(options: argparse.Namespace, taken: dict[tuple[Load, str], list[dict[str, Any]]]) -> None:
    """Print the table and the last line."""
    table = Table("load", "way", "tokens a second", "over plain", "tokens a step", "same texts")
    for (load, name), found in taken.items():
        plain = taken.get((load, "plain"), taken[Load(load.temperature), "plain"])
        prompts = max(options.prompts, load.callers)
        speed = median(prompts * options.tokens / it["seconds"] for it in found)
        steps = median(it["steps"] for it in found) / -(-prompts // load.callers)
        alike = taken.get((load, "nobody"), plain)  # with the same noise
        same = sum(a == b for a, b in zip(alike[0]["texts"], found[0]["texts"], strict=True))
        over = ratio(plain, found)
        table.add_row(
            str(load),
            name,
            f"{speed:.1f}",
            f"{over:.2f}",
            f"{options.tokens / steps:.2f}",
            f"{same}/{len(plain[0]['texts'])}",
        )
    Console(width=120).print(table)

    def at(name: str, load: Load) -> list[dict[str, Any]]:
        return taken[load, name]

    cold, hot = Load(0.0), Load(1.0)
    best = min(
        (at(name, hot) for name in ("plain", "ngram", "draft_model")), key=lambda it: ratio(it, at("plain", hot))
    )
    steps = {noise: median(it["steps"] for it in at("ours", Load(1.0, noise=noise))) for noise in (True, False)}
    lowest = min(ratio(at("plain", load), at("ours", load)) for load, names in LOADS.items() if len(names) > 1)
    print(
        f"vllm: target={options.target} dtype={options.dtype} "
        f"over_draft_model={ratio(at('draft_model', cold), at('ours', cold)):.2f} "
        f"noise_over_best={ratio(best, at('ours', hot)):.2f} "
        f"noise_tokens_over_own={steps[False] / steps[True]:.2f} "
        f"nobody_over_plain={ratio(at('plain', cold), at('nobody', cold)):.3f} "
        f"at_20_ms={ratio(at('ours', cold), at('ours', Load(0.0, round_trip_ms=20.0))):.2f} "
        f"least_over_plain={lowest:.2f}"
    )


def ratio(slower: list[dict[str, Any]], faster: list[dict[str, Any]]) -> float:
    """Return how much faster the second is: the median of the rounds' ratios."""
    ratios: list[float] = [one["seconds"] / other["seconds"] for one, other in zip(slower, faster, strict=True)]
    return median(ratios)


def read_prompts(count: int) -> list[list[int]]:
    """Return the tokens of some held-out texts."""
    tokenizer = Tokenizer.from_file(str(DRAFTER / "tokenizer.json"))
    lines = (ROOT / "examples/held_out.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["prompt"] for line in lines if "#short" in line]
    return [tokenizer.encode(text).ids for text in texts[:count]]


def report(what: str) -> None:
    """Show progress."""
    print(what, file=sys.stderr, flush=True)


def main() -> None:
    """Read the flags, and measure."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--target", default="150M", help="parameters to pad models/target to")
    flags.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    flags.add_argument("--rounds", type=int, default=2)
    flags.add_argument("--prompts", type=int, default=4)
    flags.add_argument("--tokens", type=int, default=96)
    asyncio.run(measure(flags.parse_args()))


if __name__ == "__main__":
    main()
