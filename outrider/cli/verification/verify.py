"""`outrider verify`: checks that a cluster generates exactly the text of its target."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from outrider.cli.command import FAILURE, INTERRUPTED, figures_table
from outrider.core.session.contract import SHARED_NOISE, RuleName
from outrider.rpc.lifecycle import run_until_signal

if TYPE_CHECKING:
    from outrider.cli.verification.cases import VerifyCase
    from outrider.cli.verification.compare import Difference, Verdict
    from outrider.cli.verification.reference import Reference

TEMPERATURES = (0.0, 0.8)
ADAPTER = "verified"  # name of the adapter in the started cluster
SPARE_SLOTS = 2  # of the started cluster: the slot of an ended session takes a moment to become free

SPECULATIVE, REFERENCE = "speculative", "transformers"
AGAINST = {SPECULATIVE: "plain against speculative", REFERENCE: "the text against transformers"}


def verify(
    address: Annotated[str | None, typer.Option(help="A running cluster's router, HOST:PORT.")] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="The target's checkpoint: for its tokenizer, and for transformers. With --address."),
    ] = None,
    target: Annotated[Path, typer.Option(help="Without --address: target of the cluster to start.")] = Path(
        "models/target"
    ),
    drafter: Annotated[Path, typer.Option(help="Without --address: drafter of the cluster to start.")] = Path(
        "models/drafter"
    ),
    model: Annotated[str, typer.Option(help="The model's name, where the cluster serves several.")] = "",
    prompts: Annotated[Path | None, typer.Option(help="JSON lines with an id and a prompt.")] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be repeated.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Prompts taken from the file.")] = 4,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds for each prompt and temperature above 0.")] = 2,
    temperature: Annotated[list[float] | None, typer.Option(help="May be repeated. [default: 0, 0.8]")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens of each text.")] = 64,
    schema: Annotated[Path | None, typer.Option(help="Texts are JSON of the schema in this file.")] = None,
    regex: Annotated[str | None, typer.Option(help="Texts match this regular expression.")] = None,
    adapter: Annotated[
        Path | None,
        typer.Option(help="Folder of a LoRA adapter. With --address: that of the one that --model names."),
    ] = None,
    rule: Annotated[RuleName, typer.Option(help="Acceptance rule of the speculative texts.")] = SHARED_NOISE,
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        typer.Option(help="Type of the verifier's weights; it decides what a near tie is."),
    ] = "float32",
    kv_dtype: Annotated[
        Literal["auto", "int8"],
        typer.Option(help="Type of keys and values in the cluster to start; int8: not compared with transformers."),
    ] = "auto",
    numerics: Annotated[Literal["fast", "invariant"], typer.Option(help="Numerics of the cluster to start.")] = "fast",
    concurrency: Annotated[int, typer.Option(min=1, help="Concurrent texts.")] = 4,
    reference: Annotated[
        bool, typer.Option(help="Also compare with transformers (float32, in this process), if it is installed.")
    ] = True,
    timeout: Annotated[float, typer.Option(help="Seconds for one text.")] = 300.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report to this file.")] = None,
) -> None:
    """Generate texts with and without speculation and compare them, token by token, with each other and with
    transformers. Exits with status 1 if rounding does not explain a difference.

    Above temperature 0 only the rule shared-noise gives the same text as plain decoding. Under the other lossless rules
    a text is a separate sample; then the command tests whether its tokens follow the probabilities of transformers.
    """
    from outrider.cli.verification.cases import follows_distribution, quantiles_by_temperature
    from outrider.cli.verification.distribution_check import detectable_difference, p_value
    from outrider.errors import ConfigError

    cases: list[VerifyCase] = []
    folder = target if address is None else checkpoint
    done = False

    async def main() -> None:
        nonlocal done
        from rich.console import Console
        from rich.progress import Progress

        from outrider.cli.verification.cases import check_rule, compare, plan, read_prompts
        from outrider.cli.verification.compare import TOLERANCE
        from outrider.client import AsyncClient

        if folder is None:
            raise ConfigError("flags: checkpoint: is needed with --address, for the tokenizer and for transformers")
        temperatures = temperature or list(TEMPERATURES)
        judged = reference and find_spec("transformers") is not None and kv_dtype == "auto"  # its KV is never int8
        check_rule(rule, temperatures, with_reference=judged)
        chosen = read_prompts(folder, prompts, prompt, count)
        if adapter is not None and address is not None and not model:
            raise ConfigError(
                "flags: model: is needed with --address and --adapter: the adapter's name in that cluster"
            )
        constraint = _constraint(schema, regex)
        served = None if adapter is None or address is not None else await asyncio.to_thread(adapter.resolve)
        judge = await asyncio.to_thread(_reference, folder, adapter) if judged else None
        terminal = Console(stderr=True, highlight=False)
        work = plan(chosen, temperatures, seeds)
        async with (
            _cluster(
                address, target, drafter, dtype, kv_dtype, numerics, concurrency + SPARE_SLOTS, served, terminal.print
            ) as router,
            AsyncClient(router) as client,
        ):
            name = model
            if served is not None:
                name = (await client.load_adapter(ADAPTER, served.name)).name
            with Progress(console=terminal, transient=True, disable=not terminal.is_terminal) as progress:
                bar = progress.add_task("texts", total=len(work))
                async for case in compare(
                    client,
                    work,
                    judge,
                    tolerance=TOLERANCE[dtype],
                    rule=rule,
                    model=name,
                    constraint=constraint,
                    max_tokens=max_tokens,
                    concurrency=concurrency,
                    timeout=timeout,
                ):
                    cases.append(case)
                    progress.advance(bar)
        done = True

    run_until_signal(main())
    if not done:
        raise SystemExit(INTERRUPTED)
    print_report(cases)
    for at, quantiles in quantiles_by_temperature(cases).items():
        print(
            f"T {at:g}: texts under {rule} are separate samples and cannot be compared token by token. A test of their "
            f"{len(quantiles)} tokens against the probabilities of transformers gives p = {p_value(quantiles):.2g}; it "
            f"detects deviations from about {detectable_difference(len(quantiles)):.2f}. More --seeds detect smaller "
            "ones."
        )
    if not any(case.speculative.usage.accepted for case in cases):
        print(
            "No drafted token was accepted, so this run hardly tests speculation. Check that a drafter runs. The "
            "target may also be too fast for drafts to arrive in time: outrider pad makes a slower one."
        )
    if all(case.reference_verdict is None and not case.quantiles for case in cases):
        missing = "it is not installed" if kv_dtype == "auto" else f"KV is {kv_dtype}"
        print(f"Not compared with transformers: {missing if reference else '--no-reference'}.")
    if json_file is not None:
        json_file.write_text(json.dumps([entry(case) for case in cases], indent=1), encoding="utf-8")
    print(last_line(cases), flush=True)
    if any("bug" in (case.verdict, case.reference_verdict) for case in cases) or not follows_distribution(cases):
        raise SystemExit(FAILURE)


def print_report(cases: Sequence[VerifyCase]) -> None:
    """Print a table with a row for each temperature, and a line for each difference."""
    from rich.console import Console

    screen = Console(highlight=False)
    headings = ("T", "texts", "tokens", "same", "near\nties", "bugs", "accept.\nlength")
    table = figures_table(*headings, "transf.\nsame", "near\nties", "bugs")
    for temperature in dict.fromkeys(case.temperature for case in cases):
        row = [case for case in cases if case.temperature == temperature]
        steps = sum(case.speculative.usage.steps for case in row)
        tokens = sum(len(case.speculative.token_ids) for case in row)
        mine, theirs = _counts(case.verdict for case in row), _counts(case.reference_verdict for case in row)
        table.add_row(
            f"{temperature:g}", str(len(row)), str(tokens), *mine, f"{tokens / steps:.2f}" if steps else "-", *theirs
        )
    screen.print(table)
    for case in cases:
        for against, outcome, found in _differences(case):
            where = f"position {found.position}: {found.first} / {found.second}, gap {found.gap:.3g}" if found else ""
            screen.print(
                f"{outcome}: {case.prompt.name}, T {case.temperature:g}, seed {case.seed}, {AGAINST[against]}, "
                f"{where or 'the same tokens, but not the same text or end'}",
                style="bold red" if outcome == "bug" else None,
                markup=False,
            )


def last_line(cases: Sequence[VerifyCase]) -> str:
    """Return the line for scripts. It has its last two entries only if texts were tested as separate samples."""
    from outrider.cli.verification.cases import follows_distribution, quantiles_by_temperature

    mine, theirs = _counts(case.verdict for case in cases), _counts(case.reference_verdict for case in cases)
    tokens = sum(len(text.token_ids) for case in cases for text in (case.plain, case.speculative) if text)
    sampled = quantiles_by_temperature(cases)
    result = "kept" if follows_distribution(cases) else "broken"
    entries = f" drawn={sum(map(len, sampled.values()))} law={result}" if sampled else ""
    return (
        f"verify: texts={len(cases)} tokens={tokens} identical={mine[0]} near_ties={mine[1]} bugs={mine[2]} "
        f"reference_near_ties={theirs[1]} reference_bugs={theirs[2]}{entries}"
    )


def entry(case: VerifyCase) -> dict[str, Any]:
    """Return a case for the JSON report."""
    return {
        "prompt": case.prompt.name,
        "temperature": case.temperature,
        "seed": case.seed,
        "verdict": case.verdict,
        "reference_verdict": case.reference_verdict,
        "differences": [
            {"against": against, "verdict": outcome, **(found._asdict() if found else {})}
            for against, outcome, found in _differences(case)
        ],
        "plain_tokens": case.plain.token_ids if case.plain else None,
        "speculative_tokens": case.speculative.token_ids,
        "steps": case.speculative.usage.steps,
        "accepted": case.speculative.usage.accepted,
    }


def _differences(case: VerifyCase) -> list[tuple[str, Verdict, Difference | None]]:
    outcomes = (
        (SPECULATIVE, case.verdict, case.difference),
        (REFERENCE, case.reference_verdict, case.reference_difference),
    )
    return [(against, outcome, found) for against, outcome, found in outcomes if outcome not in (None, "identical")]


def _counts(verdicts: Any) -> list[str]:
    """Return the numbers of identical texts, near ties and bugs; dashes if nothing was compared."""
    known = [verdict for verdict in verdicts if verdict is not None]
    return [str(known.count(kind)) if known else "-" for kind in ("identical", "near tie", "bug")]


def _constraint(schema: Path | None, regex: str | None) -> dict[str, Any]:
    """Return what every text has to be, as the client's options have it."""
    from outrider.errors import ConfigError

    if schema is None:
        return {} if regex is None else {"regex": regex}
    if regex is not None:
        raise ConfigError("flags: regex: does not go with --schema: a text has one of them")
    try:
        return {"schema": json.loads(schema.read_text(encoding="utf-8"))}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{schema}: is no JSON schema: {error}") from None


def _reference(checkpoint: Path, adapter: Path | None) -> Reference:
    from outrider.cli.verification.reference import Reference
    from outrider.hub import checkpoint_folder

    return Reference(checkpoint_folder(checkpoint), adapter=adapter)


@asynccontextmanager
async def _cluster(
    address: str | None,
    target: Path,
    drafter: Path,
    dtype: Any,
    kv_dtype: Any,
    numerics: Any,
    slots: int,
    adapter: Path | None,
    log: Callable[[str], None],
) -> AsyncIterator[str]:
    """Yield the address of a router: the given one, or that of a cluster that runs within the block."""
    from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, VerifierConfig
    from outrider.fleet.cluster import LocalCluster

    if address is not None:
        yield address
        return
    # overlap=True: drafters always draft. Where drafting does not pay they would stop, and nothing would be verified.
    config = ClusterConfig(
        router=RouterConfig(
            listen="127.0.0.1:0",
            models={"target": target},
            max_sessions=slots,
            overlap=True,
            adapter_loaders=("*",),
        ),
        verifier=[
            VerifierConfig(
                model=target,
                name="target",
                dtype=dtype,
                kv_dtype=kv_dtype,
                numerics=numerics,
                slots=slots,
                adapters=None if adapter is None else adapter.parent,
            )
        ],
        drafter=[DrafterConfig(model=drafter, slots=slots)],
    )
    log("starting Redis, a verifier, a drafter and a router ...")
    async with LocalCluster(config, forward=lambda name, line: log(f"{name}: {line}")) as cluster:
        yield cluster.router_address
