"""llama.cpp's rows without llama.cpp: decoding over a model made of arithmetic, the worker's protocol, the build."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bench.peers import llama_cpp
from bench.peers.llama_cpp import ADVICE, BUILD_REQUIREMENTS, CHAINS, VERSION, LlamaRow, build, cmake_commands
from bench.peers.llama_worker import MOST_NGRAM, PASS_CONTEXT, ChainDrafter, LookupDrafter, generate, greedy, serve
from bench.rows.requests import BenchRequest
from outrider.errors import ConfigError, Unavailable

VOCABULARY, UNPADDED = 24, 20
PROMPT = [3, 1, 4, 1, 5]


class Arithmetic:
    """A model whose logits are a function of all tokens before. Its best id of all must never be chosen."""

    def __init__(self, noise: float = 0.0) -> None:
        self.kv: list[int] = []
        self.passes: list[int] = []  # rows of each
        self.noise = noise

    def decode(self, tokens: Sequence[int], start: int, outputs: int) -> NDArray[np.float32]:
        assert start == len(self.kv), "a gap in the KV, or rows that were not dropped"
        assert tokens
        self.passes.append(len(tokens))
        rows = []
        for token in tokens:
            self.kv.append(token)
            dice = np.random.default_rng(self.kv)
            row = dice.normal(size=VOCABULARY)
            row[:UNPADDED] += self.noise * np.random.default_rng([*self.kv, 1]).normal(size=UNPADDED)
            row[UNPADDED:] = 100.0
            rows.append(row)
        return np.array(rows[len(rows) - outputs :], np.float32)

    def forget(self, start: int) -> None:
        del self.kv[start:]


def request(chain: int, tokens: int = 40, prompt: Sequence[int] = PROMPT) -> dict[str, Any]:
    return {"prompt": list(prompt), "temperature": 0.0, "seed": 1, "max_tokens": tokens, "chain": chain}


def decoded(chain: int, noise: float = 0.5, prompt: Sequence[int] = PROMPT) -> tuple[dict[str, Any], Arithmetic]:
    target = Arithmetic()
    drafter = ChainDrafter(Arithmetic(noise), UNPADDED)
    return generate(target, drafter, greedy, UNPADDED, request(chain, prompt=prompt)), target


def test_plain_decoding_takes_a_pass_for_each_token_and_never_a_padded_id() -> None:
    sample, target = decoded(0)
    assert sample["steps"] == len(sample["tokens"]) == 40
    assert max(sample["tokens"]) < UNPADDED
    assert target.passes == [len(PROMPT) - 1, *([1] * 40)]
    assert sample["arrivals"] == sorted(sample["arrivals"])


@pytest.mark.parametrize("chain", [3, 6])
@pytest.mark.parametrize("noise", [0.0, 0.5, 9.0])
@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:1]], ids=["five", "one"])
def test_a_drafted_text_is_the_plain_one(chain: int, noise: float, prompt: list[int]) -> None:
    plain, _ = decoded(0, prompt=prompt)
    sample, target = decoded(chain, noise, prompt)
    assert sample["tokens"] == plain["tokens"]
    assert len(sample["arrivals"]) == 40
    assert max(target.passes[1:]) <= chain + 1
    if noise == 0.0:
        assert sample["steps"] == -(-40 // (chain + 1))  # a drafter that is always right
    if noise == 0.5:
        assert sample["steps"] < 40
    # Each pass gives what came at one time.
    assert len(set(sample["arrivals"])) == sample["steps"]


def test_prompt_lookup_asks_for_what_followed_and_changes_no_text() -> None:
    asked: list[tuple[int, int]] = []

    def find(text: NDArray[np.intc], ngram: int, count: int) -> NDArray[np.intc]:
        asked.append((ngram, count))
        return text[-1:] if len(text) % 2 else text[:0]  # a guess, or none

    found = generate(Arithmetic(), LookupDrafter(find), greedy, UNPADDED, request(2))
    assert found["tokens"] == decoded(0)[0]["tokens"]
    assert {*asked} <= {(MOST_NGRAM, 2), (MOST_NGRAM, 1), (MOST_NGRAM, 0)}


def test_a_sampled_text_stays_equal_with_drafts() -> None:
    def texts(chain: int) -> list[int]:
        dice = random.Random(5)

        def draw(logits: NDArray[np.float32]) -> int:
            return dice.choices(range(UNPADDED), np.exp(3.0 * logits).tolist())[0]

        drafter = ChainDrafter(Arithmetic(0.2), UNPADDED)
        tokens: list[int] = generate(Arithmetic(), drafter, draw, UNPADDED, request(chain))["tokens"]
        return tokens

    assert texts(0) == texts(3) == texts(6)


def test_a_pass_is_timed_behind_its_context_and_leaves_no_rows_behind() -> None:
    model = Arithmetic()
    lines = [{"rows": 8}, {"rows": 2}, {"prompt_rows": 9}, {"rows": 4}]
    seconds: list[Any] = []
    serve(model, None, None, lambda *_: None, UNPADDED, map(json.dumps, lines), seconds.append)  # type: ignore[arg-type, return-value]
    assert all(0.0 < it < 10.0 for it in seconds)
    assert model.passes == [PASS_CONTEXT, 8, 8, 2, 2, 9, PASS_CONTEXT, 4, 4]
    assert len(model.kv) == PASS_CONTEXT


def test_the_worker_answers_each_line(tmp_path: Path) -> None:
    seeds: list[tuple[float, int]] = []
    closed: list[bool] = []

    class Sampler:
        def __call__(self, logits: NDArray[np.float32]) -> int:
            assert len(logits) == UNPADDED
            return int(logits.argmin())

        def close(self) -> None:
            closed.append(True)

    def sampler(temperature: float, seed: int) -> Any:
        seeds.append((temperature, seed))
        return Sampler()

    answers: list[Any] = []
    lines = [request(0), request(3) | {"temperature": 1.0, "seed": 2**40}, {"rows": 2}]
    lines.append({"logits": [1, 2, 3], "file": str(tmp_path / "logits.npy")})
    drafter = ChainDrafter(Arithmetic(), UNPADDED)
    serve(Arithmetic(), drafter, None, sampler, UNPADDED, map(json.dumps, lines), answers.append)
    greedy_text, drawn_text, seconds, _ = answers
    assert len(greedy_text["tokens"]) == len(drawn_text["tokens"]) == 40
    assert greedy_text["tokens"] != drawn_text["tokens"]
    assert seeds == [(1.0, 2**40)]
    assert closed == [True]
    assert seconds > 0.0
    assert np.load(tmp_path / "logits.npy").shape == (3, VOCABULARY)


async def test_rows_differ_by_the_length_of_their_chain() -> None:
    lines: list[dict[str, Any]] = []

    class Process:
        async def request(self, line: str) -> bytes:
            lines.append(json.loads(line))
            return json.dumps(decoded(lines[-1]["chain"])[0]).encode()

    process: Any = Process()
    rows = llama_cpp.rows_of_worker(process)
    assert [row.name for row in rows] == ["llama.cpp", "llama.cpp-draft-3", "llama.cpp-draft-6"]
    ask = BenchRequest(tuple(PROMPT), 0.0, 7, 40)
    samples = [await row.generate(ask) for row in rows]
    assert [line["chain"] for line in lines] == [*CHAINS.values()] == [0, 3, 6]
    assert len({sample.tokens for sample in samples}) == 1
    assert samples[0].steps > samples[1].steps
    assert isinstance(rows[0], LlamaRow)


async def test_an_existing_build_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "version").write_text(VERSION)
    monkeypatch.setattr(llama_cpp.shutil, "which", lambda name: None)
    progress: list[str] = []
    await build(progress.append, tmp_path)
    assert progress == []


async def test_a_missing_compiler_is_reported_with_the_flag_that_skips_llama_cpp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_cpp.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"no C\+\+ compiler .* --no-llama-cpp"):
        await build(lambda what: None, tmp_path / "build")
    assert not (tmp_path / "build").exists()


async def test_a_missing_network_is_reported_with_the_failed_step_and_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[tuple[str, ...]] = []

    async def output(failure: str, *command: str) -> bytes:
        commands.append(command)
        if "pip" in command[0]:
            raise Unavailable(f"{failure}:\nno route to host")
        return b""

    monkeypatch.setattr(llama_cpp, "output", output)
    monkeypatch.setattr(llama_cpp.shutil, "which", lambda name: name)
    with pytest.raises(ConfigError, match="cannot install what it is built with:\nno route to host") as refused:
        await build(lambda what: None, tmp_path / "build")
    assert str(refused.value).endswith(ADVICE)
    assert commands[-1][-len(BUILD_REQUIREMENTS) :] == BUILD_REQUIREMENTS
    assert not (tmp_path / "build" / "version").exists()


def test_only_the_library_is_built_and_for_this_processor() -> None:
    configure, compile_ = cmake_commands(Path("/source"), Path("/build"))
    assert configure[0] == compile_[0] == "/build/env/bin/cmake"
    assert "-DGGML_NATIVE=ON" in configure
    for what in ("TESTS", "TOOLS", "EXAMPLES", "SERVER", "COMMON"):
        assert f"-DLLAMA_BUILD_{what}=OFF" in configure
    assert compile_[compile_.index("--target") + 1] == "llama"
