"""TLS between real servers and callers: a caller with the right certificate is served, for what its role may do."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cryptography.hazmat.primitives import serialization
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.errors import ConfigError, Unavailable
from outrider.rpc import server
from outrider.rpc.authorization import ALLOWED_ROLES
from outrider.rpc.certificate_expiry import CertificateExpiry
from outrider.rpc.certificates import make, renew
from outrider.rpc.channels import open_channel
from outrider.rpc.server import METADATA_BYTES, ServerLimits, serving
from outrider.rpc.status import from_rpc_error
from outrider.rpc.tls import NAMES, SERVER, VERIFIER, Tls
from outrider.v1 import drafter_pb2, inference_pb2, verifier_pb2
from outrider.v1.drafter_pb2_grpc import (
    DrafterServicer,
    TreeSinkServicer,
    add_DrafterServicer_to_server,
    add_TreeSinkServicer_to_server,
)
from outrider.v1.verifier_pb2_grpc import VerifierServicer, add_VerifierServicer_to_server

ROLES = tuple(NAMES)
PARTS = [*verifier_pb2.DESCRIPTOR.services_by_name.values(), *drafter_pb2.DESCRIPTOR.services_by_name.values()]
PARTS = [part for part in PARTS if part.name != "DrafterGate"]  # a router's, which judges keys
METHODS = {f"/{part.full_name}/{method.name}": method for part in PARTS for method in part.methods}
UNAUTHORIZED = grpc.StatusCode.PERMISSION_DENIED


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Certificates of our CA, of another one, and of one whose certificates have expired."""
    made = {name: tmp_path_factory.mktemp(name) for name in ("ours", "other", "expired")}
    for name, folder in made.items():
        make(folder, ["router.example"], days=0 if name == "expired" else 1)
    return made


def certificate(folder: Path, role: str, ca: Path | None = None) -> Tls:
    read = Tls.read((ca or folder) / "ca.pem", folder / f"{role}.pem", folder / f"{role}.key")
    assert read is not None
    return read


@asynccontextmanager
async def parts(tls: Tls | None, *, mutual: bool = True, probes: str | None = None) -> AsyncIterator[str]:
    """All services of verifiers and drafters, which implement nothing: a caller that is let in gets UNIMPLEMENTED."""

    def register(server: grpc.aio.Server) -> list[str]:
        add_VerifierServicer_to_server(VerifierServicer(), server)
        add_TreeSinkServicer_to_server(TreeSinkServicer(), server)
        add_DrafterServicer_to_server(DrafterServicer(), server)
        return [part.full_name for part in PARTS]

    async with serving("127.0.0.1:0", register, drain_s=0, tls=tls, mutual=mutual, probes=probes) as address:
        yield address


async def call(channel: grpc.aio.Channel, path: str) -> grpc.aio.AioRpcError:
    """What a call of an empty message ends with; on a stream of none, whose writing would race with its end."""
    method = METHODS[path]
    send, receive = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
    kind = channel.stream_stream if method.client_streaming else channel.unary_unary
    invoke: Any = kind(path, request_serializer=send.SerializeToString, response_deserializer=receive.FromString)
    answer = invoke(timeout=10).read() if method.client_streaming else invoke(send(), timeout=10)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer
    return caught.value


async def greeted(address: str, tls: Tls | None, server_name: str = "") -> None:
    """Asks for the health. Raises what the caller gets to see."""
    async with open_channel(address, tls, server_name) as channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None


def test_the_role_table_has_every_internal_method_and_no_client_method() -> None:
    assert set(ALLOWED_ROLES) == set(METHODS)
    assert not any(inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name in path for path in ALLOWED_ROLES)


@pytest.mark.parametrize("path", ALLOWED_ROLES)
async def test_a_method_admits_only_its_roles(folders: dict[str, Path], path: str) -> None:
    ours = folders["ours"]
    async with parts(certificate(ours, "verifier")) as address:
        for role in ROLES:
            async with open_channel(address, certificate(ours, role), VERIFIER) as channel:
                error = await call(channel, path)
            allowed = NAMES[role][0] in ALLOWED_ROLES[path]
            assert (error.code() is UNAUTHORIZED) is not allowed, role
            if not allowed:
                assert "another role" in (error.details() or "")
                assert "Forbidden" in dict(error.trailing_metadata() or ()).values()


@pytest.mark.parametrize("path", ALLOWED_ROLES)
async def test_a_role_is_judged_before_a_message_is_read(folders: dict[str, Path], path: str) -> None:
    async def nothing() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    ours = folders["ours"]
    async with (
        parts(certificate(ours, "verifier")) as address,
        open_channel(address, certificate(ours, "gateway"), VERIFIER) as channel,
    ):
        refused = channel.stream_stream(path)(nothing(), timeout=10)
        assert await refused.code() is UNAUTHORIZED


async def test_a_method_that_is_not_in_the_table_is_refused_to_every_role(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(ALLOWED_ROLES, "/outrider.v1.Verifier/Describe")
    ours = folders["ours"]
    async with (
        parts(certificate(ours, "verifier")) as address,
        open_channel(address, certificate(ours, "router"), VERIFIER) as channel,
    ):
        assert (await call(channel, "/outrider.v1.Verifier/Describe")).code() is UNAUTHORIZED


async def test_health_is_for_every_certificate_of_the_ca(folders: dict[str, Path]) -> None:
    async with parts(certificate(folders["ours"], "drafter")) as address:
        for role in ROLES:
            await greeted(address, certificate(folders["ours"], role), SERVER)


async def test_a_probe_without_a_certificate_reaches_only_the_health_service(
    folders: dict[str, Path],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        probes = f"127.0.0.1:{free.getsockname()[1]}"
    async with parts(certificate(folders["ours"], "verifier"), probes=probes):
        await greeted(probes, None)
        async with open_channel(probes) as channel:
            for path in ALLOWED_ROLES:
                error = await call(channel, path)
                assert (error.code(), error.details()) == (grpc.StatusCode.UNIMPLEMENTED, "Method not found!"), path
    with pytest.raises(Unavailable):
        await greeted(probes, None)


@pytest.mark.parametrize("who", ["of another CA", "expired", "missing", "plain text"])
async def test_a_caller_without_a_good_certificate_gets_the_reason(folders: dict[str, Path], who: str) -> None:
    ours, trusted = folders["ours"], folders["expired" if who == "expired" else "ours"]
    tls = {
        "of another CA": certificate(folders["other"], "router", ours),
        "expired": certificate(folders["expired"], "router", ours),
        "missing": Tls.client(ours / "ca.pem"),
        "plain text": None,
    }[who]
    async with parts(certificate(ours, "verifier", trusted)) as address:
        with pytest.raises(Unavailable, match=r"it requires TLS, or it refuses this side's certificate"):
            await greeted(address, tls, VERIFIER)


@pytest.mark.parametrize(
    ("whose", "role", "problem"),
    [
        ("other", "verifier", r"give both sides one CA"),
        ("expired", "verifier", r"has expired; make new ones"),
        ("ours", "drafter", r"another role or host; give it its own"),
        ("ours", "client", r"another role or host; give it its own"),
    ],
)
async def test_a_server_with_another_identity_is_refused_by_its_caller(
    folders: dict[str, Path], whose: str, role: str, problem: str
) -> None:
    folder = folders[whose]
    trusted = folders["expired"] if whose == "expired" else folders["ours"]
    caller = certificate(folders["ours"], "router", trusted)
    async with parts(certificate(folder, role, folders["ours"])) as address:
        with pytest.raises(Unavailable, match=problem):
            await greeted(address, caller, VERIFIER)


async def test_a_server_without_tls_is_distinguished_from_a_missing_one(folders: dict[str, Path]) -> None:
    async with parts(None) as address:
        with pytest.raises(Unavailable, match="speaks no TLS"):
            await greeted(address, certificate(folders["ours"], "router"), VERIFIER)


async def test_clients_of_a_router_need_no_certificate_and_verify_its_host(folders: dict[str, Path]) -> None:
    client = Tls.client(folders["ours"] / "ca.pem")
    async with parts(certificate(folders["ours"], "router"), mutual=False) as address:
        await greeted(address, client)
        await greeted(address.replace("127.0.0.1", "localhost"), client)
        await greeted(address, client, "router.example")
        with pytest.raises(Unavailable, match="another role or host"):
            await greeted(address, client, "elsewhere.example")


async def test_a_server_loads_renewed_files_and_keeps_its_own_while_they_do_not_fit(tmp_path: Path) -> None:
    make(tmp_path)
    before = certificate(tmp_path, "router")
    async with (
        parts(certificate(tmp_path, "verifier")) as address,
        open_channel(address, before, VERIFIER) as connected,
    ):
        stub = health_pb2_grpc.HealthStub(connected)
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
        good = (tmp_path / "verifier.pem").read_bytes()
        for damaged in (b"", b"half a certifi", (tmp_path / "drafter.pem").read_bytes()):  # the last is not its key's
            (tmp_path / "verifier.pem").write_bytes(damaged)
            await greeted(address, before, VERIFIER)
        (tmp_path / "verifier.pem").write_bytes(good)
        make(tmp_path, force=True)
        with pytest.raises(Unavailable, match="one CA"):
            await greeted(address, before, VERIFIER)
        await greeted(address, before.renewed(), VERIFIER)
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)  # what is open stays open


def presented(address: str, caller: Tls) -> bytes:
    """The certificate that a server shows to a new connection."""
    assert caller.files is not None
    ca, cert, key = caller.files
    context = ssl.create_default_context(cafile=ca)
    context.load_cert_chain(cert, key)
    context.check_hostname = False
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=10) as plain,
        context.wrap_socket(plain) as connection,
    ):
        return ssl.DER_cert_to_PEM_cert(connection.getpeercert(binary_form=True) or b"").encode()


def test_grpc_is_given_a_certificate_again_only_when_it_changed(tmp_path: Path) -> None:
    """Given it with each connection, a server dies of a few hundred that begin at the same time."""
    make(tmp_path, days=1)
    served = server.ServedTls(certificate(tmp_path, "verifier"))
    assert served.renewed() is None
    renew(tmp_path, days=1)
    served.latest()  # as for the metric of its expiry
    used = served.renewed()
    assert used is not None
    assert used.cert == (tmp_path / "verifier.pem").read_bytes()
    assert served.renewed() is None


async def test_renewed_certificates_serve_new_connections_and_running_calls_continue(tmp_path: Path) -> None:
    make(tmp_path)
    caller, authority = certificate(tmp_path, "router"), (tmp_path / "ca.pem").read_bytes()
    async with parts(certificate(tmp_path, "verifier")) as address:
        assert await asyncio.to_thread(presented, address, caller) == (tmp_path / "verifier.pem").read_bytes()
        async with open_channel(address, caller, VERIFIER) as connected:
            running = health_pb2_grpc.HealthStub(connected).Watch(health_pb2.HealthCheckRequest())
            assert (await running.read()).status == health_pb2.HealthCheckResponse.SERVING
            before = (tmp_path / "verifier.pem").read_bytes()
            renew(tmp_path)
            assert (tmp_path / "ca.pem").read_bytes() == authority
            present = await asyncio.to_thread(presented, address, caller)
            assert present == (tmp_path / "verifier.pem").read_bytes() != before
            await greeted(address, caller, VERIFIER)  # a caller with the old certificate, of the same CA
            await greeted(address, caller.renewed(), VERIFIER)
            assert not running.done()
            await health_pb2_grpc.HealthStub(connected).Check(health_pb2.HealthCheckRequest(), timeout=10)
            running.cancel()


@pytest.mark.parametrize(("days", "warned"), [(30, ""), (8, ""), (6, "expires in 144 hours"), (0, "has expired")])
async def test_a_server_warns_once_of_a_certificate_that_ends_within_a_week(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, days: int, warned: str
) -> None:
    make(tmp_path, days=days)
    metrics: dict[str, Callable[[], float]] = {}
    monkeypatch.setattr("outrider.rpc.server.register_metric", metrics.__setitem__)
    async with parts(certificate(tmp_path, "verifier")):
        assert metrics["outrider.certificate.expiry"]() - time.time() == pytest.approx(days * 86400, abs=600)
        await asyncio.sleep(0)  # the watching task's first check
        await asyncio.sleep(0)
    logged = [record.getMessage() for record in caplog.records if "this server's certificate" in record.getMessage()]
    assert len(logged) == bool(warned)
    assert all(warned in message and "--renew" in message for message in logged)


def test_the_time_that_is_left_is_that_of_the_first_of_a_chain_to_end_and_follows_the_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path, days=3)
    expiry = CertificateExpiry(lambda: (tmp_path / "ca.pem").read_bytes() + (tmp_path / "router.pem").read_bytes())
    assert expiry.at() - time.time() == pytest.approx(3 * 86400, abs=600)
    for _ in range(3):
        expiry.check()
    assert len(caplog.records) == 1
    renew(tmp_path, days=9)
    assert expiry.at() - time.time() == pytest.approx(9 * 86400, abs=600)
    expiry.check()
    renew(tmp_path, days=1)
    expiry.check()
    assert len(caplog.records) == 2


async def test_metadata_beyond_its_limit_is_refused(folders: dict[str, Path]) -> None:
    async with parts(None) as address, open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(), metadata=(("x", "y" * METADATA_BYTES),), timeout=10)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)  # the connection has survived


@pytest.mark.parametrize(
    "damage", ["no key", "another key", "encrypted", "no PEM", "no CA", "junk for a CA", "ca alone"]
)
def test_files_that_do_not_fit_are_refused_with_their_names(
    folders: dict[str, Path], tmp_path: Path, damage: str
) -> None:
    ours, junk = folders["ours"], tmp_path / "junk.pem"
    junk.write_text("junk")
    locked = tmp_path / "locked.key"
    private = serialization.load_pem_private_key((ours / "router.key").read_bytes(), None)
    locked.write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"word"),
        )
    )
    ca, cert, key = ours / "ca.pem", ours / "router.pem", ours / "router.key"
    given, named = {
        "no key": ((ca, cert, tmp_path / "none.key"), "none.key"),
        "another key": ((ca, cert, ours / "verifier.key"), "verifier.key"),
        "no PEM": ((ca, junk, key), "junk.pem"),
        "no CA": ((tmp_path / "none.pem", cert, key), "none.pem"),
        "junk for a CA": ((junk, cert, key), "junk.pem"),
        "encrypted": ((ca, cert, locked), "not encrypted"),
        "ca alone": ((ca, None, None), "go together"),
    }[damage]
    with pytest.raises(ConfigError, match=named):
        Tls.read(*given)


def test_a_private_key_is_absent_from_its_repr(folders: dict[str, Path]) -> None:
    assert "PRIVATE" not in repr(certificate(folders["ours"], "router"))


async def test_connections_in_their_handshake_count_and_end_in_time(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those beyond the number are closed at once, the others when the time to agree on a connection is over."""
    most, within_s, count = 8, 3.0, 40
    shortened = {**dict(server.SERVER_OPTIONS), "grpc.server_handshake_timeout_ms": int(within_s * 1000)}
    monkeypatch.setattr(server, "SERVER_OPTIONS", tuple(shortened.items()))

    def register(added: grpc.aio.Server) -> list[str]:
        add_VerifierServicer_to_server(VerifierServicer(), added)
        return []

    tls, limits = certificate(folders["ours"], "router"), ServerLimits(connections=most)
    async with serving("127.0.0.1:0", register, drain_s=0, tls=tls, mutual=False, limits=limits) as address:
        host, _, port = address.rpartition(":")

        async def seconds() -> float:
            began = time.monotonic()
            reader, writer = await asyncio.open_connection(host, int(port))
            with suppress(ConnectionError):
                while await reader.read(1024):
                    pass
            writer.transport.abort()
            return time.monotonic() - began

        async with asyncio.timeout(20):
            held = sorted(await asyncio.gather(*(seconds() for _ in range(count))))
        assert held[count - most - 1] < within_s / 2
        assert all(within_s * 0.9 < each < within_s + 2 for each in held[count - most :])
        async with open_channel(address, Tls(ca=tls.ca), server_name="localhost") as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
