"""`outrider router`, `outrider verifier`, `outrider drafter`: run one server in this process."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from outrider.cli.command import Redis, reported
from outrider.fleet import process_env
from outrider.hub import hub_name
from outrider.rpc.lifecycle import die_with_parent, fast_event_loop, run_until_signal
from outrider.telemetry import logs

if TYPE_CHECKING:
    from outrider.config import Section, ServerConfig


SectionT = TypeVar("SectionT", bound="Section")

Listen = Annotated[str | None, typer.Option(help="HOST:PORT to listen on; port 0 takes a free port.")]
Ca = Annotated[
    Path | None,
    typer.Option(envvar="OUTRIDER_CA", help="The CA whose certificates are trusted. With it, all connections use TLS."),
]
Cert = Annotated[
    Path | None, typer.Option(envvar="OUTRIDER_CERT", help="This server's certificate; it names the role.")
]
PrivateKey = Annotated[
    Path | None, typer.Option(envvar="OUTRIDER_KEY", help="File with the certificate's private key.")
]
Metrics = Annotated[
    str | None,
    typer.Option(envvar="OUTRIDER_METRICS", help="HOST:PORT of the metrics page for Prometheus. [default: no page]"),
]
LogFormat = Annotated[
    str | None, typer.Option(envvar="OUTRIDER_LOG_FORMAT", help="text, or json with trace ids. [default: text]")
]
Health = Annotated[
    str | None, typer.Option(help="HOST:PORT of the health service in plaintext, for probes. [default: no such port]")
]
Checkpoint = Annotated[
    Path, typer.Option(help="Checkpoint in Hugging Face format: a folder, or ORG/NAME[@REVISION] on the hub.")
]
Zone = Annotated[str | None, typer.Option(help="Zone of the server; servers in one zone are near. [default: no zone]")]
Name = Annotated[str | None, typer.Option(help="The model's name. [default: the checkpoint's]")]
Advertise = Annotated[str | None, typer.Option(help="HOST:PORT that others connect to, if it differs from --listen.")]
Backend = Annotated[
    str | None,
    typer.Option(help="native, transformers, or auto: native if it supports the model family. [default: auto]"),
]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16, or quantized: int8, int4. [default: bfloat16]")]
Device = Annotated[str | None, typer.Option(help="Device that runs the model: cpu, cuda or cuda:N. [default: cpu]")]
Numerics = Annotated[
    str | None, typer.Option(help="fast, or invariant: the same bits in every batch and tree. [default: fast]")
]
Threads = Annotated[int | None, typer.Option(help="Threads of the forward pass. [default: 1]")]
Slots = Annotated[int | None, typer.Option(help="Concurrent sessions. [default: 8]")]
KvMemory = Annotated[
    str | None, typer.Option(help="Memory for the KV of all slots, like 4GiB. [default: enough for all slots]")
]
Context = Annotated[
    int | None, typer.Option("--context", help="Longest session, in tokens. [default: the checkpoint's]")
]
PrefillChunk = Annotated[int | None, typer.Option(help="Prompt tokens that are read between two steps. [default: 128]")]
TensorParallel = Annotated[
    int | None, typer.Option(help="Ranks that share the model, each an actor on Ray. [default: 1]")
]
Spread = Annotated[
    bool | None, typer.Option("--spread/--no-spread", help="Place the ranks on many nodes. [default: on few]")
]
Ray = Annotated[
    str | None, typer.Option(help="Ray cluster for the ranks: HOST:PORT or auto. [default: start one on this machine]")
]
Join = Annotated[
    float | None,
    typer.Option(help="Seconds to wait for nodes to join the Ray cluster before it counts as too small. [default: 3]"),
]
Cpus = Annotated[float | None, typer.Option(help="CPUs of a rank, on Ray. [default: its threads]")]
Gpus = Annotated[float | None, typer.Option(help="GPUs of a rank, on Ray. [default: 0]")]
Resources = Annotated[
    list[str] | None,
    typer.Option("--resource", metavar="NAME=AMOUNT", help="Another resource of a rank, on Ray; may be repeated."),
]
Heartbeat = Annotated[float | None, typer.Option(help="Seconds between heartbeats in Redis. [default: 1]")]
Adapters = Annotated[Path | None, typer.Option(help="Folder below which there are LoRA adapters of the model.")]
MaxAdapters = Annotated[int | None, typer.Option(help="Adapters kept in memory beside those in use. [default: 16]")]
StorePublic = Annotated[
    bool | None,
    typer.Option(help="Everybody may see pieces of the store, also in drafts that were rejected."),
]
Store = Annotated[Path | None, typer.Option(help="Datastore made by `outrider index`, for retrieval without a model.")]
Drain = Annotated[float | None, typer.Option(help="Seconds that running calls get to end at shutdown. [default: 5]")]

# Fields whose flags may be repeated, and the form of each:
MAPPINGS = {"models": "NAME=FOLDER", "resources": "NAME=AMOUNT", "tool_formats": "MODEL=FORM"}


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
    wait_us: Annotated[int | None, typer.Option(help="Longest hold of a step, in µs. [default: 500000]")] = None,
    overlap: Annotated[
        bool | None, typer.Option(help="Draft while a step runs. [default: whatever measures fastest]")
    ] = None,
    drafters_per_session: Annotated[
        int | None, typer.Option(help="Drafters of each tier for a session, 0 to 16. [default: 1]")
    ] = None,
    tiers: Annotated[
        str | None, typer.Option(help="all, or measured: skip tiers that do not pay. [default: measured]")
    ] = None,
    standby: Annotated[bool | None, typer.Option(help="Keep each session's KV on a second verifier, too.")] = None,
    max_sessions: Annotated[
        int | None, typer.Option(help="Concurrent generations; further ones wait. [default: 256]")
    ] = None,
    max_request_bytes: Annotated[
        int | None, typer.Option(help="Largest request, with its prompt. [default: 4194304]")
    ] = None,
    max_calls: Annotated[
        int | None, typer.Option(help="Concurrent calls of all kinds. [default: room for all others]")
    ] = None,
    trust_traces: Annotated[
        bool | None, typer.Option(help="Let callers decide whether their requests are traced.")
    ] = None,
    max_connections: Annotated[int | None, typer.Option(help="Concurrent connections. [default: 4096]")] = None,
    queue: Annotated[int | None, typer.Option(help="Requests of each priority that may wait. [default: 256]")] = None,
    queue_per_tenant: Annotated[
        int | None, typer.Option(help="Requests of one tenant that may wait. [default: 64]")
    ] = None,
    queue_s: Annotated[float | None, typer.Option(help="Seconds that a request may wait. [default: 30]")] = None,
    tenant_sessions: Annotated[
        int | None, typer.Option(help="Concurrent generations of a tenant. [default: no limit]")
    ] = None,
    tenant_requests_per_s: Annotated[
        float | None, typer.Option(help="Requests per second of a tenant. [default: no limit]")
    ] = None,
    tenant_tokens_per_min: Annotated[
        int | None, typer.Option(help="Tokens per minute of a tenant's prompts and answers. [default: no limit]")
    ] = None,
    tenant_stored_sessions: Annotated[
        int | None, typer.Option(help="Sessions of a tenant in Redis. [default: no limit]")
    ] = None,
    tenant_stored_bytes: Annotated[
        str | None, typer.Option(help="Bytes of these, as in 2GiB. [default: half of Redis' maxmemory]")
    ] = None,
    address_requests_per_s: Annotated[
        float | None, typer.Option(help="Calls per second from one address. [default: no limit]")
    ] = None,
    template_s: Annotated[
        float | None, typer.Option(help="Processor seconds of the chat template for a request. [default: 0.2]")
    ] = None,
    tool_formats: Annotated[
        list[str] | None,
        typer.Option(
            "--tool-format",
            metavar="MODEL=FORM",
            help="How it writes calls: hermes, llama3, mistral or mistral11. May be repeated. [default: by template]",
        ),
    ] = None,
    window: Annotated[
        int | None, typer.Option(help="Tokens that may be committed beyond the durable position. [default: 64]")
    ] = None,
    session_ttl_s: Annotated[
        int | None, typer.Option(help="Seconds that sessions stay in Redis. [default: 3600]")
    ] = None,
    lease_s: Annotated[
        float | None, typer.Option(help="Seconds without a heartbeat until other routers take over. [default: 10]")
    ] = None,
    resume_ttl_s: Annotated[
        float | None, typer.Option(help="Seconds that a broken-off generation can be resumed. [default: 60]")
    ] = None,
    adapter_loaders: Annotated[
        list[str] | None,
        typer.Option(metavar="TENANT", help="This tenant may load and unload adapters; *: all. May be repeated."),
    ] = None,
    adapter_publishers: Annotated[
        list[str] | None,
        typer.Option(metavar="TENANT", help="All tenants may use this one's adapters; *: all of all. May be repeated."),
    ] = None,
    teaches: Annotated[
        list[str] | None,
        typer.Option(metavar="TENANT", help="Drafters may learn from this tenant's texts; *: all. May be repeated."),
    ] = None,
    auth: Annotated[str | None, typer.Option(help="off, or keys: callers need an API key. [default: off]")] = None,
    share_port: Annotated[
        bool | None, typer.Option(help="Let other routers listen on the same address, for a share of connections.")
    ] = None,
    drain_s: Drain = None,
) -> None:
    """Serve clients: tokenize, place sessions, keep their state in Redis, control speculation."""
    from outrider.config import RouterConfig

    config = section(RouterConfig, context)
    with _server_process("router", config, loads="tokenizers", checkpoints=config.models.values()) as announce:

        def service() -> Coroutine[Any, Any, None]:
            from router.server import run

            return run(config, redis, announce=announce)

        run_until_signal(_run_with_redis(redis, service), fast_event_loop)


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
    max_nodes: Annotated[
        int | None, typer.Option(help="Tree nodes in a step, over all sessions. [default: 64]")
    ] = None,
    adapters: Adapters = None,
    max_adapters: MaxAdapters = None,
    lookup: Annotated[
        str | None,
        typer.Option(help="Also draft without a model: prompt-lookup, suffix, retrieval or lookahead."),
    ] = None,
    store: Store = None,
    store_public: StorePublic = None,
    heads: Annotated[
        Path | None, typer.Option(help="Heads trained on the target: a folder, or ORG/NAME[@REVISION] on the hub.")
    ] = None,
    features: Annotated[
        Path | None, typer.Option(help="EAGLE heads of drafters; commits then carry hidden states for them.")
    ] = None,
    arm: Annotated[
        str | None,
        typer.Option(help='How drafters work, pinned: rest, turns, ahead or "turns 1/4". [default: measured]'),
    ] = None,
    trusted_drafters: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Rules that draw from q may have drafters with this name in their certificates. May be repeated. "
            "By default those without a name, which are called drafter.",
        ),
    ] = None,
) -> None:
    """Hold the target model: verify token trees and commit the tokens that the target chooses."""
    from outrider.config import VerifierConfig

    config = section(VerifierConfig, context)
    checkpoints = [folder for folder in (model, heads, features) if folder]
    with _server_process("verifier", config, loads=str(model), checkpoints=checkpoints) as announce:

        def service() -> Coroutine[Any, Any, None]:
            if config.tensor_parallel > 1:
                from outrider.fleet import ranks

                return ranks.run("verifier", config, redis, announce=announce)
            from verifier_svc.server import run

            return run(config, redis, announce=announce)

        run_until_signal(_run_with_redis(redis, service))


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
    layers: Annotated[int | None, typer.Option(help="Load only the first N layers. [default: all layers]")] = None,
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
    adapters: Adapters = None,
    max_adapters: MaxAdapters = None,
    heads: Annotated[
        Path | None, typer.Option(help="EAGLE heads to draft with; --model is then the target that they belong to.")
    ] = None,
    drafts: Annotated[
        str | None, typer.Option(help="Proposer: model, prompt-lookup, suffix or retrieval. [default: model]")
    ] = None,
    store: Store = None,
    store_public: StorePublic = None,
    target: Annotated[
        Path | None, typer.Option(help="The target's checkpoint, if its tokenizer differs from this model's.")
    ] = None,
    any_target: Annotated[
        bool | None,
        typer.Option(help="Also draft for targets that the model was not trained for. [default: its card's target]"),
    ] = None,
    learns: Annotated[
        bool | None, typer.Option(help="Load new versions from `outrider train online` while serving.")
    ] = None,
    level_nodes: Annotated[
        int | None, typer.Option(help="Nodes of a session that are expanded at once. [default: 8]")
    ] = None,
    tree: Annotated[
        str | None,
        typer.Option(
            help="Trees: best-first, opt-tree, eagle-2, chain, k-ary or sequoia. Rules that compare p with q need "
            "chain, k-ary or sequoia. [default: best-first]"
        ),
    ] = None,
    via: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Tunnel to the upstream. [default: the address that it advertises]"),
    ] = None,
    tier: Annotated[
        int | None,
        typer.Option(help="0 drafts for verifiers, higher tiers for a tier with a lower number. [default: 0]"),
    ] = None,
    above: Annotated[int | None, typer.Option(help="The tier to draft for. [default: the next lower number]")] = None,
) -> None:
    """Draft ahead of a target: grow token trees and stream them to a verifier, or to a tier of better drafters."""
    from outrider.config import DrafterConfig

    config = section(DrafterConfig, context)
    checkpoints = [folder for folder in (model, target, heads) if folder]
    with _server_process("drafter", config, loads=str(model), checkpoints=checkpoints) as announce:

        def service() -> Coroutine[Any, Any, None]:
            if config.tensor_parallel > 1:
                from outrider.fleet import ranks

                return ranks.run("drafter", config, redis, announce=announce)
            from drafter_svc.server import run

            return run(config, redis, announce=announce)

        run_until_signal(_run_with_redis(redis, service))


def section(kind: type[SectionT], context: typer.Context) -> SectionT:
    """Return the configuration from the flags; flags that are not given keep their defaults.

    Raises BadParameter, which typer reports.
    """
    from outrider.config import parse

    given = {name: value for name, value in context.params.items() if value not in (None, [], ()) and name != "redis"}
    if "context_tokens" in given:
        given["context"] = given.pop("context_tokens")
    for field, form in MAPPINGS.items():
        if field in given:
            given[field] = _mapping(given[field], f"--{field.replace('_', '-').removesuffix('s')}", form)
    with reported():
        return parse(kind, given, "flags")


def _mapping(entries: list[str], flag: str, form: str) -> dict[str, str]:
    values = dict(entry.partition("=")[::2] for entry in entries)
    if not all(name and value for name, value in values.items()):
        raise typer.BadParameter(f"must be {form}", param_hint=flag)
    return values


@contextmanager
def _server_process(
    role: str, config: ServerConfig, *, loads: str, checkpoints: Iterable[Path]
) -> Iterator[Callable[[str], None]]:
    """Set this process up as a server. Yields a function that prints the address on stdout once the server listens."""
    die_with_parent()
    process_env.set_variables(getattr(config, "threads", 1))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logs.log_to_stderr(config.log_format)
    with ExitStack() as stack:
        if sys.stderr.isatty() and not any(map(hub_name, checkpoints)):  # a download shows its own progress
            from rich.console import Console

            stack.enter_context(Console(stderr=True).status(f"{role}: loading {loads} ..."))

        def announce(address: str) -> None:
            stack.close()
            gc.collect()
            gc.freeze()  # otherwise collections traverse all loaded objects, for 0.1 s, while sessions wait
            print(f"outrider {role}: listening on {address}", flush=True)

        yield announce


async def _run_with_redis(redis_url: str, service: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Check that Redis can be reached, then run the service.

    A server without Redis cannot be found by others, so it must fail instead of reporting that it is ready.
    """
    from outrider.store.client import connect, redis_errors

    client = connect(redis_url)
    try:
        with redis_errors(client):
            await client.ping()
    finally:
        await client.aclose()
    await service()
