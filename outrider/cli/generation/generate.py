"""`outrider generate`: generates text on a running cluster."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.command import INTERRUPTED, Address, Profile, reported
from outrider.core.session.contract import PolicyName, Priority, RuleName
from outrider.core.session.speculation_status import SpeculationReason
from outrider.errors import InvalidRequest

if TYPE_CHECKING:
    from outrider.client import Generation


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from stdin.")],
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the text as a user's message, through the model's chat template.")
    ] = False,
    address: Address = None,
    profile: Profile = None,
    model: Annotated[str, typer.Option(help="May be left out where one model is served.")] = "",
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling: keep tokens up to this total probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Keep tokens with this share of the likeliest's probability.")] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="For tokens of prompt and answer; above 1 makes them less likely.")
    ] = 1.0,
    presence_penalty: Annotated[
        float, typer.Option(help="Subtracted from the logits of tokens that the answer contains.")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(help="Subtracted once for each time that the answer contains the token.")
    ] = 0.0,
    logit_bias: Annotated[
        list[str] | None, typer.Option(metavar="ID=BIAS", help="Added to a token's logit; may be repeated.")
    ] = None,
    allow: Annotated[
        list[int] | None, typer.Option(help="A token id that may be generated, and no others; may be repeated.")
    ] = None,
    ban: Annotated[
        list[int] | None, typer.Option(help="A token id that may not be generated; may be repeated.")
    ] = None,
    min_tokens: Annotated[int, typer.Option(help="Fewest new tokens.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text. [default: a random one, shown]")] = None,
    choice: Annotated[int, typer.Option(help="Number of the sample, of several with one prompt and seed.")] = 0,
    max_tokens: Annotated[int, typer.Option(help="Limit on new tokens; 0: as many as fit into the context.")] = 128,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends the text; may be repeated.")] = None,
    stop_id: Annotated[list[int] | None, typer.Option(help="A token id that ends it; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Continue after the end of text.")] = False,
    schema: Annotated[
        Path | None,
        typer.Option(help="File with a JSON schema; the answer is JSON of it.", exists=True, dir_okay=False),
    ] = None,
    regex: Annotated[str | None, typer.Option(help="Regular expression of the answer.")] = None,
    one_of: Annotated[list[str] | None, typer.Option(help="An answer to choose from; may be repeated.")] = None,
    speculation: Annotated[
        PolicyName | None, typer.Option(help="Policy; it changes the speed, never the text. [default: the router's]")
    ] = None,
    depth: Annotated[int | None, typer.Option(help="Ceiling on gamma. [default: the router's]")] = None,
    rule: Annotated[RuleName, typer.Option(help="Acceptance rule; see docs/protocol.md.")] = "shared-noise",
    lenience: Annotated[
        float, typer.Option(help="Parameter of the rule lenient-speculative-sampling, which is lossy.")
    ] = 1.0,
    logprobs: Annotated[
        int | None, typer.Option(help="Show each token's log-probability and those of this many likeliest tokens.")
    ] = None,
    session: Annotated[
        str, typer.Option(help="Session to continue with a further turn; an earlier call printed its name.")
    ] = "",
    whole_history: Annotated[
        bool,
        typer.Option("--whole-history", help="The text is the whole session; where it differs, a new session forks."),
    ] = False,
    priority: Annotated[
        Priority, typer.Option(help="batch: the request may wait while the cluster is full.")
    ] = "interactive",
    timeout: Annotated[float | None, typer.Option(help="Seconds for the whole call.")] = None,
) -> None:
    """Continue a text and print it as it arrives. Statistics follow on stderr, with the session's name."""
    from outrider.client import Client

    with reported(), Client(address, profile=profile) as client:
        text = sys.stdin.read() if prompt == "-" else prompt
        stream = client.stream(
            None if chat else text,
            messages=[{"role": "user", "content": text}] if chat else (),
            timeout=timeout,
            model=model,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=_biases(logit_bias or ()),
            allowed_ids=allow or (),
            banned_ids=ban or (),
            min_tokens=min_tokens,
            seed=seed,
            choice=choice,
            max_tokens=max_tokens or None,
            stop=stop or (),
            stop_ids=stop_id or (),
            ignore_eos=ignore_eos,
            schema=None if schema is None else _schema(schema),
            regex=regex,
            choices=one_of or None,
            speculation=speculation,
            depth=depth,
            rule=rule,
            lenience=lenience,
            logprobs=logprobs,
            session=session,
            whole_history=whole_history,
            priority=priority,
        )
        try:
            with stream:
                for chunk in stream:
                    print(chunk.text, end="", flush=True)
        except KeyboardInterrupt:
            print(f"\noutrider: cancelled; session {stream.session_id or session or 'none yet'}", file=sys.stderr)
            raise SystemExit(INTERRUPTED) from None
        print()
        if logprobs is not None:
            _print_table(stream.result)
        print(_figures(stream.result), file=sys.stderr)
        if line := _speculation(stream.result):
            print(line, file=sys.stderr)


def _schema(file: Path) -> object:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidRequest("schema", f"{file} is no JSON: {error}") from None


def _biases(entries: Sequence[str]) -> dict[int, float]:
    """Parse ID=BIAS entries into biases by token id. Raises BadParameter, which typer reports."""
    try:
        return {int(token): float(bias) for token, _, bias in (entry.partition("=") for entry in entries)}
    except ValueError:
        raise typer.BadParameter("must be ID=BIAS, for example 42=-5", param_hint="--logit-bias") from None


def _print_table(result: Generation) -> None:
    """Print a line for each token: its id and log-probability, then those of the likeliest tokens."""
    for token, entry in zip(result.token_ids, result.logprobs, strict=True):
        likely = "".join(f"  {other:>8} {logprob:8.3f}" for other, logprob in entry.top)
        print(f"{token:>8} {entry.logprob:8.3f}{likely and '  |' + likely}", file=sys.stderr)


def _speculation(result: Generation) -> str:
    """Return a line that says why no drafts were verified; empty if some were or the reason is not known."""
    status, steps = result.usage.speculation, result.usage.steps
    if status.drafting or status.reason is SpeculationReason.UNKNOWN:
        return ""
    of = f" for {status.steps} of {steps} steps" if status.steps < steps else ""
    return f"outrider: no speculation{of}: {status.explanation}"


def _figures(result: Generation) -> str:
    usage = result.usage
    forked = f" (forked from {result.forked_from})" if result.forked_from else ""
    resumed = f", broke off and went on: {result.resumes}" if result.resumes else ""
    return (
        f"outrider: session {result.session_id}{forked}, "
        f"{f'LOSSY by the rule {result.rule}, ' if result.lossy else ''}"
        f"{usage.completion_tokens} tokens, ended by {result.finish_reason}, seed {result.seed}, "
        f"{usage.tokens_per_second:.1f} tok/s after a first token in {usage.first_token_s * 1000:.0f} ms, "
        f"acceptance length {usage.acceptance_length:.2f} over {usage.steps} steps, "
        f"{usage.wire_bytes / max(usage.completion_tokens, 1):.0f} wire bytes a token{resumed}"
    )
