"""The model can fail: it finds out whatever rule is broken on purpose, and does not mind what is harmless.

Half of these break the model's own stand-ins for Redis and a verifier (`reference.Owned`, `reference.Store`,
`redis.Owned`, `Verifier`): they prove that the model would find such a violation. What breaks the product, by patches
of its files, is in `tests/mutants`; those here that do so as well show that the model, too, finds them out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis.stateful import run_state_machine_as_test

import router.sessions.takeover
import router.sessions.token_log
import verifier_svc.session
from outrider.core.tree.committed_window import CommittedWindow
from outrider.core.tree.token_tree import TokenTree
from outrider.errors import Conflict, NotFound
from tests.model import redis
from tests.model.redis import Violation
from tests.model.routing import stand_in
from tests.model.state_machine import ClusterMachine
from tests.model.verifying import Verifier
from tests.store import reference

Break = Callable[[pytest.MonkeyPatch], None]

ENOUGH = settings(
    max_examples=20_000,  # it stops at the first that is found out; the rarest takes some two thousand
    stateful_step_count=45,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    verbosity=Verbosity.quiet,
    suppress_health_check=list(HealthCheck),
)


def a_token_is_sent_before_it_is_durable(patch: pytest.MonkeyPatch) -> None:
    append = router.sessions.token_log.TokenLog.append

    async def eager(self: Any, *arguments: Any, **more: Any) -> None:
        writing = asyncio.ensure_future(append(self, *arguments, **more))
        await asyncio.sleep(0)
        if writing.done():
            writing.result()

    patch.setattr(router.sessions.token_log.TokenLog, "append", eager)


def an_append_ignores_who_owns(patch: pytest.MonkeyPatch) -> None:
    def careless(self: Any, length: int) -> Any:
        session = self._store.find(self.session_id)
        if session is None:
            raise NotFound(self.session_id)
        if session.record.length < length:
            raise Conflict(self.session_id)
        return session

    patch.setattr(reference.Owned, "_owned", careless)


def an_append_cannot_be_repeated(patch: pytest.MonkeyPatch) -> None:
    append = reference.Owned.append

    def once(self: Any, start: int, *arguments: Any, **more: Any) -> int:
        if self._owned(start).record.length > start:
            raise Conflict(self.session_id)
        return append(self, start, *arguments, **more)

    patch.setattr(reference.Owned, "append", once)


def an_append_changes_what_is_there(patch: pytest.MonkeyPatch) -> None:
    append = reference.Owned.append

    def longer(self: Any, start: int, tokens: Any, digest: int, **more: Any) -> int:
        return append(self, start, [*tokens, tokens[-1]] if start % 5 == 0 else tokens, digest, **more)

    patch.setattr(reference.Owned, "append", longer)


def an_epoch_is_given_out_twice(patch: pytest.MonkeyPatch) -> None:
    acquire = reference.Store.acquire

    def generous(self: Any, session_id: str, expected: int, owner: str) -> Any:
        record = self.get(session_id)
        if record.epoch == expected:
            return acquire(self, session_id, expected, owner)
        self.sessions[session_id].record = replace(record, owner=owner)
        return reference.Owned(self, session_id, record.epoch, owner, record.length)

    patch.setattr(reference.Store, "acquire", generous)


def a_resume_begins_one_token_early(patch: pytest.MonkeyPatch) -> None:
    unsent_parts = router.sessions.takeover.unsent_parts
    patch.setattr(
        router.sessions.takeover,
        "unsent_parts",
        lambda parts, position, offset: unsent_parts(parts, max(0, position - 1), offset),
    )


def a_resume_begins_one_character_late(patch: pytest.MonkeyPatch) -> None:
    unsent_parts = router.sessions.takeover.unsent_parts
    patch.setattr(
        router.sessions.takeover,
        "unsent_parts",
        lambda parts, position, offset: unsent_parts(parts, position, offset + bool(offset)),
    )


def a_verifier_ignores_the_window(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(verifier_svc.session.VerifierSession, "room", property(lambda self: self.end - len(self.tokens)))


def a_verifier_ignores_the_epoch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Verifier, "_refuses", lambda self, start, present: False)


def a_verifier_commits_what_its_drafters_send(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Verifier, "_next", lambda self, digest, node: next(iter(node.children), self._choose(digest)))


def an_owner_puts_nothing_back(patch: pytest.MonkeyPatch) -> None:
    async def refuse(self: Any, *what: Any) -> None:
        raise Conflict(self.session_id)

    patch.setattr(redis.Owned, "restore", refuse)


def an_owner_never_tries_again(patch: pytest.MonkeyPatch) -> None:
    async def once(self: Any, write: Any) -> Any:
        return await write()

    patch.setattr(router.sessions.token_log.TokenLog, "_retry_until_durable", once)


def a_cancel_that_does_nothing_is_confirmed(patch: pytest.MonkeyPatch) -> None:
    async def nothing(*arguments: Any) -> None:
        pass

    patch.setattr(router.sessions.takeover.Takeovers, "end", nothing)


def a_tree_forgets_to_let_go(patch: pytest.MonkeyPatch) -> None:
    def keep(self: Any, token: int, matched: Any) -> None:
        advance(
            self,
            token if token in self.root.children or not self.root.children else next(iter(self.root.children)),
            matched,
        )

    advance = TokenTree._advance
    patch.setattr(TokenTree, "_advance", keep)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "breaks",
    [
        a_token_is_sent_before_it_is_durable,
        an_append_ignores_who_owns,
        an_append_cannot_be_repeated,
        an_append_changes_what_is_there,
        an_epoch_is_given_out_twice,
        a_resume_begins_one_token_early,
        a_resume_begins_one_character_late,
        a_verifier_ignores_the_window,
        a_verifier_ignores_the_epoch,
        a_verifier_commits_what_its_drafters_send,
        an_owner_puts_nothing_back,
        an_owner_never_tries_again,
        a_cancel_that_does_nothing_is_confirmed,
        a_tree_forgets_to_let_go,
    ],
    ids=lambda breaks: str(breaks.__name__),
)
def test_the_state_machine_finds_the_mutation(breaks: Break, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks(monkeypatch)
    with pytest.raises(Violation):
        run_state_machine_as_test(ClusterMachine, settings=ENOUGH)


def test_a_stale_root_that_is_not_checked_costs_speed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A delta from another text adds nodes that are wrong; a wrong node is never committed."""
    monkeypatch.setattr(CommittedWindow, "check_root", lambda self, position, digest: None)
    run_state_machine_as_test(ClusterMachine, settings=settings(ENOUGH, max_examples=60))
