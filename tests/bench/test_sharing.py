"""The benchmark of shared prefixes measures what it names, and its figures show the sharing."""

from bench import sharing
from tests.engine.small_checkpoints import MODELS


async def test_prompts_that_begin_alike_have_their_first_token_sooner() -> None:
    found = await sharing.first_tokens(MODELS / "target", rounds=3, threads=1, prompt=600, shared=540)
    assert (len(found.shared), len(found.alone)) == (3, 3)
    assert min(found.shared) < min(found.alone)


def test_sessions_that_begin_alike_share_their_memory() -> None:
    held, apart = sharing.memory(MODELS / "drafter", threads=1, sessions=4, length=200, shared=160)
    assert held == apart * (10 + 4 * 3) / (4 * 13)  # pages of sixteen tokens: ten shared, three of each session's own
