"""A row in a separate process: `python -m bench.rows.worker KIND --target FOLDER ...`.

The process writes "ready" on a line of stdout when it has loaded. Then it answers each line of stdin, a `BenchRequest`,
with a line, the `Sample`, until stdin ends.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bench.rows.requests import BenchRequest, sample_to_json
from outrider.cli.command import reported
from outrider.cli.performance.samples import Sample
from outrider.errors import CheckpointError, ConfigError
from outrider.fleet import process_env

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["transformers", "assisted", "lookup", "in-process", "gpt-fast"]
LOOKUP_TOKENS = 10  # recommended by transformers for prompt lookup

Generate = Callable[[BenchRequest], Sample]


def main(
    kind: Kind,
    target: Annotated[Path, typer.Option()],
    drafter: Annotated[Path, typer.Option()],
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option()] = "bfloat16",
    threads: Annotated[int, typer.Option(min=1)] = 2,
    checkout: Annotated[Path, typer.Option(help="Checkout of gpt-fast, for that kind.")] = Path(),
    cluster: Annotated[str, typer.Option(help="JSON of a ClusterConfig, for in-process.")] = "",
) -> None:
    """Answer requests with one engine."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    process_env.set_variables(threads)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the output of libraries must not mix with the answers
    with reported(), closing(answers):
        if kind == "in-process":
            with asyncio.Runner() as runner:
                _answer(_in_process(runner, cluster), answers)
        elif kind == "gpt-fast":
            from bench.peers.gpt_fast import load

            _answer(load(checkout, target, dtype, threads), answers)
        else:
            _answer(_transformers(kind, target, drafter, dtype, threads), answers)


def _answer(generate: Generate, answers: Any) -> None:
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(sample_to_json(generate(BenchRequest.from_json(line))), file=answers, flush=True)


def _in_process(runner: asyncio.Runner, cluster: str) -> Generate:
    from bench.rows.local import LocalPair
    from outrider.config import ClusterConfig

    async def start() -> LocalPair:
        return LocalPair(ClusterConfig.model_validate_json(cluster))

    pair = runner.run(start())
    return lambda request: runner.run(pair.generate(request))


class _Clock:
    """A streamer that records the arrival of tokens. Every call of `put` after that for the prompt is one pass."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.puts: list[tuple[float, list[int]]] = []
        self._prompt = True

    def put(self, tokens: Tensor) -> None:
        if not self._prompt:
            self.puts.append((time.perf_counter() - self.began, tokens.flatten().tolist()))
        self._prompt = False

    def end(self) -> None:
        """Do nothing; the interface of streamers requires this method."""

    def sample(self, most: int) -> Sample:
        pairs = [(token, arrival) for arrival, tokens in self.puts for token in tokens][:most]
        return Sample(tuple(token for token, _ in pairs), tuple(arrival for _, arrival in pairs), len(self.puts))


def _transformers(kind: Kind, target: Path, drafter: Path, dtype: str, threads: int) -> Generate:
    """Return a function that calls `generate()` as a user would, on `threads` threads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers warns about itself
        try:
            import torch
            from transformers.utils import logging
        except ImportError as error:
            raise ConfigError(f"{kind}: {error.name} is not installed; make bench installs it") from None
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(threads)
    model = _model(target, dtype)
    extra: dict[str, Any] = {}
    if kind == "assisted":
        extra["assistant_model"] = _model(drafter, dtype)
    elif kind == "lookup":
        extra["prompt_lookup_num_tokens"] = LOOKUP_TOKENS

    def generate(request: BenchRequest) -> Sample:
        torch.manual_seed(request.seed)
        sampling = {"do_sample": True, "temperature": request.temperature, "top_k": 0} if request.temperature else {}
        clock = _Clock()
        ids = torch.tensor([request.prompt])
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=request.max_tokens,
                streamer=clock,
                **({"do_sample": False} | sampling | extra),
            )
        return clock.sample(request.max_tokens)

    return generate


def _model(folder: Path, dtype: str) -> Any:
    """Load the checkpoint, dequantized where it is in GGUF, without an end of text."""
    import torch

    from outrider.engine.transformers.pretrained import from_pretrained

    try:
        model: Any = from_pretrained(folder, dtype=getattr(torch, dtype))
    except Exception as error:  # the errors of a bad folder have no common base class
        raise CheckpointError(f"{folder}: transformers cannot load it: {error}") from None
    model.eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
