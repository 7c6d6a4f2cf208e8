"""14. Features."""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import pytest_asyncio
import torch

from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, VerifierConfig
from outrider.engine.checkpoints.model_card import weights_digest
from outrider.engine.heads.checkpoint_io import Network
from outrider.engine.heads.config import HeadsConfig
from outrider.engine.heads.eagle import Eagle3
from outrider.engine.heads.fusing import digest_of, fusion_digest
from outrider.fleet.cluster import LocalCluster
from outrider.upstream.drafter_sender import snapshot_parts
from outrider.upstream.upstream_session import UpstreamStream
from outrider.v1 import drafter_pb2 as pb
from outrider.v1 import types_pb2
from outrider.wire.drafter import features_from_pb
from tests.e2e.conftest import MODELS
from tests.e2e.mini_router import trust
from tests.e2e.protocol.conftest import Text
from tests.e2e.protocol.page import table
from tests.e2e.protocol.peers import decoding, drafting, subscribed
from tests.e2e.protocol.stream_probe import new_name
from tests.e2e.protocol.upstreams import refused_by, upstream_of
from tests.engine.taught import features_of, random_heads

pytestmark = pytest.mark.asyncio(loop_scope="session")

TARGET = MODELS / "target"
WIDTH = 256
# The values of docs/protocol.md.
SNAPSHOT_FEATURES = 4096
PART_BYTES = 2**20


class Featured(NamedTuple):
    """A verifier that has features, a drafter that asks for them, and the heads of both."""

    verifier: str
    drafter: str
    heads: Path
    shape: HeadsConfig
    network: Network


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def featured(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Featured]:
    heads = tmp_path_factory.mktemp("heads")
    shape, network = random_heads("eagle-3", TARGET, heads)
    config = ClusterConfig(
        router=RouterConfig(listen="127.0.0.1:0", models={"target": TARGET}),
        verifier=[VerifierConfig(model=TARGET, dtype="float32", features=heads)],
        drafter=[DrafterConfig(model=TARGET, dtype="float32", heads=heads)],
    )
    async with LocalCluster(config, forward=lambda name, line: print(name, line)) as cluster:
        await trust(cluster)
        addresses = (cluster.processes[name].address for name in ("verifier-0", "drafter-0"))
        yield Featured(*addresses, heads, shape, network)


def fused(featured: Featured, tokens: list[int]) -> np.ndarray:
    """What comes with each of these tokens but the first."""
    features = features_of(TARGET, featured.shape.features, tokens)
    assert isinstance(featured.network, Eagle3)
    with torch.no_grad():
        return featured.network.enter(features).numpy()[:-1]


def numbers(data: bytes) -> np.ndarray:
    bits = np.frombuffer(data, "<u2").reshape(-1, WIDTH).astype(np.uint32) << 16
    return bits.view(np.float32)


async def test_the_digest_is_as_the_page_specifies(tmp_path: Path) -> None:
    rows = table(14)
    assert len(rows) == 2
    for heads, digest in rows:
        weights, kind, layers = heads.split(", ")
        numbers = [int(number) for number in re.findall(r"\d+", layers)]
        text = f"{weights} {kind} {','.join(map(str, numbers))}"
        assert hashlib.sha256(text.encode()).digest()[:16].hex() == digest == digest_of(weights, kind, numbers).hex()
    random_heads("eagle", TARGET, tmp_path)
    assert fusion_digest(tmp_path) == digest_of(weights_digest(tmp_path), "eagle", ())


async def test_each_token_carries_the_features_of_its_predecessor(featured: Featured, text: Text) -> None:
    """In a snapshot from the second token on, and in every commit; the target's own, fused."""
    digest = fusion_digest(featured.heads)
    async with (
        decoding(featured.verifier, tokens=text.prompt, contract=text.contract, window=4) as router,
        drafting(featured.verifier) as drafter,
        drafting(featured.verifier) as other,
    ):
        await router.generated(4)
        snapshot = await drafter.inbox.take("snapshot", await drafter.subscribe(router.session, features=digest))
        plain = await other.attach(router.session)
        assert (len(snapshot.tokens), plain.features) == (len(text.prompt) + 4, b"")
        await router.acknowledge(4)
        await router.generated(8)
        await drafter.inbox.until(lambda: sum(len(it.tokens) for it in drafter.inbox.of("commit")) == 4)
        await other.inbox.until(lambda: sum(len(it.tokens) for it in other.inbox.of("commit")) == 4)
        commits = drafter.inbox.of("commit")
        assert not any(it.features for it in other.inbox.of("commit"))
        assert all(len(it.features) == 2 * WIDTH * len(it.tokens) for it in commits)
        sent = snapshot.features + b"".join(it.features for it in commits)
        expected = fused(featured, router.tokens)
        assert numbers(sent).shape == expected.shape
        assert np.abs(numbers(sent) - expected).max() < 0.01 * np.abs(expected).max()
        assert sum(report.wire_bytes for report in router.reports) > 4 * 2 * WIDTH


async def test_a_snapshot_waits_for_the_first_commit_and_no_step_for_its_drafter(
    featured: Featured, text: Text
) -> None:
    """Of a session whose prompt is being read, and of one whose whole prefix is warm."""
    digest = fusion_digest(featured.heads)
    for prompt in (text.whole[:300], text.whole[:300]):
        async with drafting(featured.verifier) as drafter:
            attachment = await drafter.subscribe(session := new_name(), features=digest)
            async with decoding(
                featured.verifier, session_id=session, tokens=prompt, contract=text.contract, window=1
            ) as router:
                snapshot = await drafter.inbox.take("snapshot", attachment)
                assert len(snapshot.tokens) == len(prompt) + 1
                assert len(snapshot.features) == 2 * WIDTH * (len(snapshot.tokens) - 1)
                assert not drafter.inbox.of("commit")
                assert all(report.waited_us == 0 for report in router.reports)
                expected = fused(featured, list(snapshot.tokens))
                assert np.abs(numbers(snapshot.features) - expected).max() < 0.01 * np.abs(expected).max()


async def test_a_drafter_that_asks_for_missing_features_is_sent_the_remedy(
    featured: Featured, verifier: str, text: Text
) -> None:
    for address, why in ((verifier, "this upstream gives none"), (featured.verifier, "give both the same folder")):
        async with (
            decoding(address, tokens=text.prompt, contract=text.contract, window=4) as router,
            drafting(address) as drafter,
        ):
            closed = await drafter.inbox.take("closed", await drafter.subscribe(router.session, features=b"x" * 16))
            assert closed.reason.startswith("features: ")
            assert why in closed.reason


async def test_a_session_given_up_during_its_snapshot_is_not_read_further() -> None:
    """Its slot may be another tenant's by then."""
    stream = UpstreamStream("d", types_pb2.Heartbeat)
    parts = (pb.Snapshot(attachment=1, position=position) for position in range(3))
    stream.snapshot(1, lambda: parts)
    assert await stream.next() is not None
    stream.forget(1)
    stream.finish()
    assert await stream.next() is None
    assert next(parts).position == 1


async def test_joined_commits_have_their_rows_joined() -> None:
    stream = UpstreamStream("d", types_pb2.Heartbeat)
    for position, tokens in ((5, [1, 2]), (7, []), (7, [3])):
        rows = bytes(position + token for token in tokens)
        assert stream.commit(pb.Commit(attachment=1, position=position, tokens=tokens, features=rows))
    frame = await stream.next()
    assert frame is not None
    assert (list(frame.commit.tokens), frame.commit.features) == ([1, 2, 3], bytes([6, 7, 10]))


@pytest.mark.parametrize(("count", "width"), [(6000, 1024), (90, 256), (2, 256), (20_000, 4096)])
async def test_a_snapshots_features_cover_its_end_and_are_sent_in_parts(count: int, width: int) -> None:
    fused = SimpleNamespace(width=width, rows=lambda start, stop: bytes(2 * width * (stop - start)))
    subscription = subscribed([7] * count, fused)
    known, rows, largest = 0, 0, 0
    for part in snapshot_parts(subscription):
        assert part.position == known
        known += len(part.tokens)
        found = len(part.features) // (2 * width)
        assert rows == 0 or found == len(part.tokens)
        rows, largest = rows + found, max(largest, len(part.features))
    assert (known, rows) == (count, min(count - 1, SNAPSHOT_FEATURES))
    assert largest <= PART_BYTES
    assert subscription.session.wire_bytes > 2 * width * rows


def malformed() -> Iterator[tuple[str, dict[str, bytes], dict[str, bytes]]]:
    """What is wrong, of a snapshot of 9 tokens and of a commit of 2."""
    row = bytes(2 * WIDTH)
    yield "none", {"features": b""}, {"features": b""}
    yield "half a row", {"features": row[1:]}, {"features": row + row[1:]}
    yield "one too many", {"features": 9 * row}, {"features": 3 * row}
    yield "infinite", {"features": 7 * row + row[2:] + b"\x80\x7f"}, {"features": row + b"\x80\xff" + row[2:]}


async def test_a_drafter_refuses_malformed_features_and_drafts_from_valid_features(
    featured: Featured, text: Text
) -> None:
    row = bytes(2 * WIDTH)
    async with upstream_of(featured.drafter) as peer:
        stream, number = peer.stream, 1
        assert peer.subscribed.features == fusion_digest(featured.heads)

        async def refused() -> int:
            return int((await stream.inbox.take("subscribe")).attachment)

        for _, in_snapshot, in_commit in malformed():
            before = await refused_by(peer.drafter)
            stream.snapshot(text.whole[:9], attachment=number, **in_snapshot)
            number = await refused()
            stream.snapshot(text.whole[:9], attachment=number, features=8 * row)
            await stream.inbox.until(lambda: any(delta.tokens for delta in stream.inbox.of("delta")))
            stream.commit(text.whole[:11], 9, attachment=number, **in_commit)
            number = await refused()
            assert await refused_by(peer.drafter) == before + 2
            stream.inbox.frames.clear()
        stream.snapshot(text.whole[:9], attachment=number, features=3 * row)  # those before are not known
        await stream.inbox.until(lambda: any(delta.tokens for delta in stream.inbox.of("delta")))


async def test_a_drafter_that_did_not_ask_refuses_features(drafter: str, text: Text) -> None:
    async with upstream_of(drafter) as peer:
        assert peer.subscribed.features == b""
        peer.stream.snapshot(text.whole[:9], features=bytes(2 * WIDTH))
        assert (await peer.stream.inbox.take("subscribe")).attachment == 2


async def test_bits_of_bfloat16_are_little_endian() -> None:
    data = torch.tensor([[1.0, -2.5], [3e38, 1e-3]]).to(torch.bfloat16)
    rows = features_from_pb(bytes.fromhex("803f20c0627f833a"), 2)
    assert torch.equal(torch.from_numpy(rows.astype(np.int16)).view(torch.bfloat16), data)
