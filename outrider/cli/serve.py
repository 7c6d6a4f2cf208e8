"""`outrider router`, `outrider verifier`, `outrider drafter`: one server in this process."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from outrider.cli.parent import die_with_parent
from outrider.cli.redis import Redis
from outrider.cli.reporting import reported
from outrider.fleet import surroundings
from outrider.hub import hub_name
from outrider.rpc.lifecycle import run_until_signal
from outrider.telemetry import logs

if TYPE_CHECKING:
    from outrider.config import Section, ServerConfig


SectionT = TypeVar("SectionT", bound="Section")

Listen = Annotated[str | None, typer.Option(help="HOST:PORT; port 0 takes a free one.")]
Ca = Annotated[
    Path | None,
    typer.Option(envvar="OUTRIDER_CA", help="The CA whose certificates are believed. With it, TLS and nothing else."),
]
Cert = Annotated[Path | None, typer.Option(envvar="OUTRIDER_CERT", help="This server's certificate, for its role.")]
PrivateKey = Annotated[Path | None, typer.Option(envvar="OUTRIDER_KEY", help="The file with that one's private key.")]
Metrics = Annotated[
    str | None, typer.Option(envvar="OUTRIDER_METRICS", help="HOST:PORT of a page for Prometheus. [default: no page]")
]
LogFormat = Annotated[
    str | None, typer.Option(envvar="OUTRIDER_LOG_FORMAT", help="text, or json with trace ids. [default: text]")
]
Health = Annotated[
    str | None, typer.Option(help="HOST:PORT that tells the health in plaintext, for probes. [default: no such port]")
]
Checkpoint = Annotated[
    Path, typer.Option(help="Checkpoint in Hugging Face format: a folder, or ORG/NAME[@REVISION] on the hub.")
]
Zone = Annotated[str | None, typer.Option(help="Where it is: what is in one zone is near. [default: not said]")]
Name = Annotated[str | None, typer.Option(help="The model's name. [default: the checkpoint's]")]
Advertise = Annotated[str | None, typer.Option(help="HOST:PORT for others, if it is not the one listened on.")]
Backend = Annotated[
    str | None, typer.Option(help="native, transformers, or auto: native where it knows the family. [default: auto]")
]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16, or quantized: int8, int4. [default: bfloat16]")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N, which the model runs on. [default: cpu]")]
Numerics = Annotated[
    str | None, typer.Option(help="fast, or invariant: the same bits in every batch and tree. [default: fast]")
]
Threads = Annotated[int | None, typer.Option(help="Threads of the forward pass. [default: 1]")]
Slots = Annotated[int | None, typer.Option(help="Sessions at once. [default: 8]")]
KvMemory = Annotated[
    str | None, typer.Option(help="For the KV of all slots, as in 4GiB. [default: all that they can take]")
]
Context = Annotated[
    int | None, typer.Option("--context", help="Longest session, in tokens. [default: the checkpoint's]")
]
PrefillChunk = Annotated[int | None, typer.Option(help="Tokens of a prompt between two steps. [default: 128]")]
TensorParallel = Annotated[
    int | None, typer.Option(help="Ranks that share the model, each an actor on Ray. [default: 1]")
]
Spread = Annotated[bool | None, typer.Option("--spread/--no-spread", help="Ranks on many nodes. [default: on few]")]
Ray = Annotated[
    str | None, typer.Option(help="Ray cluster for the ranks: HOST:PORT or auto. [default: one of its own, here]")
]
Join = Annotated[
    float | None, typer.Option(help="Seconds that nodes get to join Ray's cluster before it is too small. [default: 3]")
]
Cpus = Annotated[float | None, typer.Option(help="CPUs of a rank, on Ray. [default: its threads]")]
Gpus = Annotated[float | None, typer.Option(help="GPUs of a rank, on Ray. [default: 0]")]
Resources = Annotated[
    list[str] | None,
    typer.Option("--resource", metavar="NAME=AMOUNT", help="Another resource of a rank, on Ray; may be repeated."),
]
Heartbeat = Annotated[float | None, typer.Option(help="Seconds between signs of life in Redis. [default: 1]")]
Store = Annotated[Path | None, typer.Option(help="A corpus made by `outrider index`, to look into without a model.")]
Drain = Annotated[float | None, typer.Option(help="Seconds that running calls get at the end. [default: 5]")]


def router(
    context: typer.Context,
    redis: Redis,
    models: Annotated[
        list[str], typer.Option("--model", help="NAME=FOLDER of its tokenizer, or NAME=ORG/NAME; may be repeated.")
    ],
    listen: Annotated[str | None, typer.Option(help="HOST:PORT. [default: 127.0.0.1:7070]")] = None,
    ca: Ca = None,
    cert: Cert = None,
    key: PrivateKey = None,
    metrics: Metrics = None,
    log_format: LogFormat = None,
    health: Health = None,
    zone: Zone = None,
    policy: Annotated[
        str | None, typer.Option(help="goodput, ema, heuristic, fixed, rounds or off. [default: goodput]")
    ] = None,
    depth: Annotated[int | None, typer.Option(help="Ceiling on gamma, 0 to 64. [default: 24]")] = None,
    width: Annotated[int | None, typer.Option(help="Most children of one node. [default: 4]")] = None,
    nodes: Annotated[int | None, typer.Option(help="Most nodes of a session in a step. [default: 24]")] = None,
    wait_us: Annotated[int | None, typer.Option(help="Longest hold of a step, µs. [default: 500000]")] = None,
    overlap: Annotated[
        bool | None, typer.Option(help="Draft on while a step runs. [default: as was measured best]")
    ] = None,
    drafters_per_session: Annotated[int | None, typer.Option(help="Of each tier, 0 to 16. [default: 1]")] = None,
    tiers: Annotated[
        str | None, typer.Option(help="all, or measured: leave out those that do not pay. [default: measured]")
    ] = None,
    standby: Annotated[bool | None, typer.Option(help="Keep each session's KV on a second verifier, too.")] = None,
    max_sessions: Annotated[int | None, typer.Option(help="Generations at once; more wait. [default: 256]")] = None,
    max_request_bytes: Annotated[
        int | None, typer.Option(help="Of one request, its prompt included. [default: 4194304]")
    ] = None,
    queue: Annotated[int | None, typer.Option(help="That may wait, of each priority. [default: 256]")] = None,
    queue_per_tenant: Annotated[int | None, typer.Option(help="Of these, one tenant's. [default: 64]")] = None,
    queue_s: Annotated[float | None, typer.Option(help="Seconds that one may wait. [default: 30]")] = None,
    tenant_sessions: Annotated[int | None, typer.Option(help="A tenant's at once. [default: no limit]")] = None,
    tenant_requests_per_s: Annotated[
        float | None, typer.Option(help="That a tenant may begin. [default: no limit]")
    ] = None,
    tenant_tokens_per_min: Annotated[
        int | None, typer.Option(help="Of a tenant's prompts and answers. [default: no limit]")
    ] = None,
    window: Annotated[int | None, typer.Option(help="Tokens beyond the durable position. [default: 64]")] = None,
    session_ttl_s: Annotated[int | None, typer.Option(help="Seconds sessions stay in Redis. [default: 3600]")] = None,
    lease_s: Annotated[float | None, typer.Option(help="Seconds an owner may be silent. [default: 10]")] = None,
    resume_ttl_s: Annotated[
        float | None, typer.Option(help="Seconds a broken-off generation can be resumed. [default: 60]")
    ] = None,
    teaches: Annotated[
        list[str] | None,
        typer.Option(metavar="TENANT", help="Drafters may learn from its texts; *: from all. May be repeated."),
    ] = None,
    auth: Annotated[str | None, typer.Option(help="off, or keys: callers need an API key. [default: off]")] = None,
    drain_s: Drain = None,
) -> None:
    """Serve clients: tokenize, place sessions, keep their state in Redis, steer speculation."""
    from outrider.config import RouterConfig

    config = _section(RouterConfig, context, models=model_folders(models))
    with _process("router", config, loads="tokenizers", checkpoints=config.models.values()) as announce:

        def service() -> Coroutine[Any, Any, None]:
            from router.service import run

            return run(config, redis, announce=announce)

        run_until_signal(_reachable_first(redis, service))


def verifier(
    context: typer.Context,
    redis: Redis,
    model: Checkpoint,
    name: Name = None,
    listen: Listen = None,
    zone: Zone = None,
    advertise: Advertise = None,
    ca: Ca = None,
    cert: Cert = None,
    key: PrivateKey = None,
    metrics: Metrics = None,
    log_format: LogFormat = None,
    health: Health = None,
    backend: Backend = None,
    dtype: Dtype = None,
    device: Device = None,
    numerics: Numerics = None,
    threads: Threads = None,
    slots: Slots = None,
    context_tokens: Context = None,
    kv_memory: KvMemory = None,
    prefill_chunk: PrefillChunk = None,
    tensor_parallel: TensorParallel = None,
    spread: Spread = None,
    ray: Ray = None,
    join_s: Join = None,
    cpus: Cpus = None,
    gpus: Gpus = None,
    resources: Resources = None,
    heartbeat_s: Heartbeat = None,
    drain_s: Drain = None,
    max_nodes: Annotated[int | None, typer.Option(help="Tree nodes in a step, all sessions. [default: 64]")] = None,
    lookup: Annotated[
        str | None, typer.Option(help="Draft without a model, too: prompt-lookup, suffix, retrieval or lookahead.")
    ] = None,
    store: Store = None,
    heads: Annotated[
        Path | None, typer.Option(help="Heads trained on the target: a folder, or ORG/NAME[@REVISION] on the hub.")
    ] = None,
    features: Annotated[
        Path | None, typer.Option(help="EAGLE heads of drafters, who then may have hidden states with each commit.")
    ] = None,
) -> None:
    """Hold the target model: verify token trees, commit what the target says."""
    from outrider.config import VerifierConfig

    config = _section(VerifierConfig, context)
    checkpoints = [folder for folder in (model, heads, features) if folder]
    with _process("verifier", config, loads=str(model), checkpoints=checkpoints) as announce:

        def service() -> Coroutine[Any, Any, None]:
            if config.tensor_parallel > 1:
                from outrider.fleet import ranks

                return ranks.run("verifier", config, redis, announce=announce)
            from verifier_svc.service import run

            return run(config, redis, announce=announce)

        run_until_signal(_reachable_first(redis, service))


def drafter(
    context: typer.Context,
    redis: Redis,
    model: Checkpoint,
    name: Name = None,
    listen: Listen = None,
    zone: Zone = None,
    advertise: Advertise = None,
    ca: Ca = None,
    cert: Cert = None,
    key: PrivateKey = None,
    metrics: Metrics = None,
    log_format: LogFormat = None,
    health: Health = None,
    backend: Backend = None,
    dtype: Dtype = None,
    layers: Annotated[int | None, typer.Option(help="Only the first so many layers. [default: all of them]")] = None,
    skip: Annotated[
        list[int] | None, typer.Option(help="A layer to leave out, counted from 0; may be repeated.")
    ] = None,
    device: Device = None,
    numerics: Numerics = None,
    threads: Threads = None,
    slots: Slots = None,
    context_tokens: Context = None,
    kv_memory: KvMemory = None,
    prefill_chunk: PrefillChunk = None,
    tensor_parallel: TensorParallel = None,
    spread: Spread = None,
    ray: Ray = None,
    join_s: Join = None,
    cpus: Cpus = None,
    gpus: Gpus = None,
    resources: Resources = None,
    heartbeat_s: Heartbeat = None,
    drain_s: Drain = None,
    heads: Annotated[
        Path | None, typer.Option(help="EAGLE heads on the model, which is then the target: it drafts with them.")
    ] = None,
    drafts: Annotated[
        str | None, typer.Option(help="By its model, or prompt-lookup, suffix or retrieval. [default: model]")
    ] = None,
    store: Store = None,
    target: Annotated[
        Path | None, typer.Option(help="The target's checkpoint, if it has another tokenizer than this model.")
    ] = None,
    any_target: Annotated[
        bool | None,
        typer.Option(help="Draft for targets that the model was not trained for, too. [default: for its card's alone]"),
    ] = None,
    learns: Annotated[
        bool | None, typer.Option(help="Take what `outrider train online` makes of its model, while it serves.")
    ] = None,
    level_nodes: Annotated[int | None, typer.Option(help="Nodes a session grows from at a time. [default: 8]")] = None,
    tree: Annotated[
        str | None,
        typer.Option(
            help="Trees: best-first, opt-tree, eagle-2, chain, k-ary or sequoia. Rules that hold p against q get "
            "chain, k-ary or sequoia. [default: best-first]"
        ),
    ] = None,
    via: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Tunnel to the upstream. [default: what that advertises]")
    ] = None,
    tier: Annotated[
        int | None, typer.Option(help="0 drafts for verifiers, others for a tier with a lower number. [default: 0]")
    ] = None,
    above: Annotated[int | None, typer.Option(help="The tier to draft for. [default: the next lower number]")] = None,
) -> None:
    """Run ahead of a target: grow token trees, stream them to the verifier, or to a tier of better drafters."""
    from outrider.config import DrafterConfig

    config = _section(DrafterConfig, context)
    checkpoints = [folder for folder in (model, target, heads) if folder]
    with _process("drafter", config, loads=str(model), checkpoints=checkpoints) as announce:

        def service() -> Coroutine[Any, Any, None]:
            if config.tensor_parallel > 1:
                from outrider.fleet import ranks

                return ranks.run("drafter", config, redis, announce=announce)
            from drafter_svc.service import run

            return run(config, redis, announce=announce)

        run_until_signal(_reachable_first(redis, service))


def model_folders(entries: list[str]) -> dict[str, str]:
    """Folders by model name from NAME=FOLDER. Raises BadParameter, which typer reports."""
    folders = dict(entry.partition("=")[::2] for entry in entries)
    if not all(name and folder for name, folder in folders.items()):
        raise typer.BadParameter("must be NAME=FOLDER, for example target=models/target", param_hint="--model")
    return folders


def _section(kind: type[SectionT], context: typer.Context, **values: Any) -> SectionT:
    """The configuration that the flags make; what was not given keeps its default."""
    from outrider.config import parse

    given = {name: value for name, value in context.params.items() if value is not None and name != "redis"}
    if "context_tokens" in given:
        given["context"] = given.pop("context_tokens")
    if "resources" in given:
        given["resources"] = dict(entry.partition("=")[::2] for entry in given["resources"])
    with reported():
        return parse(kind, given | values, "flags")


@contextmanager
def _process(
    role: str, config: ServerConfig, *, loads: str, checkpoints: Iterable[Path]
) -> Iterator[Callable[[str], None]]:
    """Sets this process up as a server; gives the function that says on stdout when and where it listens."""
    die_with_parent()
    surroundings.settle(getattr(config, "threads", 1))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logs.to_stderr(config.log_format)
    with ExitStack() as stack:
        if sys.stderr.isatty() and not any(map(hub_name, checkpoints)):  # a download shows a progress of its own
            from rich.console import Console

            stack.enter_context(Console(stderr=True).status(f"{role}: loading {loads} ..."))

        def announce(address: str) -> None:
            stack.close()
            gc.collect()
            gc.freeze()  # or a collection looks at all that was loaded, for a tenth of a second, while sessions wait
            print(f"outrider {role}: listening on {address}", flush=True)

        yield announce


async def _reachable_first(redis_url: str, service: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """The service, once there is a Redis: a server that nobody can find must not look well."""
    from outrider.store.client import connect, translated

    client = connect(redis_url)
    try:
        with translated(client):
            await client.ping()
    finally:
        await client.aclose()
    await service()
