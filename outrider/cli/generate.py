"""`outrider generate`: text from a running cluster."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from outrider.cli.reporting import reported

if TYPE_CHECKING:
    from outrider.client import Generation


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from stdin.")],
    address: Annotated[str, typer.Option(help="The router's HOST:PORT.")] = "127.0.0.1:7070",
    model: Annotated[str, typer.Option(help="May be left out where one model is served.")] = "",
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Nucleus.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text. Drawn and shown if left out.")] = None,
    choice: Annotated[int, typer.Option(help="Which of several samples of one prompt and seed.")] = 0,
    max_tokens: Annotated[int, typer.Option(help="Most new tokens.")] = 128,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends the text; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end of text.")] = False,
    speculation: Annotated[
        Literal["ema", "fixed", "off"] | None, typer.Option(help="Speed only. [default: the router's]")
    ] = None,
    depth: Annotated[int | None, typer.Option(help="Ceiling on gamma. [default: the router's]")] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds for the whole call.")] = None,
) -> None:
    """Continue a text, shown as it comes. Figures follow on stderr."""
    from outrider.client import Client

    with reported(), Client(address) as client:
        stream = client.stream(
            sys.stdin.read() if prompt == "-" else prompt,
            timeout=timeout,
            model=model,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            choice=choice,
            max_tokens=max_tokens,
            stop=stop or (),
            ignore_eos=ignore_eos,
            speculation=speculation,
            depth=depth,
        )
        with stream:
            for chunk in stream:
                print(chunk.text, end="", flush=True)
        print()
        print(_figures(stream.result), file=sys.stderr)


def _figures(result: Generation) -> str:
    usage = result.usage
    return (
        f"outrider: {usage.completion_tokens} tokens, ended by {result.finish_reason}, seed {result.seed}, "
        f"{usage.tokens_per_second:.1f} tok/s after a first token in {usage.first_token_s * 1000:.0f} ms, "
        f"acceptance length {usage.acceptance_length:.2f} over {usage.steps} steps, "
        f"{usage.wire_bytes / max(usage.completion_tokens, 1):.0f} wire bytes a token"
    )
