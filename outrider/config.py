"""Configuration: parsed once, frozen, unknown keys refused. Files, flags and code all make these objects."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

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

from outrider.errors import ConfigError
from outrider.hub import hub_name


def _address(value: str) -> str:
    host, colon, port = value.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ValueError("must be HOST:PORT, for example 127.0.0.1:7070 (port 0 takes a free one)")
    return value


def _listed(value: Any) -> Any:
    """One section, or several under one name."""
    return [value] if isinstance(value, dict | BaseModel) else value


TreeName = Literal["best-first", "opt-tree", "eagle-2", "chain", "k-ary", "sequoia"]  # see outrider.core.construction
SectionT = TypeVar("SectionT", bound="Section")
ServerT = TypeVar("ServerT", bound="ServerConfig")
Address = Annotated[str, AfterValidator(_address), WithJsonSchema({"type": "string", "format": "HOST:PORT"})]


class Section(BaseModel):
    """Base of every section: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class RedisConfig(Section):
    """Where session state lives."""

    url: str | None = None  # None: REDIS_URL, else an embedded server
    data: Path | None = None  # the embedded server's directory; None: a private one, removed at the end


class Placed(Section):
    """What a server takes of a Ray cluster's resources; a rank each, where it has several."""

    cpus: float | None = Field(default=None, ge=0)  # of a server, or of each rank; None: its threads
    gpus: float = Field(default=0.0, ge=0)  # the same; 0: one, if its `device` is a GPU
    resources: dict[str, Annotated[float, Field(gt=0)]] = {}  # others, by the names that the nodes were started with


class TlsConfig(Section):
    """Certificates for all servers of a cluster. `{role}` in a path stands for router, verifier, drafter or gateway."""

    ca: Path  # whose certificates are believed
    cert: Path  # a server's own, which must have the name of its role
    key: Path  # the private key of that


class ServerConfig(Placed):
    """What all servers share. With `ca`, `cert` and `key`, in PEM, a server speaks TLS only."""

    ca: Path | None = None  # whose certificates it believes
    cert: Path | None = None  # its own, which must have the name of its role
    key: Path | None = None  # the private key of that
    log_format: Literal["text", "json"] = "text"  # of what it writes on stderr; json: an object each line


class GrpcConfig(ServerConfig):
    """What servers of gRPC share."""

    metrics: Address | None = None  # of a page for Prometheus, in plain HTTP; None: there is none
    health: Address | None = None  # where health alone is told, in plaintext: for probes, which have no certificate


class RouterConfig(GrpcConfig):
    """One router."""

    listen: Address = "127.0.0.1:7070"  # for clients; port 0 takes a free one
    zone: str = ""  # where it is: verifiers of the same zone are near
    models: dict[str, Path] = Field(min_length=1)  # model name -> checkpoint; its tokenizer.json is enough
    policy: Literal["goodput", "ema", "heuristic", "fixed", "rounds", "off"] = "goodput"  # how gamma is chosen
    depth: int = Field(default=24, ge=0, le=64)  # ceiling on gamma
    width: int = Field(default=4, ge=1, le=64)  # most children of one node
    nodes: int = Field(default=24, ge=0, le=1024)  # ceiling on one session's nodes in a step
    wait_us: int = Field(default=500_000, ge=0, le=10_000_000)  # the longest that a step is held back for drafts
    overlap: bool | None = None  # draft on while a step runs; None: if that was measured to be faster
    drafters_per_session: int = Field(default=1, ge=0, le=16)  # of each tier
    tiers: Literal["measured", "all"] = "measured"  # measured: a tier without which it goes faster is left out
    standby: bool = False  # a second verifier keeps each session's KV, for when the first one dies
    max_sessions: int = Field(default=256, ge=1)  # generations at once; more wait
    max_request_bytes: int = Field(default=2**22, ge=1, le=2**24)  # of one request, its prompt included
    queue: int = Field(default=256, ge=0)  # that may wait for a place, of each priority
    queue_per_tenant: int = Field(default=64, ge=0)  # of these, one tenant's
    queue_s: float = Field(default=30.0, gt=0)  # the longest that one waits
    tenant_sessions: int | None = Field(default=None, ge=1)  # of a tenant at once; None: no limit
    tenant_requests_per_s: float | None = Field(default=None, gt=0)  # that a tenant may begin; None: no limit
    tenant_tokens_per_min: int | None = Field(default=None, ge=1)  # of its prompts and answers; None: no limit
    window: int = Field(default=64, ge=1)  # W: tokens that may be committed beyond the durable position
    session_ttl_s: int = Field(default=3600, ge=1)  # how long Redis keeps a session after its last change
    lease_s: float = Field(default=10.0, ge=0.5)  # an owner that is silent for so long counts as dead
    resume_ttl_s: float = Field(default=60.0, ge=0)  # how long a generation that was broken off can be resumed
    teaches: tuple[str, ...] = ()  # tenants whose texts drafters may learn from; *: all (with auth off there is one)
    auth: Literal["off", "keys"] = "off"  # keys: callers need an API key, which names their tenant; off: all are one
    drain_s: float = Field(default=5.0, ge=0)  # what running calls get at a SIGTERM


class WorkerConfig(GrpcConfig):
    """What verifiers and drafters share."""

    model: Path  # checkpoint in Hugging Face format: a folder, or ORG/NAME[@REVISION] on the hub
    name: str | None = None  # the model's name; None: the folder's, or NAME
    listen: Address = "127.0.0.1:0"  # for routers and drafters; port 0 takes a free one
    zone: str = ""  # where it is: what is in one zone is near
    advertise: str | None = None  # address that others reach this worker at; None: the listening one
    backend: Literal["auto", "native", "transformers"] = "auto"  # what runs it; auto: native where it knows the family
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d+)?)$")  # what the model runs on
    numerics: Literal["fast", "invariant"] = "fast"  # invariant: the same bits however a token was computed
    threads: int = Field(default=1, ge=1)  # of a forward pass, in each rank
    slots: int = Field(default=8, ge=1)  # sessions at once
    context: int | None = Field(default=None, ge=2)  # longest session, in tokens; None: the checkpoint's
    kv_memory: ByteSize | None = None  # for the KV of all slots together, as in 4GiB; None: all that they can take
    prefill_chunk: int = Field(default=128, ge=2)  # tokens of a prompt between two steps
    tensor_parallel: int = Field(default=1, ge=1, le=64)  # ranks that share the model, each an actor on Ray
    spread: bool = False  # ranks on as many nodes as there are, not on as few as will do
    ray: str | None = None  # address of a Ray cluster for the ranks, or "auto"; None: one of its own on this machine
    join_s: float = Field(default=3.0, ge=0)  # that nodes of that cluster get to join before it is too small for them
    heartbeat_s: float = Field(default=1.0, gt=0)  # between its announcements in Redis; listed for three of them
    drain_s: float = Field(default=5.0, ge=0)  # what running calls get at a SIGTERM

    @property
    def model_name(self) -> str:
        """The name that requests ask for."""
        if self.name:
            return self.name
        on_hub = hub_name(self.model)
        return on_hub.name if on_hub else self.model.resolve().name


class VerifierConfig(WorkerConfig):
    """One verifier."""

    dtype: Literal["float32", "bfloat16", "int8", "int4"] = "bfloat16"  # a quantized target is another target
    max_nodes: int = Field(default=64, ge=0, le=256)  # tree nodes in one step, over all sessions
    lookup: Literal["prompt-lookup", "suffix", "retrieval", "lookahead"] | None = None  # also drafts by itself
    store: Path | None = None  # a corpus made by `outrider index`, for that
    heads: Path | None = None  # heads that were trained on the target, and draft from its hidden states
    features: Path | None = None  # EAGLE heads whose drafters may have its hidden states, fused, with each commit


class DrafterConfig(WorkerConfig):
    """One drafter. Its model may be the target's own checkpoint, made cheaper: by `dtype`, `layers` or `skip`."""

    dtype: Literal["float32", "bfloat16", "int8", "int4"] = "bfloat16"  # int8 and int4: quantized while loading
    layers: int | None = Field(default=None, ge=1)  # the first ones alone (early exit); None: all
    skip: tuple[Annotated[int, Field(ge=0)], ...] = ()  # indices of layers to leave out (layer skip)
    heads: Path | None = None  # EAGLE heads on `model`, the target, of which only the two ends are loaded
    drafts: Literal["model", "prompt-lookup", "suffix", "retrieval"] = "model"  # by it, or by what followed before
    store: Path | None = None  # a corpus made by `outrider index`, to look into without a model
    target: Path | None = None  # the target's checkpoint, if its tokenizer is another: drafts go by their text
    any_target: bool = False  # draft for others than the one that the model's card says it was trained for, too
    learns: bool = False  # take the versions of its model that `outrider train online` publishes, while it serves
    level_nodes: int = Field(default=8, ge=1, le=256)  # nodes of a session expanded in one level
    tree: TreeName = "best-first"  # how trees are constructed
    via: Address | None = None  # where this drafter reaches its upstream, if not at the address it advertises: a tunnel
    count: int = Field(default=1, ge=0, le=256)  # of drafters like this, in a cluster's file
    tier: int = Field(default=0, ge=0, le=15)  # 0 drafts for verifiers, the others for a tier with a lower number
    above: int | None = Field(default=None, ge=0)  # which one; None: the next lower number

    @property
    def upstream_tier(self) -> int | None:
        """The tier that it drafts for; None: the verifiers."""
        return None if not self.tier else self.tier - 1 if self.above is None else self.above

    @property
    def serves(self) -> bool:
        """Whether a tier below can draft for it: it must be able to judge their tokens, by a whole model."""
        return self.drafts == "model" and self.target is None and self.heads is None

    @model_validator(mode="after")
    def _no_circle(self) -> Self:
        if self.above is not None and self.above >= self.tier:
            raise ValueError(
                f"tier {self.tier} cannot draft for tier {self.above}: a tier drafts for one with a lower number, "
                "so that nobody drafts for himself in a circle"
            )
        return self


class GatewayConfig(ServerConfig):
    """OpenAI's interface in front of a router. `ca` signed the router's certificate; with `cert` and `key` the gateway
    itself speaks HTTPS only."""

    listen: Address = "127.0.0.1:8000"  # for HTTP
    router: str = "127.0.0.1:7070"  # as the SDK takes it; in a cluster's file it is the cluster's own
    tls: bool | None = None  # to the router; None: with a `ca`
    server_name: str = ""  # that the router's certificate must have; empty: its address's
    max_request_bytes: int = Field(default=2**22, ge=1, le=2**26)  # of one body
    timeout_s: float = Field(default=600.0, gt=0)  # of one request
    drain_s: float = Field(default=30.0, ge=0)  # that answers get to end, after a signal

    @model_validator(mode="after")
    def _a_certificate_has_its_key(self) -> Self:
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key go together; `outrider certs` makes both")
        return self


class ClusterConfig(Section):
    """A whole cluster, as `outrider up` starts it on one machine or on Ray."""

    redis: RedisConfig = RedisConfig()  # where sessions are kept
    tls: TlsConfig | None = None  # certificates of all servers; None: no TLS
    router: RouterConfig  # the one that is started
    verifier: list[VerifierConfig] = Field(min_length=1)  # one section each
    drafter: list[DrafterConfig] = []  # those of tier 0, one section each
    tier: dict[int, Annotated[list[DrafterConfig], BeforeValidator(_listed)]] = {}  # more drafters, by their tier
    gateway: GatewayConfig | None = None  # OpenAI's interface, if it is wanted

    @property
    def drafters(self) -> list[DrafterConfig]:
        """All of them, one by one."""
        tiers = (worker.model_copy(update={"tier": tier}) for tier, some in self.tier.items() for worker in some)
        sections = [self.certified("drafter", section) for section in (*self.drafter, *tiers)]
        return [section.model_copy(update={"count": 1}) for section in sections for _ in range(section.count)]

    def certified(self, role: str, section: ServerT) -> ServerT:
        """A server's section with the certificate of `[tls]`, unless it has its own."""
        if self.tls is None or section.cert is not None:
            return section
        return section.model_copy(
            update={name: Path(str(path).replace("{role}", role)) for name, path in iter(self.tls)}
        )

    @model_validator(mode="before")
    @classmethod
    def _number(cls, values: Any) -> Any:
        """A section's name says its tier."""
        for tier, some in dict(values.get("tier") or {}).items() if isinstance(values, dict) else ():
            for worker in _listed(some):
                if isinstance(worker, dict) and str(worker.setdefault("tier", tier)) != str(tier):
                    raise ValueError(f"tier.{tier}.tier: is {worker['tier']}, and the section's name says {tier}")
        return values

    @model_validator(mode="after")
    def _tiers_stand_on_each_other(self) -> Self:
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


def parse(kind: type[SectionT], values: dict[str, Any], source: str) -> SectionT:
    """A checked section. Raises ConfigError with one line for each wrong key: where, what, what is allowed."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        lines = [
            ": ".join((source, *filter(None, [".".join(map(str, entry["loc"]))])))
            + ": "
            + ("unknown key" if entry["type"] == "extra_forbidden" else entry["msg"].removeprefix("Value error, "))
            for entry in error.errors()
        ]
        raise ConfigError("\n".join(lines)) from None


def load_section(kind: type[SectionT], path: Path) -> SectionT:
    """Reads a TOML file that is one section. Raises ConfigError."""
    return parse(kind, read_toml(path), str(path))


def read_toml(path: Path) -> dict[str, Any]:
    """What a TOML file holds. Raises ConfigError."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def load_cluster(path: Path) -> ClusterConfig:
    """Reads a cluster's TOML file; relative paths in it are relative to the file, and what is none and looks
    like ORG/NAME is on the hub. Raises ConfigError."""
    cluster = load_section(ClusterConfig, path)
    base = path.resolve().parent
    data = cluster.redis.data
    models = {name: _checkpoint(base, folder) for name, folder in cluster.router.models.items()}
    router = cluster.router.model_copy(update={"models": models, **_certificates(base, cluster.router)})
    gateway = cluster.gateway and cluster.gateway.model_copy(update=_certificates(base, cluster.gateway))
    tls = cluster.tls and cluster.tls.model_copy(update=_certificates(base, cluster.tls))
    return cluster.model_copy(
        update={
            "redis": cluster.redis.model_copy(update={"data": data and base / data}),
            "tls": tls,
            "router": router,
            "gateway": gateway,
            "verifier": [worker.model_copy(update=_rooted(base, worker)) for worker in cluster.verifier],
            "drafter": [worker.model_copy(update=_rooted(base, worker)) for worker in cluster.drafter],
            "tier": {
                tier: [worker.model_copy(update=_rooted(base, worker)) for worker in some]
                for tier, some in cluster.tier.items()
            },
        }
    )


def _rooted(base: Path, worker: VerifierConfig | DrafterConfig) -> dict[str, Path | None]:
    paths = {
        "model": _checkpoint(base, worker.model),
        "heads": worker.heads and _checkpoint(base, worker.heads),
        "store": worker.store and base / worker.store,
        **_certificates(base, worker),
    }
    if isinstance(worker, DrafterConfig):
        paths["target"] = worker.target and _checkpoint(base, worker.target)
    else:
        paths["features"] = worker.features and _checkpoint(base, worker.features)
    return paths


def _certificates(base: Path, section: ServerConfig | TlsConfig) -> dict[str, Path | None]:
    paths = {"ca": section.ca, "cert": section.cert, "key": section.key}
    return {name: path and base / path for name, path in paths.items()}


def _checkpoint(base: Path, given: Path) -> Path:
    """A folder's path from the file's own folder on; a name on the hub as it is."""
    return given if hub_name(given, base) else base / given
