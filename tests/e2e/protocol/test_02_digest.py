"""2. The digest."""

import hashlib
import json

import grpc
import pytest

from outrider.core.session.digest import EMPTY, extend, tokenizer_digest
from tests.e2e.conftest import MODELS
from tests.e2e.mini_router import described
from tests.e2e.protocol.conftest import Text
from tests.e2e.protocol.page import table
from tests.e2e.protocol.peers import calling, decoding, delta, drafting, start_of
from tests.e2e.protocol.upstreams import refused_by, upstream_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

TEXTS = {"none": [], "0": [0], "1, 2, 3": [1, 2, 3], "0 to 999": list(range(1000))}
WORD = 2**64


def by_the_page(tokens: list[int]) -> int:
    """The digest by the formulas of docs/protocol.md."""

    def mix64(z: int) -> int:
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % WORD
        z = (z ^ z >> 27) * 0x94D049BB133111EB % WORD
        return z ^ z >> 31

    digest = mix64(0x6F75747269646572)
    for token in tokens:
        digest = mix64((digest + 0x9E3779B97F4A7C15 * (token + 1)) % WORD)
    return digest


async def test_the_digest_formula_and_vectors_of_the_page_equal_the_code() -> None:
    rows = table(2)
    assert [name for name, _ in rows] == list(TEXTS)
    for name, digest in rows:
        assert int(digest, 16) == by_the_page(TEXTS[name]) == extend(EMPTY, TEXTS[name])


async def test_a_tokenizers_digest_does_not_depend_on_its_json_layout(verifier: str) -> None:
    parsed = json.loads((MODELS / "target" / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = {id_: token for token, id_ in parsed["model"]["vocab"].items()}
    tokens |= {token["id"]: token["content"] for token in parsed["added_tokens"]}
    by_id = dict(sorted(tokens.items()))
    merges = [" ".join(pair) for pair in parsed["model"]["merges"]]
    canonical = json.dumps([[*by_id], [*by_id.values()], merges], ensure_ascii=False, separators=(",", ":"))
    digest = hashlib.sha256(canonical.replace("\u2581", " ").encode()).digest()[:16]
    assert (await described(verifier)).tokenizer_digest == digest
    other = dict(reversed(parsed.items()))
    assert tokenizer_digest(json.dumps(other, indent=3).encode()) == digest
    added = {"id": len(tokens), "content": "more"}
    assert tokenizer_digest(json.dumps(other | {"added_tokens": [added]}).encode()) != digest


async def test_commits_and_snapshots_carry_the_digest_over_all_tokens_up_to_their_end(
    verifier: str, text: Text
) -> None:
    async with (
        decoding(verifier, tokens=text.prompt, contract=text.contract, window=4) as router,
        drafting(verifier) as drafter,
    ):
        await router.generated(4)
        snapshot = await drafter.attach(router.session)
        assert list(snapshot.tokens) == router.tokens
        assert snapshot.digest == extend(EMPTY, router.tokens)
        await router.acknowledge(4)
        await router.generated(8)
        for commit in router.inbox.of("commit"):
            assert commit.digest == extend(EMPTY, text.whole[: commit.position + len(commit.tokens)])
        await drafter.inbox.until(lambda: ends(drafter.inbox.of("commit")) == len(text.prompt) + 8)
        for commit in drafter.inbox.of("commit"):
            assert commit.digest == extend(EMPTY, text.whole[: commit.position + len(commit.tokens)])


def ends(commits: list[object]) -> int:
    return max((commit.position + len(commit.tokens) for commit in commits), default=0)  # type: ignore[attr-defined]


async def test_a_start_whose_digest_does_not_fit_its_tokens_is_refused(verifier: str) -> None:
    async with calling(verifier, await start_of(verifier, digest=EMPTY)) as router:
        end = await router.inbox.end()
    assert (end.code, end.metadata["outrider-field"]) == (grpc.StatusCode.INVALID_ARGUMENT, "digest")


async def test_a_delta_from_a_root_with_another_digest_is_answered_with_a_snapshot(verifier: str, text: Text) -> None:
    root = len(text.prompt) - 1
    async with (
        decoding(verifier, tokens=text.prompt, contract=text.contract, window=8) as router,
        drafting(verifier) as drafter,
    ):
        await router.generated(8)
        await drafter.attach(router.session)
        before = (await described(verifier)).refused_frames
        for behind in (8, 0):  # the present root, and one that was left behind
            drafter.send_frame(**delta(text.whole, root + behind, text.answer[behind:12], root_digest=7))
            snapshot = await drafter.inbox.take("snapshot")
            assert (list(snapshot.tokens), snapshot.attachment) == (router.tokens, 1)
        assert (await described(verifier)).refused_frames == before + 2
        drafter.send_frame(**delta(text.whole, root + 8, text.answer[8:12]))
        await drafter.received_all(router.session)
        assert (await router.step()).accepted


async def test_a_drafter_with_a_drifted_mirror_subscribes_again(drafter: str, text: Text) -> None:
    async with upstream_of(drafter) as peer:
        stream, whole = peer.stream, text.whole
        before = await refused_by(peer.drafter)
        stream.snapshot(whole[:40], digest=7)
        assert (await stream.inbox.take("subscribe")).attachment == 2
        assert not stream.inbox.of("delta")
        stream.snapshot(whole[:40], attachment=2)
        first = await stream.inbox.take("delta", 2)
        assert (first.root_position, first.root_digest) == (39, extend(EMPTY, whole[:40]))
        stream.commit(whole[:41], 40, attachment=2, digest=7)
        assert (await stream.inbox.take("subscribe")).attachment == 3
        stream.snapshot(whole[:41], attachment=3)
        assert (await stream.inbox.take("delta", 3)).root_digest == extend(EMPTY, whole[:41])
        stream.commit(whole[:44], 43, attachment=3)  # a gap: it lacks two tokens
        again = await stream.inbox.take("subscribe")
        assert (again.attachment, again.session_id) == (4, peer.subscribed.session_id)
        assert await refused_by(peer.drafter) == before + 3
        assert not stream.inbox.of("delta", 4)


async def test_a_delta_carries_the_digest_at_its_root(drafter: str, text: Text) -> None:
    async with upstream_of(drafter) as peer:
        stream, whole = peer.stream, text.whole
        stream.snapshot(whole[:40])
        await stream.inbox.take("delta")
        for length in range(41, 50):
            stream.commit(whole[:length], length - 1)
        await stream.inbox.until(lambda: any(frame.root_position == 48 for frame in stream.inbox.of("delta")))
        for frame in stream.inbox.of("delta"):
            assert frame.root_digest == extend(EMPTY, whole[: frame.root_position + 1])
