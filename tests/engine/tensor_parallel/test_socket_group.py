"""Ranks that are connected by sockets: they meet, turn strangers away, and give the same bits in every batch."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from outrider.core.sampling.sampler import Sampler
from outrider.core.session.contract import Contract
from outrider.engine.cpu.engine import CpuEngine
from outrider.engine.interface.features import Features
from outrider.engine.interface.settings import EngineSettings
from outrider.engine.tensor_parallel.group import RankLost
from tests.engine.ranked import leading, meet, meeting_point
from tests.engine.small_checkpoints import MODELS, Tree, assert_same, make_checkpoint, prompt, random_tokens

FFN = 96  # four ranks can share this width


@pytest.mark.parametrize("of", [2, 3, 5])
def test_all_ranks_meet_in_any_order(of: int) -> None:
    meeting = meeting_point()
    late = meet(of, meeting, range(1, of))
    time.sleep(0.1)
    groups = [it.result() for it in [*meet(of, meeting, [0]), *late]]
    try:
        for rank, group in enumerate(groups):
            assert (group.shard.rank, group.shard.of) == (rank, of)
            assert [found >= 0 for found in group.sockets] == [other != rank for other in range(of)]
        message = np.arange(200_000, dtype=np.uint8)
        with ThreadPoolExecutor(of) as pool:
            received = [pool.submit(group.receive) for group in groups[1:]]
            groups[0].send(message)
            assert all(np.array_equal(it.result(), message) for it in received)
            assert all(it.result() is None for it in [pool.submit(group.heartbeat) for group in groups])
    finally:
        for group in groups:
            group.close()


@pytest.mark.parametrize("hello", [b"", b"GET / HTTP/1.1\r\n\r\n" + bytes(100), b"outrider ranks 1" + bytes(26)])
def test_strangers_are_turned_away_and_the_group_still_meets(hello: bytes) -> None:
    meeting = meeting_point()
    (first,) = meet(2, meeting, [0])
    host, port = meeting.removeprefix("tcp://").partition("#")[0].split(":")
    while True:
        try:
            stranger = socket.create_connection((host, int(port)), 5.0)
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    with stranger:
        stranger.sendall(hello)
        if not hello:
            stranger.shutdown(socket.SHUT_WR)
        try:
            assert stranger.recv(1) == b""
        except ConnectionResetError:
            assert len(hello) > 42  # closed with bytes of it unread
    (second,) = meet(2, meeting, [1])
    for group in (first.result(), second.result()):
        group.close()


def test_a_rank_with_another_secret_is_refused() -> None:
    meeting = meeting_point()
    found = meet(2, meeting, [0], rendezvous_s=1.0) + meet(2, meeting.replace("secret", "guess"), [1], rendezvous_s=1.0)
    for rank, it in enumerate(found):
        with pytest.raises(RankLost, match=f"rank {rank} of 2 could not reach the others"):
            it.result()


@pytest.mark.parametrize("present", [0, 1])
def test_a_rank_that_meets_no_other_gives_up(present: int) -> None:
    (alone,) = meet(2, meeting_point(), [present], rendezvous_s=0.3)
    with pytest.raises(RankLost, match=f"rank {present} of 2 could not reach the others"):
        alone.result()


def test_a_rank_that_closes_or_sends_another_operation_is_lost() -> None:
    first, second = (it.result() for it in meet(2, meeting_point()))
    second.send(np.zeros(3, np.uint8))  # where a sign of life was due
    with pytest.raises(RankLost, match=r"rank 0 of 2 has lost another one: rank 1: .* is at another operation"):
        first.heartbeat()
    second.close()
    with pytest.raises(RankLost, match="rank 0 of 2 has lost another one: rank 1"):
        first.barrier()
    first.close()


@pytest.mark.parametrize("shape", ["biased", "one-kv-head-llama3", "untied-wide-heads"])
def test_two_ranks_give_the_logits_of_one(shape: str, tmp_path: Path) -> None:
    folder, text = make_checkpoint(tmp_path, shape, FFN), np.arange(50)
    alone = CpuEngine.load(folder, EngineSettings(dtype="float32", slots=1, threads=1))
    with leading(folder, 2) as engine:
        assert engine.parameters == alone.parameters
        assert_same(engine.forward([prompt(0, text)]), alone.forward([prompt(0, text)]))


@pytest.mark.parametrize("of", [2, 4])
@pytest.mark.parametrize(
    ("shape", "dtype", "kv_dtype"),
    [
        ("grouped", "float32", "auto"),
        ("biased", "bfloat16", "auto"),
        ("qwen3", "int8", "auto"),
        ("biased", "int8", "int8"),
    ],
)
def test_a_tokens_bits_do_not_depend_on_other_rows_of_the_pass(
    shape: str, dtype: str, kv_dtype: str, of: int, tmp_path: Path
) -> None:
    folder, random = make_checkpoint(tmp_path, shape, FFN), np.random.default_rng(4)
    with leading(folder, of, dtype=dtype, kv_dtype=kv_dtype) as engine:
        text = random_tokens(engine, random, 60)
        alone = np.concatenate([engine.forward([prompt(0, text[at : at + 1], at)]) for at in range(60)])
        assert engine.numerics == "invariant"
        assert engine.kv_dtype == kv_dtype
        neighbour = Tree.random(engine, random, 20)
        at_once = engine.forward([neighbour.segment(2, 0), prompt(1, text)])[20:]
        assert np.array_equal(at_once, alone)
        chunks = [(0, 7), (7, 8), (8, 41), (41, 60)]
        parts = [engine.forward([prompt(3, text[first:end], first)]) for first, end in chunks]
        assert np.array_equal(np.concatenate(parts), alone)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rank_0_chooses_from_all_tokens(temperature: float) -> None:
    contract = Contract(seed=5, max_tokens=100, temperature=temperature)
    text = np.random.default_rng(6).integers(0, 4096, 30)
    with leading(MODELS / "drafter", 2) as engine:
        sampler = Sampler(contract, engine.vocabulary, text.tolist(), 1, compiled=False)
        logits = engine.sample([prompt(0, text, wanted=1)], [sampler.draw(restricts=engine.restricts_tokens)])
        choice, expected = logits.choice(0), sampler.choose(logits.row(0).copy())
    assert choice is not None
    assert choice.token == expected.token
    assert choice.gap == pytest.approx(expected.gap, rel=1e-12, abs=1e-12)


def test_kv_pages_are_released_on_all_ranks() -> None:
    """A second text fits only where the first one's pages are free on every rank: each refuses a pass by itself."""
    page = 32_768  # bytes of one rank: 16 tokens, two layers, two heads of 64
    with leading(MODELS / "drafter", 2, rows=300, kv_memory=40 * page) as engine:
        memory = engine.memory(0, 0, 256)
        assert memory is not None
        text = np.random.default_rng(7).integers(0, 4096, 256)
        for slot in range(4):
            needed, free = engine.memory(slot, 0, 256) or (0, 0)
            assert needed <= free
            engine.forward([prompt(slot, text)])
            assert (engine.memory(slot, 0, 0) or (0, 0))[1] == free - needed
            engine.release(slot, 0)
    assert engine.kv_tokens


def test_features_are_the_whole_models(tmp_path: Path) -> None:
    folder, wanted = make_checkpoint(tmp_path, "grouped", FFN), Features((1, 2), all_rows=True)
    text = np.arange(20)
    alone = CpuEngine.load(folder, EngineSettings(dtype="float32", slots=1, threads=1, features=wanted))
    alone.forward([prompt(0, text)])
    with leading(folder, 2, features=wanted) as engine:
        engine.forward([prompt(0, text)])
        assert np.allclose(engine.hidden().numpy(), alone.hidden().numpy(), atol=1e-5)
