"""`outrider verify`: a cluster that is exact passes, and a token that is not the target's own is a bug with its gap."""

from __future__ import annotations

import asyncio
import json
import math
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer

from outrider.cli.verification.cases import VerifyCase, VerifyPrompt, compare, plan, read_prompts
from outrider.cli.verification.compare import TOLERANCE, Difference, Verdict, difference
from outrider.cli.verification.distribution_check import p_value
from outrider.cli.verification.reference import Reference
from outrider.cli.verification.verify import last_line
from outrider.client import Generation
from outrider.core.sampling.noise import gumbel_row
from outrider.core.session.contract import Contract
from outrider.errors import CheckpointError, ConfigError, Overloaded
from tests.cli.verification.test_compare import generation
from tests.engine.small_adapters import make_adapter

ROOT = Path(__file__).parents[3]
TARGET = ROOT / "models" / "target"
PROMPT = VerifyPrompt("p", "import os\n", (1, 2, 3), b"digest")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "outrider.cli", "verify", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def test_the_reference_models_are_exact(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = run("--count", "1", "--seeds", "2", "--max-tokens", "160", "--json", str(report))  # outlasts a slow start
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == ["starting Redis, a verifier, a drafter and a router ..."]  # no library's noise
    table, last = done.stdout.splitlines()[:-1], done.stdout.splitlines()[-1]
    assert [line.split()[0] for line in table] == ["near", "T", "─" * 77, "0", "0.8"]
    match = re.fullmatch(
        r"verify: texts=3 tokens=960 identical=(\d) near_ties=(\d) bugs=0 reference_near_ties=\d reference_bugs=0", last
    )
    assert match, last
    assert int(match[1]) + int(match[2]) == 3
    entries = json.loads(report.read_text(encoding="utf-8"))
    assert [len(entry["plain_tokens"]) for entry in entries] == [160, 160, 160]
    assert sum(entry["accepted"] for entry in entries) > 0


def test_texts_over_kv_in_int8_are_exact_and_need_no_transformers() -> None:
    done = run("--count", "1", "--seeds", "1", "--max-tokens", "80", "--kv-dtype", "int8")
    assert done.returncode == 0, done.stderr
    assert "Not compared with transformers: KV is int8." in done.stdout
    assert re.search(r"^verify: texts=2 tokens=320 identical=2 near_ties=0 bugs=0 ", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (("--target", "nowhere", "--no-reference"), "nowhere/tokenizer.json"),
        (("--address", "127.0.0.1:1", "--checkpoint", "models/target", "--no-reference"), "no router can be reached"),
        (("--address", "127.0.0.1:1"), "checkpoint"),
        (("--prompts", "nowhere.jsonl", "--no-reference"), "nowhere.jsonl"),
        (("--rule", "hopeful"), "'block-verification'"),
        (("--rule", "typical-acceptance"), "typical-acceptance is lossy"),
        (
            ("--rule", "target-match", "--no-reference"),
            "at temperature 0.8 a text under target-match is a separate sample",
        ),
    ],
)
def test_an_impossible_verification_is_refused_in_one_line(arguments: tuple[str, ...], fragment: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert fragment in done.stderr
    assert "Traceback" not in done.stderr


class Script:
    """A client whose speculative answers may be wrong, and which has no room at first."""

    def __init__(self, plain: Generation, speculative: Generation, full: int = 0) -> None:
        self.full = full
        self.rules: set[tuple[str | None, str]] = set()
        self._answers = {"off": plain, "fixed": speculative}

    async def generate(self, prompt: Any, *, speculation: str | None, **options: Any) -> Generation:
        await asyncio.sleep(0)
        assert options["tokenizer_digest"] == PROMPT.digest
        if self.full:
            self.full -= 1
            raise Overloaded("all slots are in use", retry_after=0.01)
        self.rules.add((speculation, options["rule"]))
        return self._answers[speculation]


class Placed:
    """A reference to which greedy texts are right, and whose quantiles are given."""

    def __init__(self, second: float = 0.5) -> None:
        self._quantiles = np.array([0.25, second])

    def difference(self, *_: Any) -> None:
        return None

    def quantiles(self, *_: Any) -> NDArray[np.float64]:
        return self._quantiles


async def cases(plain: Generation, speculative: Generation) -> list[VerifyCase]:
    client: Any = Script(plain, speculative)
    work = plan([PROMPT], [0.0, 0.8], 2)
    return [case async for case in compare(client, work, None, tolerance=TOLERANCE["float32"])]


async def test_a_wrong_token_is_a_bug_reported_with_its_position_and_gap() -> None:
    found = await cases(generation([1, 2, 3], [9, 4.5, 9]), generation([1, 7, 3], [9, 5.5, 9]))
    assert [case.verdict for case in found] == [Verdict.BUG] * 3
    assert found[0].difference == Difference(1, 2, 7, 4.5)
    assert last_line(found).startswith("verify: texts=3 tokens=18 identical=0 near_ties=0 bugs=3 ")


async def test_rounding_is_a_near_tie_and_another_end_is_a_bug() -> None:
    near = await cases(generation([1, 2], [9, 5e-4]), generation([1, 3], [9, 9]))
    assert {case.verdict for case in near} == {Verdict.NEAR_TIE}
    text = await cases(generation([1]), replace(generation([1]), text="other"))
    assert {(case.verdict, case.difference) for case in text} == {(Verdict.BUG, None)}


async def test_a_full_cluster_is_waited_for() -> None:
    client: Any = Script(generation([1]), generation([1]), full=5)
    found = [case async for case in compare(client, plan([PROMPT], [0.0], 1), None, tolerance=1e-3)]
    assert [case.verdict for case in found] == [Verdict.IDENTICAL]
    assert client.full == 0


async def test_texts_under_rules_of_draws_are_compared_at_temperature_0_alone() -> None:
    reference: Any = Placed()
    client: Any = Script(generation([1, 2], [9, 9]), generation([1, 2], [float("nan")] * 2))
    work = plan([PROMPT], [0.0, 0.8], 3)
    found = [
        case
        async for case in compare(client, work, reference, tolerance=TOLERANCE["float32"], rule="block-verification")
    ]
    assert client.rules == {("off", "shared-noise"), ("fixed", "block-verification")}
    assert [(case.verdict, case.plain is None, case.quantiles) for case in found] == [
        (Verdict.IDENTICAL, False, ()),
        *[(None, True, (0.25, 0.5))] * 3,
    ]
    assert last_line(found).endswith(" tokens=10 identical=1 near_ties=0 bugs=0 reference_near_ties=0 reference_bugs=0 "
                                     "drawn=6 law=kept")  # fmt: skip


async def test_a_draw_that_the_target_cannot_make_is_a_bug() -> None:
    reference: Any = Placed(math.nan)
    client: Any = Script(generation([1, 2]), generation([1, 2]))
    work = plan([PROMPT], [0.8], 1)
    (case,) = [case async for case in compare(client, work, reference, tolerance=1e-3, rule="target-match")]
    assert (case.reference_verdict, case.reference_difference) == (Verdict.BUG, Difference(1, 2, None, math.inf))


def test_draws_of_no_two_prompts_share_a_seed() -> None:
    work = plan([PROMPT, PROMPT._replace(name="q")], [0.8], 3)
    assert len({seed for _, _, seed in work}) == len(work) == 6


def test_an_unknown_gap_explains_nothing() -> None:
    parted = difference([1], [2], [float("nan")], [])
    assert parted is not None
    assert parted.judged(1e-3) is Verdict.BUG


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(TARGET)


def ranked(reference: Reference, prompt: Sequence[int], answer: Sequence[int], contract: Contract) -> list[int]:
    """Tokens by their logits in `transformers` after a text, best first, noise included."""
    logits = reference.logits(prompt, [*answer, 0])[-1]
    noise = gumbel_row(contract.seed, contract.choice, len(prompt) + len(answer), len(logits))
    return np.argsort(-(logits / contract.temperature + noise)).tolist()


def test_transformers_finds_the_token_that_was_tampered_with(reference: Reference) -> None:
    (prompt,) = read_prompts(TARGET, None, ["def add(a, b):\n"], 1)
    contract = Contract(seed=3, max_tokens=8, temperature=0.8)
    answer: list[int] = []
    while len(answer) < 8:
        answer.append(ranked(reference, prompt.tokens, answer, contract)[0])
    assert reference.difference(prompt.tokens, answer, contract, 1e-3) is None
    assert reference.difference(prompt.tokens, [], contract, 1e-3) is None
    for wrong in ((answer[5] + 1) % 4096, 4096 + 7, -1):  # two of them do not exist
        parted = reference.difference(prompt.tokens, [*answer[:5], wrong, *answer[6:]], contract, 1e-3)
        assert parted is not None
        assert (parted.position, parted.first, parted.second) == (5, wrong, answer[5])
        assert parted.judged(1e-3) is Verdict.BUG


def test_a_near_tie_hides_no_bug(reference: Reference) -> None:
    prompt, contract, tolerance = [1, 2, 3], Contract(seed=3, max_tokens=20, temperature=0.8), 0.25
    best = ranked(reference, prompt, [], contract)
    answer = [best[1]]  # it is 0.12 behind the first, the third is 0.6 behind
    while len(answer) < 20:
        answer.append(ranked(reference, prompt, answer, contract)[0])
    parted = reference.difference(prompt, answer, contract, tolerance)
    assert parted is not None
    assert (parted.position, parted.judged(tolerance)) == (0, Verdict.NEAR_TIE)
    answer[12] = (answer[12] + 1) % 4096
    parted = reference.difference(prompt, answer, contract, tolerance)
    assert parted is not None
    assert (parted.position, parted.judged(tolerance)) == (12, Verdict.BUG)
    # Nor does it excuse a token that was not one of the two.
    parted = reference.difference(prompt, [best[2]], contract, tolerance)
    assert parted is not None
    assert parted.judged(tolerance) is Verdict.BUG


def test_tokens_drawn_from_transformers_probabilities_have_uniform_quantiles(reference: Reference) -> None:
    contract, dice, places = Contract(seed=3, max_tokens=8, temperature=0.8), np.random.default_rng(1), []
    for start in range(40):
        prompt = [1, 2, start]
        logits = reference.logits(prompt, [0])[-1].astype(float)
        drawn = np.argmax(logits / contract.temperature + dice.gumbel(size=(8, len(logits))), axis=1).tolist()
        places += [reference.quantiles(prompt, [token], contract, dice)[0] for token in drawn]
    assert p_value(np.array(places)) > 0.01
    assert np.isnan(reference.quantiles(prompt, [4096 + 7, 1], contract, dice)).tolist() == [True, False]


def test_a_checkpoint_that_is_cut_short_is_named(tmp_path: Path) -> None:
    for file in TARGET.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes()[:10_000])
    with pytest.raises(CheckpointError, match=f"{tmp_path}: transformers cannot load it"):
        Reference(tmp_path)


def test_prompts_come_from_the_command_line_or_a_file(tmp_path: Path) -> None:
    assert [prompt.name for prompt in read_prompts(TARGET, None, ["a", "b"], 1)] == ["prompt-1", "prompt-2"]
    file = tmp_path / "p.jsonl"
    file.write_text('{"id": "x", "prompt": "a"}\n{"id": "y", "prompt": "b"}\n', encoding="utf-8")
    assert [prompt.name for prompt in read_prompts(TARGET, file, None, 1)] == ["x"]
    file.write_text("nonsense", encoding="utf-8")
    with pytest.raises(ConfigError, match="JSON lines"):
        read_prompts(TARGET, file, None, 1)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        read_prompts(tmp_path, None, ["a"], 1)


def test_texts_of_an_adapter_that_follow_a_grammar(tmp_path: Path) -> None:
    adapter = make_adapter(TARGET, tmp_path / "adapters" / "formal", deviation=0.1)
    pattern = "(north|south), [0-9]{2} miles( and [a-z]{3,9}){3,8}"
    done = run(
        *("--count", "1", "--seeds", "2", "--max-tokens", "80", "--adapter", str(adapter)),
        *("--regex", pattern, "--json", str(report := tmp_path / "report.json")),
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert re.search(r"^verify: texts=3 .* bugs=0 reference_near_ties=\d reference_bugs=0$", done.stdout, re.MULTILINE)
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    for entry in json.loads(report.read_text(encoding="utf-8")):
        assert re.match("(north|south), [0-9]{2} miles and ", tokenizer.decode(entry["plain_tokens"]))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--schema", "missing.json"), "missing.json: is no JSON schema"),
        (("--schema", "pyproject.toml"), "pyproject.toml: is no JSON schema"),
        (("--schema", "models/target/config.json", "--regex", "a"), "does not go with --schema"),
        (("--address", "127.0.0.1:1", "--checkpoint", "models/target", "--adapter", "x"), "the adapter's name"),
        (("--adapter", "models/target"), "PEFT cannot load it"),
    ],
    ids=str,
)
def test_an_invalid_text_option_is_refused_by_name(arguments: tuple[str, ...], problem: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert problem in done.stderr
