"""1. Sessions, generations, epochs."""

import asyncio

import grpc
import pytest

import outrider
from outrider.core.session.digest import EMPTY, extend
from outrider.errors import Busy, InvalidRequest, Superseded
from outrider.fleet.cluster import LocalCluster
from outrider.v1 import drafter_pb2 as pb
from tests.e2e.mini_router import described
from tests.e2e.protocol.conftest import Text
from tests.e2e.protocol.peers import calling, decoding, delta, drafting, start_of
from tests.e2e.protocol.upstreams import refused_by, upstream_of

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_router_that_begins_or_resumes_a_generation_first_raises_the_epoch(cluster: LocalCluster) -> None:
    async with outrider.AsyncClient(cluster.router_address) as client:
        session = (await client.create_session()).session_id
        epochs = [(await client.get_session(session)).epoch]
        for turn in range(2):
            await client.generate("import", session=session, max_tokens=2, seed=turn, timeout=30)
            epochs.append((await client.get_session(session)).epoch)
        long = {"max_tokens": 800, "ignore_eos": True, "speculation": "off"}
        stream = client.stream("import", session=session, timeout=30, **long)  # type: ignore[arg-type]
        chunks = aiter(stream)
        await anext(chunks)
        epochs.append((await client.get_session(session)).epoch)
        async with client.resume(session, timeout=30) as taken_over:
            continued = aiter(taken_over)
            await anext(continued)
            epochs.append((await client.get_session(session)).epoch)
            with pytest.raises(Superseded):
                async for _ in chunks:
                    pass
    assert epochs == [0, 1, 2, 3, 4]


async def test_two_generations_of_one_session_never_overlap_and_its_model_is_fixed(cluster: LocalCluster) -> None:
    async with outrider.AsyncClient(cluster.router_address) as client:
        stream = client.stream("import", max_tokens=800, ignore_eos=True, timeout=30)
        chunks = aiter(stream)
        await anext(chunks)
        with pytest.raises(Busy):
            await client.generate("x", session=stream.session_id, max_tokens=1, timeout=30)
        with pytest.raises(InvalidRequest, match="model"):
            await client.generate("x", session=stream.session_id, model="gpt", max_tokens=1, timeout=30)
        await stream.cancel()


async def test_an_epoch_that_is_not_higher_is_refused_and_a_higher_one_fences_and_finds_the_kv(
    verifier: str, text: Text
) -> None:
    whole, prompt = text.whole, len(text.prompt)
    async with decoding(verifier, epoch=5, tokens=text.prompt, contract=text.contract, window=20) as first:
        await first.generated(20)
        for epoch in (4, 5):
            stale = await start_of(verifier, session_id=first.session, epoch=epoch)
            async with calling(verifier, stale) as refused:
                assert (await refused.inbox.end()).code is grpc.StatusCode.ABORTED
        assert first.inbox.open
        lower = {"session_id": first.session, "answer_position": prompt, "contract": text.contract, "window": 20}
        async with (
            drafting(verifier) as drafter,
            decoding(verifier, epoch=9, tokens=whole[: prompt + 8], **lower) as second,
        ):
            end = await first.inbox.end()
            assert (end.code, "higher epoch" in end.details) == (grpc.StatusCode.ABORTED, True)
            assert (await second.inbox.take("started")).cached == prompt + 8 - 1
            await second.generated(20)
            assert second.tokens == whole[: prompt + 28]
            await drafter.attach(first.session, epoch=9)
            changed = [*whole[: prompt + 3], (whole[prompt + 3] + 1) % 4096, *whole[prompt + 4 : prompt + 12]]
            async with decoding(verifier, epoch=10, tokens=changed, **lower) as third:
                assert (await drafter.inbox.take("closed")).reason == "fenced"
                assert (await third.inbox.take("started")).cached == prompt + 3
                await third.generated(10)
                alone = decoding(verifier, tokens=changed, answer_position=prompt, contract=text.contract, window=10)
                async with alone as fourth:
                    await fourth.generated(10)
                    assert third.tokens[: len(changed) + 10] == fourth.tokens


async def test_a_subscription_for_another_epoch_is_closed_as_fenced(verifier: str, text: Text) -> None:
    async with (
        decoding(verifier, epoch=5, tokens=text.prompt, contract=text.contract, window=1) as router,
        drafting(verifier) as drafter,
    ):
        before = (await described(verifier)).refused_frames
        for epoch in (4, 6):
            attachment = await drafter.subscribe(router.session, epoch=epoch)
            assert (await drafter.inbox.take("closed", attachment)).reason.startswith("fenced")
        assert (await described(verifier)).refused_frames == before + 2
        snapshot = await drafter.attach(router.session, epoch=5)
        assert snapshot.epoch == 5


async def test_a_delta_of_another_epoch_is_dropped_and_counted(verifier: str, text: Text) -> None:
    async with (
        decoding(verifier, epoch=5, tokens=text.prompt, contract=text.contract, window=8) as router,
        drafting(verifier) as drafter,
    ):
        await router.generated(8)
        await drafter.attach(router.session, epoch=5)
        before = (await described(verifier)).refused_frames
        wrong = delta(text.whole, len(text.prompt) + 7, [9999] * 4)  # an upstream that looked at it would refuse it
        for epoch in (4, 6):
            wrong["delta"].epoch = epoch
            drafter.send_frame(**wrong)
        await drafter.received_all(router.session)
        assert (await described(verifier)).refused_frames == before + 3
        drafter.send_frame(**delta(text.whole, len(text.prompt) + 7, text.answer[8:12], epoch=5))
        await drafter.received_all(router.session)
        assert (await router.step()).accepted
        assert not drafter.inbox.of("closed")


async def test_a_drafter_drops_frames_of_another_epoch_and_counts_them(drafter: str, text: Text) -> None:
    async with upstream_of(drafter) as peer:
        before = await refused_by(peer.drafter)
        tokens = text.whole[:30]
        peer.stream.snapshot(tokens, epoch=2, credit=4)
        peer.stream.snapshot(tokens, epoch=0, credit=4)
        peer.stream.snapshot(tokens[:20], credit=4)
        assert (await peer.stream.inbox.take("delta")).root_position == 19
        peer.stream.commit(tokens, 20, epoch=2, digest=1)
        peer.stream.commit(tokens, 20, credit=16)
        await peer.stream.inbox.until(lambda: any(frame.root_position == 29 for frame in peer.stream.inbox.of("delta")))
        assert await refused_by(peer.drafter) == before + 3
        assert not peer.stream.inbox.of("subscribe")


async def test_a_new_epoch_may_start_lower_than_where_a_drafter_is(drafter: str, text: Text) -> None:
    async with upstream_of(drafter) as peer:
        stream, whole = peer.stream, text.whole

        async def root_is(tokens: list[int], attachment: int) -> bool:
            await stream.inbox.until(
                lambda: any(frame.root_position == len(tokens) - 1 for frame in stream.inbox.of("delta", attachment))
            )
            ours = [frame for frame in stream.inbox.of("delta", attachment) if frame.root_position == len(tokens) - 1]
            return all(frame.root_digest == extend(EMPTY, tokens) for frame in ours)

        stream.snapshot(whole[:60])
        assert await root_is(whole[:60], 1)
        higher = pb.AttachRequest(session_id=peer.subscribed.session_id, epoch=2, upstream=peer.upstream.address)
        await peer.drafter.Attach(higher)
        assert (await stream.inbox.take("unsubscribe")).attachment == 1
        again = await stream.inbox.take("subscribe")
        assert (again.epoch, again.attachment) == (2, 2)
        stream.snapshot(whole[:30], attachment=2, epoch=2)
        assert await root_is(whole[:30], 2)
        other = [*whole[:20], (whole[20] + 1) % 4096, *whole[21:45]]
        stream.snapshot(other, attachment=2, epoch=2)
        assert await root_is(other, 2)
        stream.snapshot(other[:44], attachment=2, epoch=2)
        assert await root_is(other[:44], 2)
        higher.epoch = 1  # of an owner that does not know yet that it is none
        await peer.drafter.Attach(higher)
        await peer.drafter.Detach(pb.DetachRequest(session_id=higher.session_id, epoch=1))
        await asyncio.sleep(0.1)
        assert not stream.inbox.of("subscribe")
        assert not stream.inbox.of("unsubscribe")
