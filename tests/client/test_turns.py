"""Sessions of several turns, as the SDK shows them."""

from __future__ import annotations

import pytest

import outrider
from outrider import client as sdk
from outrider import errors
from tests.client.conftest import ScriptedRouter


async def test_a_session_lasts_over_its_turns_until_it_is_closed(router: ScriptedRouter) -> None:
    async with outrider.AsyncClient(router.address) as client:
        first = await client.generate("hello", timeout=5)
        second = await client.generate("and then?", session=first.session_id, timeout=5)
        assert (first.session_id, first.generation, first.cached_tokens) == ("session-1", 1, 0)
        assert (second.session_id, second.generation, second.cached_tokens) == ("session-1", 2, 7)
        assert (first.forked_from, second.forked_from) == ("", "")
        assert await client.get_session("session-1", timeout=5) == outrider.Session(
            session_id="session-1",
            model="toy",
            length=14,
            digest=2**63,
            generation=2,
            running=False,
            finish_reason=outrider.FinishReason.LENGTH,
            answer_position=9,
            epoch=2,
            verifier="v",
            drafters=("d",),
        )
        await client.close_session("session-1", timeout=5)
        with pytest.raises(errors.NotFound, match="session-1"):
            await client.get_session("session-1")
    assert router.closed_sessions == ["session-1"]


async def test_a_differing_history_names_the_session_that_it_forked_from(router: ScriptedRouter) -> None:
    async with outrider.AsyncClient(router.address) as client:
        first = await client.generate("hello", timeout=5)
        fork = await client.generate("other", session=first.session_id, whole_history=True, timeout=5)
    assert (fork.session_id, fork.forked_from, fork.generation) == ("fork-2", "session-1", 1)


async def test_an_empty_session_has_no_finish_reason(router: ScriptedRouter) -> None:
    async with outrider.AsyncClient(router.address) as client:
        session = await client.create_session("toy", timeout=5)
    assert (session.session_id, session.model, session.finish_reason) == ("empty", "toy", None)
    assert (session.generation, session.running) == (0, False)


async def test_a_turn_that_found_its_session_busy_cancels_nothing(router: ScriptedRouter) -> None:
    async with outrider.AsyncClient(router.address) as client, client.stream("endless") as stream:
        chunks = aiter(stream)
        await anext(chunks)
        with pytest.raises(errors.Busy):
            await client.generate("hello", session=stream.session_id)
        assert router.cancelled_sessions == []


def test_the_ordinary_client_has_sessions_too(router: ScriptedRouter) -> None:
    with outrider.Client(router.address) as client:
        assert client.create_session(timeout=5).session_id == "empty"
        first = client.generate("hello", timeout=5)
        assert client.generate("more", session=first.session_id, timeout=5).generation == 2
        assert client.get_session(first.session_id, timeout=5).length == 14
        client.cancel(first.session_id, timeout=5)
        client.close_session(first.session_id, timeout=5)
    assert router.cancelled_sessions == router.closed_sessions == ["session-1"]


@pytest.mark.parametrize("method", ["cancel", "create_session", "get_session", "close_session"])
def test_a_name_that_cannot_be_sent_is_refused_by_field(router: ScriptedRouter, method: str) -> None:
    with outrider.Client(router.address) as client, pytest.raises(errors.InvalidRequest) as caught:
        getattr(client, method)("\ud800")
    assert caught.value.field == ("model" if method == "create_session" else "session")


def test_the_package_exports_the_public_names_of_the_client() -> None:
    assert sorted(outrider.__all__) == sorted([*sdk.__all__, "errors"])
    assert all(getattr(outrider, name) is getattr(sdk, name) for name in sdk.__all__)
