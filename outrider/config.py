"""The configuration of all servers: parsed once, frozen, unknown keys refused. Files, flags and code make it alike."""

from __future__ import annotations

import tomllib
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import ErrorDetails

from outrider.errors import ConfigError
from outrider.hub import Backend, gguf_stem, hub_name, is_gguf


def _address(value: str) -> str:
    host, colon, port = value.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ValueError("must be HOST:PORT, for example 127.0.0.1:7070 (port 0 takes a free one)")
    return value


def _as_list(value: Any) -> Any:
    """Return a list of the sections under one name, also where there is only one."""
    return [value] if isinstance(value, dict | BaseModel) else value


TreeName = Literal["best-first", "opt-tree", "eagle-2", "chain", "k-ary", "sequoia"]  # see outrider.core.construction
ARM = r"^(measured|rest|(turns|ahead)( 1/[1-9]\d{0,2})?)$"  # see docs/control.md, "Ways of working"
LookupMethod = Literal["prompt-lookup", "suffix", "retrieval"]  # see outrider.core.proposers.lookup
ToolFormatName = Literal["hermes", "llama3", "mistral", "mistral11"]  # see outrider.core.answers.formats
# auto: as a GGUF file has them, else bfloat16. float8: on GPUs alone
WeightType = Literal["auto", "float32", "bfloat16", "float8", "int8", "int4"]
KvType = Literal["auto", "int8"]  # auto: float32 for weights in float32, else bfloat16
CHECKPOINTS = ("model", "models", "heads", "features", "target")  # keys whose paths may also be names on the hub
SectionT = TypeVar("SectionT", bound="Section")
ServerT = TypeVar("ServerT", bound="ServerConfig")
DrafterName = Annotated[str, Field(pattern=r"^[a-z0-9-]{1,63}$")]  # as in its certificate
DrafterNames = Annotated[tuple[DrafterName, ...], Field(min_length=1)]
Address = Annotated[str, AfterValidator(_address), WithJsonSchema({"type": "string", "format": "HOST:PORT"})]


REMOVED = {  # removed keys, with what to do instead
    "pad_stream_s": "is no longer there; a proxy that buffers answers can hide their pace instead"
}


class Section(BaseModel):
    """Base of all sections: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class RedisConfig(Section):
    """Redis, which keeps the state of sessions."""

    url: str | None = None  # None: the variable REDIS_URL, else an embedded server
    data: Path | None = None  # the embedded server's directory; None: a temporary one, removed at the end


class RayResources(Section):
    """The resources of a Ray cluster that a server reserves; where it has several ranks, each rank reserves them."""

    cpus: float | None = Field(default=None, ge=0)  # CPUs of a server, or of each rank; None: as many as its threads
    gpus: float = Field(default=0.0, ge=0)  # GPUs of a server, or of each rank; 0: one, if its `device` is a GPU
    resources: dict[str, Annotated[float, Field(gt=0)]] = {}  # other resources, by the names that nodes have for them


class TlsConfig(Section):
    """Certificates for all servers of a cluster. `{role}` in a path stands for router, verifier, drafter or gateway."""

    ca: Path  # certificate of the authority that signs those of all servers
    cert: Path  # certificate of a server, which must have the name of its role
    key: Path  # private key of `cert`


class ServerConfig(RayResources):
    """The keys of all servers. With `ca`, `cert` and `key`, in PEM, a server accepts TLS only."""

    ca: Path | None = None  # certificate of the authority that must have signed those of other servers
    cert: Path | None = None  # certificate of this server, which must have the name of its role
    key: Path | None = None  # private key of `cert`
    log_format: Literal["text", "json"] = "text"  # of the log on stderr; json: one object a line
    metrics: Address | None = None  # address of a page for Prometheus, in plain HTTP; None: no page


class GrpcConfig(ServerConfig):
    """The keys of all gRPC servers."""

    health: Address | None = None  # health service alone, in plaintext, for probes without a certificate


class RouterConfig(GrpcConfig):
    """One router."""

    listen: Address = "127.0.0.1:7070"  # for clients; port 0 takes a free one
    zone: str = ""  # zone of the router: verifiers of the same zone are near
    models: dict[str, Path] = Field(min_length=1)  # checkpoints by model name; a tokenizer.json or GGUF file is enough
    policy: Literal["goodput", "ema", "heuristic", "fixed", "rounds", "off"] = "goodput"  # policy that chooses gamma
    depth: int = Field(default=24, ge=0, le=64)  # ceiling on gamma
    width: int = Field(default=4, ge=1, le=64)  # maximum of children of one node
    nodes: int = Field(default=24, ge=0, le=1024)  # ceiling on the nodes of one session in a step
    wait_us: int = Field(default=500_000, ge=0, le=10_000_000)  # the longest time that a step waits for drafts
    overlap: bool | None = None  # draft while a step runs; None: where measurements show that this is faster
    drafters_per_session: int = Field(default=1, ge=0, le=16)  # drafters of each tier for one session
    tiers: Literal["measured", "all"] = "measured"  # measured: leave out a tier without which a session is faster
    standby: bool = False  # a second verifier keeps the KV of each session, in case the first one dies
    max_sessions: int = Field(default=256, ge=1)  # generations at the same time; further ones wait
    max_request_bytes: int = Field(default=2**22, ge=1, le=2**24)  # size of one request, its prompt included
    max_calls: int | None = Field(default=None, ge=1)  # calls at the same time, of all kinds; None: room for all others
    max_connections: int = Field(default=4096, ge=1)  # connections at the same time; further ones are closed
    queue: int = Field(default=256, ge=0)  # requests of each priority that may wait for capacity
    queue_per_tenant: int = Field(default=64, ge=0)  # requests of one tenant among those of `queue`
    queue_s: float = Field(default=30.0, gt=0)  # the longest time that a request waits
    tenant_sessions: int | None = Field(default=None, ge=1)  # generations of a tenant at the same time; None: no limit
    tenant_requests_per_s: float | None = Field(default=None, gt=0)  # requests of a tenant; None: no limit
    tenant_tokens_per_min: int | None = Field(default=None, ge=1)  # of prompts and answers; None: no limit
    tenant_stored_sessions: int | None = Field(default=None, ge=1)  # sessions of a tenant in Redis; None: no limit
    tenant_stored_bytes: ByteSize | None = None  # bytes of these; None: half of Redis' maxmemory, if it has one
    address_requests_per_s: float | None = Field(default=None, gt=0)  # calls from one address; None: no limit
    template_s: float = Field(default=0.2, gt=0, le=4)  # processor time of a chat template for one request
    tool_formats: dict[str, ToolFormatName] = {}  # how models write calls of tools; left out: as templates show
    window: int = Field(default=64, ge=1)  # W: tokens that may be committed beyond the durable position
    session_ttl_s: int = Field(default=3600, ge=1)  # how long Redis keeps a session after its last change
    failover_wait_s: float = Field(default=600.0, ge=0)  # how long an answer that has begun waits for a verifier
    lease_s: float = Field(default=10.0, ge=0.5)  # a router that is silent for this time loses its sessions to others
    resume_ttl_s: float = Field(default=60.0, ge=0)  # how long a client can resume a broken-off generation
    adapter_loaders: tuple[str, ...] = ()  # tenants that may load and unload adapters; *: all
    adapter_publishers: tuple[str, ...] = ()  # loaders whose adapters are for all tenants; *: those of all loaders
    teaches: tuple[str, ...] = ()  # tenants whose texts drafters may learn from; *: all (with auth off there is one)
    trust_traces: bool = False  # callers decide whether their requests are traced, in their own traces
    auth: Literal["off", "keys"] = "off"  # keys: clients need an API key, which names a tenant; off: one tenant
    drain_s: float = Field(default=5.0, ge=0)  # time that running calls have to end after a SIGTERM
    share_port: bool = False  # let other routers listen on the same address: each takes a share of the connections
    count: int = Field(default=1, ge=1, le=64)  # number of such routers on one address, in a cluster's file

    @property
    def calls(self) -> int:
        """Limit on the calls at the same time. Running and queued generations, answers that are read again, and as many
        watchers fit into the default."""
        return self.max_calls or 4 * (self.max_sessions + 2 * self.queue) + 1024


class WorkerConfig(GrpcConfig):
    """The keys of verifiers and drafters."""

    model: Path  # checkpoint: a folder, a .gguf file, or ORG/NAME[@REVISION][:FILE.gguf] on the hub
    name: str | None = None  # name of the model; None: the folder's name, or NAME
    listen: Address = "127.0.0.1:0"  # for routers and drafters; port 0 takes a free one
    zone: str = ""  # zone of the worker: servers of one zone are near one another
    advertise: str | None = None  # address at which other servers reach this worker; None: that of `listen`
    backend: Backend = "auto"  # auto: native for families that it knows, else llama.cpp, where installed, for .gguf
    # Device that the model runs on; gpu: any that llama.cpp was built for, as Metal and Vulkan.
    device: str = Field(default="cpu", pattern=r"^(cpu|gpu|cuda(:\d+)?)$")
    numerics: Literal["fast", "invariant"] = "fast"  # invariant: a token's logits are the same bits in every pass
    threads: int = Field(default=1, ge=1)  # threads of a forward pass, in each rank
    slots: int = Field(default=8, ge=1)  # sessions at the same time
    context: int | None = Field(default=None, ge=2)  # longest session, in tokens; None: the checkpoint's
    kv_memory: ByteSize | None = None  # for the model's KV of all slots together, as in 4GiB; None: what they can take
    kv_dtype: KvType = "auto"  # of keys and values; int8: half the memory, for the compiled kernels alone
    adapters: Path | None = None  # folder below which there are LoRA adapters of the model; None: there are none
    max_adapters: int = Field(default=16, ge=1, le=1024)  # adapters that are kept in memory beside those in use
    store_public: bool = False  # everybody may see pieces of `store`, also those that were drafted and not accepted
    prefill_chunk: int = Field(default=128, ge=2)  # tokens of a prompt that are read between two steps
    tensor_parallel: int = Field(default=1, ge=1, le=64)  # ranks that share the model, each one an actor on Ray
    spread: bool = False  # place ranks on as many nodes as possible, instead of as few as possible
    ray: str | None = None  # address of the ranks' Ray cluster, or "auto"; None: a new one on this machine
    join_s: float = Field(default=3.0, ge=0)  # for nodes to join the cluster before it counts as too small
    heartbeat_s: float = Field(default=1.0, gt=0)  # between announcements in Redis; each is valid for three of these
    drain_s: float = Field(default=5.0, ge=0)  # time that running calls have to end after a SIGTERM

    @property
    def model_name(self) -> str:
        """The model name in requests."""
        if self.name:
            return self.name
        on_hub = hub_name(self.model)
        if on_hub:
            return on_hub.name
        return gguf_stem(self.model) if is_gguf(self.model) else self.model.resolve().name


class VerifierConfig(WorkerConfig):
    """One verifier."""

    dtype: WeightType = "auto"  # another type is another target; auto: bfloat16, or as a checkpoint is quantized
    max_nodes: int = Field(default=64, ge=0, le=256)  # tree nodes of all sessions in one step
    lookup: Literal[LookupMethod, "lookahead"] | None = None  # drafts in the verifier itself
    store: Path | None = None  # corpus for `lookup`, made by `outrider index`
    heads: Path | None = None  # heads trained on the target, which draft from its hidden states
    features: Path | None = None  # EAGLE heads whose drafters receive the target's fused hidden states
    arm: str = Field(default="measured", pattern=ARM)  # how drafters work: measured, or pinned as in `turns 1/4`
    trusted_drafters: DrafterNames = ("drafter",)  # names that may decide texts where a rule draws from q


class DrafterConfig(WorkerConfig):
    """One drafter. Its model may be the target's checkpoint, made cheaper by `dtype`, `layers` or `skip`."""

    dtype: WeightType = "auto"  # of fewer bits: quantized while loading; auto: as a verifier's
    layers: int | None = Field(default=None, ge=1)  # run the first layers alone (early exit); None: all
    skip: tuple[Annotated[int, Field(ge=0)], ...] = ()  # indices of layers to leave out (layer skip)
    heads: Path | None = None  # EAGLE heads on `model`, the target, of which only embedding and head are loaded
    drafts: Literal["model", LookupMethod] = "model"  # by the model, or by lookup in text
    store: Path | None = None  # corpus made by `outrider index`, for drafting without a model
    target: Path | None = None  # target with another tokenizer: its checkpoint; drafts are translated by text
    any_target: bool = False  # draft also for other targets than the one that the model card names
    learns: bool = False  # while serving, load the versions of its model that `outrider train online` publishes
    level_nodes: int = Field(default=8, ge=1, le=256)  # nodes of a session that one level expands
    tree: TreeName = "best-first"  # construction of the trees
    connect: Address | None = None  # a router to dial, for a drafter that others cannot reach
    candidates: tuple[Path, ...] = ()  # with connect: more checkpoints like model; the one that suits best is taken
    via: Address | None = None  # address of a tunnel to its upstream, if it does not use the advertised one
    count: int = Field(default=1, ge=0, le=256)  # number of such drafters, in a cluster's file
    tier: int = Field(default=0, ge=0, le=15)  # 0 drafts for verifiers, another tier for one with a lower number
    above: int | None = Field(default=None, ge=0)  # tier that it drafts for; None: the next lower number

    @property
    def upstream_tier(self) -> int | None:
        """The tier that this drafter drafts for; None: the verifiers."""
        return None if not self.tier else self.tier - 1 if self.above is None else self.above

    @property
    def serves(self) -> bool:
        """Whether a tier can draft for this drafter, which needs a complete model to score the tokens of that tier."""
        return self.drafts == "model" and self.target is None and self.heads is None

    @model_validator(mode="after")
    def _check_tier_order(self) -> Self:
        if self.above is not None and self.above >= self.tier:
            raise ValueError(
                f"tier {self.tier} cannot draft for tier {self.above}: a tier drafts for one with a lower number, "
                "so that tiers form no cycle"
            )
        return self


class GatewayConfig(ServerConfig):
    """OpenAI's HTTP interface in front of a router. `ca` must have signed the router's certificate; with `cert` and
    `key` the gateway itself accepts HTTPS only."""

    listen: Address = "127.0.0.1:8000"  # for HTTP
    router: str = "127.0.0.1:7070"  # as the SDK takes it; in a cluster's file: the cluster's router
    tls: bool | None = None  # use TLS to the router; None: if `ca` is set
    server_name: str = ""  # name that the router's certificate must have; empty: that of its address
    max_request_bytes: int = Field(default=2**22, ge=1, le=2**26)  # size of one request's body
    max_total_bytes: int = Field(default=2**24, ge=1)  # of all requests, times their `n`; half for a tenant alone
    max_requests: int = Field(default=1024, ge=1)  # requests at the same time; further ones are refused
    max_connections: int = Field(default=4096, ge=1)  # connections at the same time; further ones are closed
    body_s: float = Field(default=30.0, gt=0)  # time that a request's body may take to arrive
    timeout_s: float = Field(default=600.0, gt=0)  # time that one request may take
    trust_traces: bool = False  # callers decide whether their requests are traced, in their own traces
    keep_alive_s: float = Field(default=15.0, gt=0)  # seconds between signs of life of a stream that waits
    serve_metrics: bool = False  # `listen` has the page for Prometheus, too, at /metrics, for accepted keys
    cors_origins: tuple[str, ...] = ()  # origins whose pages may call it from a browser; "*": all
    drain_s: float = Field(default=30.0, ge=0)  # time that answers have to end after a signal

    @model_validator(mode="after")
    def _check_cert_and_key(self) -> Self:
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key go together; `outrider certs` makes both")
        return self


class ClusterConfig(Section):
    """A whole cluster, as `outrider up` starts it on one machine or on Ray."""

    redis: RedisConfig = RedisConfig()  # Redis, which keeps sessions
    tls: TlsConfig | None = None  # certificates of all servers; None: no TLS
    router: RouterConfig  # the router
    verifier: Annotated[list[VerifierConfig], BeforeValidator(_as_list), Field(min_length=1)]  # one section each
    drafter: Annotated[list[DrafterConfig], BeforeValidator(_as_list)] = []  # those of tier 0, one section each
    tier: dict[int, Annotated[list[DrafterConfig], BeforeValidator(_as_list)]] = {}  # further drafters, by their tier
    gateway: GatewayConfig | None = None  # OpenAI's interface; None: no gateway

    @property
    def routers(self) -> list[RouterConfig]:
        """The routers, as many sections. Several share the first one's address; the pages of the others have the next
        ports."""
        router = self.with_certificate("router", self.router)
        if router.count == 1:
            return [router]
        shared = router.model_copy(update={"count": 1, "share_port": True})
        return [
            shared.model_copy(
                update={"metrics": _next_port(shared.metrics, at), "health": _next_port(shared.health, at)}
            )
            for at in range(router.count)
        ]

    @property
    def drafters(self) -> list[DrafterConfig]:
        """All drafters of all tiers, as many sections as drafters."""
        tiers = (worker.model_copy(update={"tier": tier}) for tier, some in self.tier.items() for worker in some)
        sections = [self.with_certificate("drafter", section) for section in (*self.drafter, *tiers)]
        return [section.model_copy(update={"count": 1}) for section in sections for _ in range(section.count)]

    def with_certificate(self, role: str, section: ServerT) -> ServerT:
        """Return a server's section with the certificate of `[tls]`, unless the section names one."""
        if self.tls is None or section.cert is not None:
            return section
        return section.model_copy(
            update={name: Path(str(path).replace("{role}", role)) for name, path in iter(self.tls)}
        )

    @model_validator(mode="before")
    @classmethod
    def _set_tiers(cls, values: Any) -> Any:
        """Set the tier of each section from its name."""
        for tier, some in dict(values.get("tier") or {}).items() if isinstance(values, dict) else ():
            for worker in _as_list(some):
                if isinstance(worker, dict) and str(worker.setdefault("tier", tier)) != str(tier):
                    raise ValueError(f"tier.{tier}.tier: is {worker['tier']}, and the section's name gives {tier}")
        return values

    @model_validator(mode="after")
    def _name_verifiers(self) -> Self:
        """Have a verifier without a name serve its checkpoint under the name that the router knows it by."""
        names = {path: name for name, path in self.router.models.items()}
        self.verifier[:] = [
            worker.model_copy(update={"name": names[worker.model]})
            if worker.model_name not in self.router.models and worker.model in names and not worker.name
            else worker
            for worker in self.verifier
        ]
        return self

    @model_validator(mode="after")
    def _check_upstream_tiers(self) -> Self:
        for worker in self.drafters:
            upper = worker.upstream_tier
            above = [other for other in self.drafters if other.tier == upper]
            if upper is not None and not above:
                raise ValueError(f"tier {worker.tier} drafts for tier {upper}, and there is none")
            if above and not any(other.serves for other in above):
                raise ValueError(
                    f"tier {worker.tier} drafts for tier {upper}, which cannot judge what it is sent: "
                    "that takes a model with the target's tokenizer, and no heads"
                )
        return self


def _next_port(address: Address | None, by: int) -> Address | None:
    """Return an address with a port that is higher by `by`; port 0 takes a free one anyway."""
    if address is None:
        return None
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + by}" if int(port) else address


def parse(kind: type[SectionT], values: dict[str, Any], source: str) -> SectionT:
    """Return a checked section. Raises ConfigError with one line for each wrong key: where, what, what is allowed."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        lines = [
            ": ".join((source, *filter(None, [".".join(map(str, entry["loc"]))]), _problem(kind, entry)))
            for entry in error.errors()
        ]
        raise ConfigError("\n".join(lines)) from None


def _problem(kind: type[Section], error: ErrorDetails) -> str:
    """Return what is wrong with a key of a section, and what to do."""
    *above, key = error["loc"] or ("",)
    if error["type"] == "model_type":
        return f"must be one section: write [{key}], with one pair of brackets"
    if error["type"] != "extra_forbidden":
        return error["msg"].removeprefix("Value error, ")
    for name in above:
        field = kind.model_fields.get(str(name))
        kind = (_section_of(field.annotation) if field else None) or kind
    meant = get_close_matches(str(key), kind.model_fields, n=1)
    return REMOVED.get(str(key), "unknown key" + (f"; is {meant[0]} meant?" if meant else ""))


def _section_of(annotation: Any) -> type[Section] | None:
    """Return the kind of section that a field holds, as it is, in a list or by name."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next(filter(None, map(_section_of, get_args(annotation))), None)


def load_section(kind: type[SectionT], path: Path) -> SectionT:
    """Read a TOML file that is one section. Raises ConfigError."""
    return parse(kind, read_toml(path), str(path))


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file. Raises ConfigError."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def load_cluster(path: Path) -> ClusterConfig:
    """Read a cluster's TOML file. Raises ConfigError.

    Relative paths start from the file's folder. A checkpoint is on the hub where no such path exists and its name looks
    like ORG/NAME, or ORG/NAME:FILE.gguf.
    """
    cluster: ClusterConfig = _absolute(path.resolve().parent, load_section(ClusterConfig, path))
    return cluster


def _absolute(base: Path, value: Any, key: str = "") -> Any:
    """Return a section, or the value of a key, with paths that start from `base`."""
    match value:
        case Path():
            return _checkpoint(base, value) if key in CHECKPOINTS else base / value
        case Section():
            return value.model_copy(update={name: _absolute(base, part, name) for name, part in iter(value)})
        case list():
            return [_absolute(base, part, key) for part in value]
        case dict():
            return {name: _absolute(base, part, key) for name, part in value.items()}
    return value


def _checkpoint(base: Path, given: Path) -> Path:
    """Return a folder's path, which starts from `base`, or an unchanged name on the hub."""
    return given if hub_name(given, base) else base / given
