"""`outrider generate`: text from a running cluster."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.connecting import Address, Profile
from outrider.cli.reporting import INTERRUPTED, reported
from outrider.core.contract import PolicyName, Priority, RuleName
from outrider.core.speculation import SpeculationReason

if TYPE_CHECKING:
    from outrider.client import Generation


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from stdin.")],
    chat: Annotated[
        bool, typer.Option("--chat", help="The text is a user's message, for the model's chat template.")
    ] = False,
    address: Address = None,
    profile: Profile = None,
    model: Annotated[str, typer.Option(help="May be left out where one model is served.")] = "",
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Nucleus.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Keep what has this share of the likeliest token's probability.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="On prompt and answer; above 1 discourages.")] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="Off the logits of what the answer holds.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="The same, as often as it holds it.")] = 0.0,
    logit_bias: Annotated[
        list[str] | None, typer.Option(metavar="ID=BIAS", help="Added to a token's logit; may be repeated.")
    ] = None,
    allow: Annotated[list[int] | None, typer.Option(help="The only token ids that may be said; repeat it.")] = None,
    ban: Annotated[list[int] | None, typer.Option(help="A token id that may not be said; may be repeated.")] = None,
    min_tokens: Annotated[int, typer.Option(help="Fewest new tokens.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text. Drawn and shown if left out.")] = None,
    choice: Annotated[int, typer.Option(help="Which of several samples of one prompt and seed.")] = 0,
    max_tokens: Annotated[int, typer.Option(help="Most new tokens; 0: as many as fit into the context.")] = 128,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends the text; may be repeated.")] = None,
    stop_id: Annotated[list[int] | None, typer.Option(help="A token id that ends it; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end of text.")] = False,
    speculation: Annotated[PolicyName | None, typer.Option(help="Speed only. [default: the router's]")] = None,
    depth: Annotated[int | None, typer.Option(help="Ceiling on gamma. [default: the router's]")] = None,
    rule: Annotated[RuleName, typer.Option(help="Of acceptance; see docs/protocol.md.")] = "shared-noise",
    lenience: Annotated[float, typer.Option(help="Of lenient-speculative-sampling, which is lossy.")] = 1.0,
    logprobs: Annotated[
        int | None, typer.Option(help="Show each token's log-probability and those of this many likely ones.")
    ] = None,
    session: Annotated[str, typer.Option(help="A further turn of the session that an earlier call named.")] = "",
    whole_history: Annotated[
        bool, typer.Option("--whole-history", help="The text is all of the session; another past forks it.")
    ] = False,
    priority: Annotated[Priority, typer.Option(help="batch: it can wait while all places are taken.")] = "interactive",
    timeout: Annotated[float | None, typer.Option(help="Seconds for the whole call.")] = None,
) -> None:
    """Continue a text, shown as it comes. Figures follow on stderr; the session in them can be continued."""
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


def _biases(entries: Sequence[str]) -> dict[int, float]:
    """Biases by id from ID=BIAS. Raises BadParameter, which typer reports."""
    try:
        return {int(token): float(bias) for token, _, bias in (entry.partition("=") for entry in entries)}
    except ValueError:
        raise typer.BadParameter("must be ID=BIAS, for example 42=-5", param_hint="--logit-bias") from None


def _print_table(result: Generation) -> None:
    """A line for each token: its id and log-probability, then those of the most likely ones."""
    for token, entry in zip(result.token_ids, result.logprobs, strict=True):
        likely = "".join(f"  {other:>8} {logprob:8.3f}" for other, logprob in entry.top)
        print(f"{token:>8} {entry.logprob:8.3f}{likely and '  |' + likely}", file=sys.stderr)


def _speculation(result: Generation) -> str:
    """Why speculation brought nothing; empty where it was not that way."""
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
