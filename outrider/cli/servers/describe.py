"""`outrider describe`: describes a checkpoint and measures its passes here, or describes a running server."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Protocol

import typer

from outrider.cli.command import figures_table, reported
from outrider.cli.flags import TLS
from outrider.core.session.speculation_status import printable
from outrider.hub import Backend

if TYPE_CHECKING:
    import grpc.aio
    from rich.console import Console

    from outrider.engine.interface.engine import Engine
    from outrider.rpc.tls import Tls
    from outrider.wire.verifier import Control

Dtype = Literal["auto", "float32", "bfloat16", "int8", "int4"]
Ca = Annotated[Path | None, typer.Option(envvar=TLS["ca"], help="The CA whose certificates are trusted, for TLS.")]
Cert = Annotated[Path | None, typer.Option(envvar=TLS["cert"], help="This tool's certificate; it names the role.")]
PrivateKey = Annotated[Path | None, typer.Option(envvar=TLS["key"], help="File with the certificate's private key.")]
Rows = list[tuple[str, str]]  # (property, value)
Costs = dict[int, float]  # seconds of a pass over n tokens

TOKENS = (2, 4, 8, 16, 32, 64)
DECODE_TOKENS = 2  # tokens in a decode step of one session
COMPARED_TOKENS = (1, 8)  # tokens in a pass of each engine that can run a checkpoint
CONTEXT = 256  # tokens in the KV cache before a measured pass
ROUNDS = 8
REPEATS = 3  # passes in a round
MEASURING_S = 10.0  # after which no further round begins: one of a model of 8B takes longer on two cores
TIMEOUT_S = 5.0
OVERLAP_MODES = {"turns": "take turns with the steps", "ahead": "draft on while a step runs", "rest": "rest"}


class _Model(Protocol):
    """The fields that every description of a model has."""

    vocabulary: int
    context: int
    tokenizer_digest: bytes


def describe(
    target: Annotated[
        str,
        typer.Argument(
            help="A checkpoint (folder, .gguf file, or ORG/NAME[@REVISION][:FILE] on the hub) or HOST:PORT of a server."
        ),
    ],
    backend: Annotated[Backend, typer.Option(help="Backend for a checkpoint.")] = "auto",
    dtype: Annotated[
        Dtype, typer.Option(help="Type of a checkpoint's weights; auto: bfloat16, or as a GGUF file has them.")
    ] = "auto",
    kv_dtype: Annotated[
        Literal["auto", "int8"],
        typer.Option(help="Type of a checkpoint's keys and values; int8: for the compiled kernels alone."),
    ] = "auto",
    layers: Annotated[int | None, typer.Option(help="Load only the first N layers. [default: all layers]")] = None,
    skip: Annotated[
        list[int] | None, typer.Option(help="A layer to leave out, counted from 0; may be repeated.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of the forward pass.")] = 1,
    drafts_for: Annotated[
        str | None,
        typer.Option("--for", metavar="TARGET", help="Show instead whether the checkpoint can draft for this target."),
    ] = None,
    ca: Ca = None,
    cert: Cert = None,
    key: PrivateKey = None,
) -> None:
    """Describe a checkpoint or a running server; for a checkpoint, measure its passes on this machine.

    A model that runs through transformers has only fast numerics, and cannot always verify trees. A GGUF file's passes
    are measured in llama.cpp, too, where it is installed.
    """
    from rich.console import Console

    screen = Console(highlight=False)
    with reported():
        if drafts_for is not None:
            _describe_pair(screen, target, drafts_for)
        elif not Path(target).is_dir() and re.fullmatch(r".+:\d+", target):
            _print_facts(screen, asyncio.run(_server(target, _tls(ca, cert, key))))
        else:
            from outrider.engine.loading import chosen_backend, has_two_engines, load_engine
            from outrider.hub import checkpoint_folder

            folder = checkpoint_folder(target)
            rows, skipped = CONTEXT + TOKENS[-1] + 1, skip or ()
            load = partial(
                load_engine,
                folder,
                dtype=dtype,
                kv_dtype=kv_dtype,
                layers=layers,
                skip=skipped,
                slots=1,
                rows=rows,
                threads=threads,
            )
            if chosen_backend(folder, backend) == "native":
                kv = "" if kv_dtype == "auto" else f" with KV in {kv_dtype}"
                how = f"{dtype}{kv}, {threads} thread{'s' if threads > 1 else ''}"
                engine, costs = _describe_folder(screen, folder, load, layers, skipped, how)
                as_it_is = backend == dtype == kv_dtype == "auto" and layers is None and not skipped
                line = last_line(engine, costs)
                if as_it_is and has_two_engines(folder):
                    native = _measure(engine, COMPARED_TOKENS)
                    del engine  # before llama.cpp needs memory
                    _compare_engines(screen, native, load)
                print(line, flush=True)
            else:
                _describe_any(screen, folder, load, chosen_backend(folder, backend))


def _describe_pair(screen: Console, drafter: str, target: str) -> None:
    from outrider.cli.servers.pairing import pairing
    from outrider.hub import checkpoint_folder

    facts, line = pairing(checkpoint_folder(drafter), checkpoint_folder(target))
    _print_facts(screen, facts)
    print(line, flush=True)


def _describe_folder(
    screen: Console, folder: Path, load: Callable[..., Engine], layers: int | None, skip: Collection[int], how: str
) -> tuple[Engine, Costs]:
    """Print what a checkpoint is and what its passes cost here; return the engine and those costs."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    from outrider.engine.checkpoints.checkpoint import read_config
    from outrider.engine.layer_selection import kept_layers

    config = read_config(folder)
    kept = len(kept_layers(config.layers, layers, skip))
    depth = str(kept) if kept == config.layers else f"{kept} of {config.layers},"
    columns = TextColumn("{task.description}"), BarColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        loading = progress.add_task(f"loading {folder}", total=1.0)
        engine = load(backend="native", progress=lambda done: progress.update(loading, completed=done))
        progress.remove_task(loading)
        _print_facts(
            screen,
            _engine(
                engine,
                config.model_type,
                ("layers", f"{depth} of width {config.width}, feed-forward {config.ffn}"),
                ("heads", f"{config.heads} of {config.head_dim} dimensions, {config.kv_heads} with keys and values"),
                *([("drafts", f"{len(config.draft_ids):,} of the ids")] if config.draft_ids else []),
            ),
        )
        measuring = progress.add_task("measuring passes", total=ROUNDS)
        costs = _measure(engine, on_round=lambda: progress.advance(measuring))
    _print_costs(screen, costs, how)
    return engine, costs


def _compare_engines(screen: Console, native: Costs, load: Callable[..., Engine]) -> None:
    """Print what passes cost in the compiled engine and in llama.cpp, and which of them "auto" takes."""
    from rich.console import Console

    from outrider.errors import CheckpointError, ConfigError

    screen.print()
    try:
        with Console(stderr=True).status("measuring passes of llama.cpp ..."):
            engine = load(backend="llama.cpp")
            found = {"native": native, "llama.cpp": _measure(engine, COMPARED_TOKENS)}
            engine.close()
    except (CheckpointError, ConfigError) as error:
        screen.print(f"llama.cpp does not run it: {error}", markup=False)
        return
    table = figures_table("backend", *(f"{tokens} token{'s' if tokens > 1 else ''}, ms" for tokens in COMPARED_TOKENS))
    for backend, costs in found.items():
        table.add_row(backend, *(f"{costs[tokens] * 1e3:.2f}" for tokens in COMPARED_TOKENS))
    screen.print(table)
    screen.print(
        'Backend "auto" takes native: a token has the same logits in every batch there, bit for bit. llama.cpp lacks '
        'that; it is for families and devices that native lacks, and for backend = "llama.cpp".',
        markup=False,
    )


def _describe_any(screen: Console, folder: Path, load: Callable[..., Engine], backend: Backend) -> None:
    from rich.console import Console

    from outrider.engine.loading import outline

    with Console(stderr=True).status(f"loading {folder} ..."):
        engine = load(backend=backend)
        costs = _measure(engine)
    _print_facts(
        screen,
        [
            *_engine(engine, f"{outline(folder, backend).model_type}, through {backend}"),
            ("speculation", f"none: {engine.treeless}" if engine.treeless else "trees, as was tried"),
            ("pass over n tokens", ", ".join(f"{tokens}: {cost * 1e3:.2f} ms" for tokens, cost in costs.items())),
        ],
    )
    print(last_line(engine, costs), flush=True)


def _engine(it: Engine, family: str, *shape: tuple[str, str]) -> Rows:
    """Return the properties that every loaded checkpoint has."""
    return [
        ("family", family),
        ("parameters", f"{it.parameters:,}"),
        *shape,
        ("vocabulary", f"{it.vocabulary:,}"),
        ("context", f"{it.context:,} tokens"),
        ("tokenizer digest", it.tokenizer_digest.hex()),
        ("weights", it.dtype),
        ("numerics", it.numerics),
        ("weights a pass reads", f"{it.weight_bytes / 1e6:.1f} MB"),
        *((("computed by", it.computed_by),) if it.computed_by else ()),
    ]


def _measure(engine: Engine, counts: Sequence[int] = TOKENS, on_round: Callable[[], None] = lambda: None) -> Costs:
    """Return the time of the fastest pass for each number of tokens, over several rounds.

    `on_round` is called after each round.
    """
    fastest: Costs = {}
    until = time.monotonic() + MEASURING_S
    for _ in range(ROUNDS):
        for tokens, seconds in engine.measure_costs(counts, CONTEXT, REPEATS):
            fastest[tokens] = min(fastest.get(tokens, seconds), seconds)
        on_round()
        if time.monotonic() > until:
            break
    return fastest


def last_line(engine: Engine, costs: Costs) -> str:
    """Return the line for scripts."""
    return f"describe: trees={'no' if engine.treeless else 'yes'} decode_ms={costs[DECODE_TOKENS] * 1e3:.2f}"


def _print_facts(screen: Console, facts: Rows) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for name, value in facts:
        table.add_row(name, Text(value))
    screen.print(table)


def _print_costs(screen: Console, costs: Costs, how: str) -> None:
    table = figures_table("tokens\na pass", "ms")
    for tokens, seconds in costs.items():
        table.add_row(str(tokens), f"{seconds * 1e3:.2f}")
    screen.print()
    screen.print(table)
    screen.print(
        f"The fastest of {ROUNDS * REPEATS} passes of one session behind {CONTEXT} tokens ({how}).", markup=False
    )


def _tls(ca: Path | None, cert: Path | None, key: Path | None) -> Tls | None:
    """Return the credentials of the connection. A router requires no client certificate, so the CA is enough for it."""
    from outrider.rpc.tls import Tls

    return Tls.client(ca) if ca and not cert and not key else Tls.read(ca, cert, key)


async def _server(address: str, tls: Tls | None) -> Rows:
    """Return the description of the server at an address.

    Raises Unavailable when no server answers, and ConfigError for a server that is not Outrider's.
    """
    import grpc
    import grpc.aio

    from outrider.errors import ConfigError, Unavailable
    from outrider.rpc.channels import open_channel
    from outrider.rpc.status import from_rpc_error
    from outrider.rpc.tls import SERVER, connection_advice

    async with open_channel(address, tls, SERVER) as channel:
        for describe_as in (_verifier, _drafter, partial(_router, address=address, secured=tls is not None)):
            try:
                return await describe_as(channel)
            except grpc.aio.AioRpcError as error:
                if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                    continue
                if error.code() == grpc.StatusCode.UNAVAILABLE:
                    raise Unavailable(
                        f"no server can be reached at {address}: "
                        + (
                            connection_advice(error.details() or "")
                            or "start one, or give the address that it listens on"
                        )
                    ) from None
                raise from_rpc_error(error) from None
    raise ConfigError(f"the server at {address} is no verifier, drafter or router of Outrider")


async def _verifier(channel: grpc.aio.Channel) -> Rows:
    from outrider.wire import verifier

    stub = verifier.VerifierStub(channel)
    it = await stub.Describe(verifier.DescribeRequest(), timeout=TIMEOUT_S)
    times = it.step_times
    costs = ", ".join(f"{cost.tokens}: {cost.microseconds / 1e3:.1f} ms" for cost in it.step_costs)
    return [
        ("verifier", it.worker_id),
        *_model(it.model, it),
        ("parameters", f"{it.parameters:,}"),
        ("weights", it.dtype),
        ("numerics", it.numerics),
        *([("speculation", f"none: {it.treeless}")] if it.treeless else []),
        *([("ranks", f"{it.ranks}; bytes are of one")] if it.ranks > 1 else []),
        ("sessions", f"{it.sessions} of {it.slots}, and {it.warm} warm"),
        ("draft streams", str(it.drafters)),
        ("drafters", OVERLAP_MODES.get(it.overlap_mode, it.overlap_mode)),
        *_control(it.control),
        ("steps", str(it.steps)),
        ("step over n tokens", costs),
        ("refused frames", str(it.refused_frames)),
        ("weights a pass reads", f"{it.weight_bytes / 1e6:.0f} MB"),
        ("KV at most", f"{it.kv_bytes / 1e6:.0f} MB"),
        (
            "median step",
            f"{times.rows} tokens, {times.forward_us / 1e3:.2f} ms forward, {times.waited_us / 1e3:.2f} ms held back, "
            f"{times.overhead_us / 1e3:.2f} ms else",
        ),
        ("tasks", str(it.tasks)),
    ]


def _control(it: Control) -> Rows:
    """What decides what is drafted: see docs/control.md."""
    return [
        ("way of working", f"{it.arm}: {printable(it.reason)}"),
        (
            "tokens a second",
            f"{it.tokens_per_s:.1f}; plain decoding {it.plain_tokens_per_s:.1f}, within {it.plain_error:.1%}",
        ),
        ("delay budget", f"{it.delay_budget_s * 1e3:.0f} ms"),
        *(
            (
                "compared",
                f"{one.arm} with {one.usual}: {one.ratio:.2f}"
                + (f" ({one.low:.2f} to {one.high:.2f})" if one.high else ""),
            )
            for one in it.comparisons
        ),
    ]


async def _drafter(channel: grpc.aio.Channel) -> Rows:
    from outrider.wire import drafter

    stub = drafter.DrafterStub(channel)
    it = await stub.Describe(drafter.DescribeRequest(), timeout=TIMEOUT_S)
    return [
        ("drafter", it.worker_id),
        *_model(it.model, it),
        ("sessions", f"{it.sessions} of {it.slots}"),
        ("levels", str(it.levels)),
        ("nodes sent", str(it.nodes)),
        *(("not drafting for", printable(refusal)) for refusal in it.refusals),
        ("refused frames", str(it.refused_frames)),
        ("tasks", str(it.tasks)),
    ]


async def _router(channel: grpc.aio.Channel, address: str, secured: bool) -> Rows:
    from outrider.client._connection import Access, resolve
    from outrider.wire import inference

    stub = inference.InferenceStub(channel)
    metadata = Access.of(resolve(address, tls=secured or None)).metadata
    models = (await stub.ListModels(inference.ListModelsRequest(), timeout=TIMEOUT_S, metadata=metadata)).models
    facts = [("router", f"of {len(models)} model{'' if len(models) == 1 else 's'}")]
    for it in models:
        facts += _model(it.name, it)
        facts.append(("served by", f"{it.verifiers} verifiers and {it.drafters} drafters"))
        facts += [("of no use", printable(misfit)) for misfit in it.misfits]
    return facts


def _model(name: str, it: _Model) -> Rows:
    """Return the properties that every description of a model has."""
    return [
        ("model", name),
        ("vocabulary", f"{it.vocabulary:,}"),
        ("context", f"{it.context:,} tokens"),
        ("tokenizer digest", it.tokenizer_digest.hex()),
    ]
