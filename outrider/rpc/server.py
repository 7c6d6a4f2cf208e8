"""The life of a gRPC server: bind, serve, report its health, drain."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeAlias

import grpc
import grpc.aio
from grpc_health.v1 import _async as health  # public as health.aio, which the type stubs lack
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import SERVICE_NAME as HEALTH
from grpc_reflection.v1alpha import reflection

from outrider.errors import ConfigError
from outrider.rpc.authorization import JudgedByRole, JudgedCalls
from outrider.rpc.certificate_expiry import CertificateExpiry
from outrider.rpc.channels import LIVENESS, Options
from outrider.rpc.supervision import keep_running
from outrider.rpc.tls import Tls
from outrider.telemetry.metrics import register_metric
from outrider.wire.message_bounds import REQUEST_BYTES, BoundedRequests

Health: TypeAlias = health.HealthServicer
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING

MAX_STREAMS = 1024  # concurrent calls of one connection; further ones wait at their caller
_FINAL_READ_S = 0.2  # how long peers have to read how their calls ended, once all handlers have ended
_WATCHERS_S = 0.2  # how long watchers of the health have to read that the server leaves
METADATA_BYTES = 16 * 2**10  # of a call; an API key has 52

HANDSHAKE_MS = 10_000  # time for TLS and HTTP/2 to agree on a connection
IDLE_MS = 600_000  # a caller's connection without a call is closed after this time
PING_STRIKES = 1000  # pings within half a second of another, without an answer in between, until a caller is cut off

SERVER_OPTIONS: Options = (
    *LIVENESS,
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    ("grpc.max_metadata_size", METADATA_BYTES),  # above it some calls are refused, at random,
    ("grpc.absolute_max_metadata_size", METADATA_BYTES),  # and above this limit all
    # Probing would have a stream's window grow to megabytes, which a caller may fill before its key or its ticket is
    # judged. Without, it is 64 KiB until the message is read, and a longer message takes a few round trips more.
    ("grpc.http2.bdp_probe", 0),
)

_OF_THE_CLUSTER: Options = (("grpc.http2.max_ping_strikes", 0),)  # keepalive pings never close a peer's connection
_OF_ANYBODY: Options = (
    ("grpc.http2.max_ping_strikes", PING_STRIKES),
    ("grpc.max_connection_idle_ms", IDLE_MS),
)


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What a server takes at most, of its port as well."""

    message_bytes: int = REQUEST_BYTES
    calls: int | None = None  # calls at the same time, of all connections; None: no limit
    connections: int = 4096  # connections at the same time
    share_port: bool = False  # whether other servers may listen on the same address


_PROBES = ServerLimits(message_bytes=1024, calls=256, connections=256)


@asynccontextmanager
async def serving(
    listen: str,
    register: Callable[[grpc.aio.Server], Sequence[str]],
    *,
    drain_s: float = 5.0,
    begin_drain: Callable[[], None] = lambda: None,
    drained: Callable[[], Awaitable[None]] | None = None,
    tls: Tls | None = None,
    mutual: bool = True,
    judge: JudgedCalls | None = None,
    limits: ServerLimits = ServerLimits(),
    probes: str | None = None,
) -> AsyncIterator[str]:
    """Serve while the body runs, then drain.

    `register` adds its servicers to the given server and returns their full names, for example "outrider.v1.Verifier";
    they get health checking and reflection. Yield the bound "host:port": the host of `listen`, with the port that was
    taken if its own is 0. On exit the health turns to NOT_SERVING, new calls are refused, and running ones have
    `drain_s` seconds to end before they are cancelled; `begin_drain` is called in between, to make them end. gRPC
    counts a call as running until its peer has read how it ended: `drained` returns when the handlers that matter have
    ended, and peers then have a moment to read that.

    With `tls` the server accepts TLS only; if it is `mutual`, callers must show a certificate of the CA, whose role
    decides what they may call. gRPC for Python cannot ask for a certificate without requiring it, so a router, whose
    clients have none, does not ask. Renewed certificate files are used for new connections; open ones stay. A `judge`
    decides about calls instead of the certificate's role. Requests to verifiers and drafters are bounded.

    `probes`: an address that reports the health in plaintext, too; see `plaintext_health`.

    Raises ConfigError when an address cannot be bound.
    """
    if judge is None and tls is not None and mutual:
        judge = JudgedByRole()
    server = _server(limits, _OF_THE_CLUSTER if mutual else _OF_ANYBODY, judge)
    names = [*register(server), HEALTH]
    health_servicer = Health()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection([*names, reflection.SERVICE_NAME], server)
    served = None if tls is None else ServedTls(tls)
    address = _bind(
        server, listen, None if served is None else _credentials(served, mutual), share_port=limits.share_port
    )
    async with plaintext_health(probes, health_servicer), _watched(served):
        await server.start()
        try:
            for name in ("", *names):
                await health_servicer.set(name, SERVING)
            yield address
        finally:
            # A watcher of the health that does not read holds this up until its call is cancelled.
            leaving = asyncio.ensure_future(health_servicer.enter_graceful_shutdown())
            await asyncio.wait({leaving}, timeout=_WATCHERS_S)
            stopping = asyncio.ensure_future(server.stop(drain_s))
            await asyncio.sleep(0)  # peers learn of the drain before their calls end, and send the next ones elsewhere
            begin_drain()
            if drained is not None:
                draining = asyncio.ensure_future(drained())
                await asyncio.wait({stopping, draining}, return_when=asyncio.FIRST_COMPLETED)
                draining.cancel()
                await server.stop(_FINAL_READ_S)
            await stopping
            leaving.cancel()


@asynccontextmanager
async def plaintext_health(listen: str | None, health_servicer: Health) -> AsyncIterator[None]:
    """Report the health in plaintext at `listen` while the body runs; None: nowhere.

    For probes that cannot show a certificate, such as those of Kubernetes. Nothing else is served there. Raises
    ConfigError when the address cannot be bound.
    """
    if listen is None:
        yield
        return
    server = _server(_PROBES, _OF_ANYBODY)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    _bind(server, listen, None, key="health")
    await server.start()
    try:
        yield
    finally:
        await server.stop(0)


def _server(limits: ServerLimits, options: Options, judge: JudgedCalls | None = None) -> grpc.aio.Server:
    bounds: Options = (
        # Servers that do not know of each other would silently share the calls of one port.
        ("grpc.so_reuseport", int(limits.share_port)),
        ("grpc.max_receive_message_length", limits.message_bytes),
        ("grpc.max_allowed_incoming_connections", limits.connections),
    )
    kept = [option for option in SERVER_OPTIONS if option[0] != "grpc.max_receive_message_length"]
    return grpc.aio.server(
        options=(*kept, *options, *bounds),
        interceptors=(BoundedRequests(),) if judge is None else (judge, BoundedRequests()),
        maximum_concurrent_rpcs=limits.calls,
    )


class ServedTls:
    """A server's certificate. Each new connection uses the present content of its files."""

    def __init__(self, tls: Tls) -> None:
        self._tls = self._used = tls

    def latest(self) -> Tls:
        """Return what a connection that begins now uses."""
        self._tls = self._tls.renewed()
        return self._tls

    def renewed(self) -> Tls | None:
        """Return what connections use from now on; None: what they use already.

        gRPC frees what it is given a successor for, also when a handshake on another thread is about to use it: given
        one for each connection, a server dies after some hundred of them.
        """
        used, self._used = self._used, self.latest()
        return None if self._used is used else self._used


@asynccontextmanager
async def _watched(served: ServedTls | None) -> AsyncIterator[None]:
    """Watch when the certificate expires while the body runs."""
    if served is None:
        register_metric("outrider.certificate.expiry", lambda: 0.0)
        yield
        return
    expiry = CertificateExpiry(lambda: served.latest().cert)
    register_metric("outrider.certificate.expiry", expiry.at)
    watching = asyncio.create_task(keep_running("certificate", expiry.run), name="certificate")
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.wait({watching})


def _credentials(served: ServedTls, mutual: bool) -> grpc.ServerCredentials:
    def configured(used: Tls) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(used.key, used.cert)], used.ca if mutual else None)

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        used = served.renewed()
        return None if used is None else configured(used)

    return grpc.dynamic_ssl_server_credentials(
        configured(served.latest()),
        renewed,  # type: ignore[arg-type]  # its stubs forget None: as it is
        mutual,
    )


def _bind(
    server: grpc.aio.Server,
    listen: str,
    credentials: grpc.ServerCredentials | None,
    *,
    share_port: bool = False,
    key: str = "listen",
) -> str:
    check_bindable(key, listen, share_port=share_port)
    try:
        bound = server.add_secure_port(listen, credentials) if credentials else server.add_insecure_port(listen)
    except RuntimeError:
        bound = 0
    if not bound:
        raise ConfigError(f"{key}: cannot bind {listen}; choose an address of this machine and a free port")
    return f"{listen.rpartition(':')[0]}:{bound}"


def check_bindable(key: str, listen: str, *, share_port: bool = False) -> None:
    """Raise ConfigError, which names the `key`, for an address that no server can listen at now.

    It binds the address with a plain socket, because gRPC logs its reasons instead of raising them.
    """
    host, _, number = listen.rpartition(":")
    if not number.isdigit() or (port := int(number)) > 65535:
        raise ConfigError(f"{key}: cannot bind {listen}; it must be HOST:PORT with a port up to 65535")
    host = host.strip("[]")
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT if share_port else socket.SO_REUSEADDR, 1)
            trial.bind(target)
            if not share_port:
                trial.listen(1)  # with SO_REUSEADDR only this fails if another process listens
    except OSError as error:
        raise ConfigError(
            f"{key}: cannot bind {listen} ({error.strerror or error}); "
            "choose an address of this machine and a free port, or port 0 to take any free one"
        ) from None
