"""Texts with drafts are those without, whatever the parameters."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from running import Vllm

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "sizes": {"type": "array", "items": {"enum": [1, 2]}}},
    "required": ["name", "sizes"],
    "additionalProperties": False,
}

PARAMETERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "warm": {"temperature": 0.7},
    "hot": {"temperature": 1.0},
    "top-k": {"temperature": 1.0, "top_k": 20},
    "top-p": {"temperature": 0.9, "top_p": 0.8},
    "min-p": {"temperature": 1.0, "min_p": 0.1},
    "bias": {"temperature": 1.0, "logit_bias": {420: 4.0, 333: 3.0, 500: -100.0}, "repetition_penalty": 1.1},
    "penalties": {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
    "greedy penalties": {"temperature": 0.0, "repetition_penalty": 1.2},
    "allowed ids": {"temperature": 1.0, "allowed_token_ids": [*range(300, 600)]},
    "bad words": {"temperature": 1.0, "bad_words": [" the", " a"]},
    "least tokens": {"temperature": 1.0, "min_tokens": 20, "stop_token_ids": [*range(300, 500)]},
    "no seed of its own": {"temperature": 0.0, "seed": None},
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_texts_do_not_depend_on_drafts(name: str, vllm: Vllm) -> None:
    plain = vllm.texts(48, drafted=False, **PARAMETERS[name])
    before = vllm.drafts.counts.accepted
    assert vllm.texts(48, drafted=True, **PARAMETERS[name]) == plain
    assert vllm.drafts.counts.accepted > before


@pytest.mark.parametrize("name", ["min-p", "bias"])
def test_filters_that_vllm_refuses_with_drafts_filter(name: str, vllm: Vllm) -> None:
    free = vllm.texts(48, drafted=True, temperature=1.0)
    assert vllm.texts(48, drafted=True, **PARAMETERS[name]) != free


def test_an_answer_follows_its_schema_and_not_the_drafts(vllm: Vllm) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    params = {"temperature": 1.0, "structured_outputs": StructuredOutputsParams(json=SCHEMA)}
    plain = vllm.outputs(120, drafted=False, prompts=4, **params)
    drafted = vllm.outputs(120, drafted=True, prompts=4, **params)
    assert [it.token_ids for it in drafted] == [it.token_ids for it in plain]
    complete = [json.loads(it.text) for it in drafted if it.finish_reason == "stop"]
    assert all(set(it) == {"name", "sizes"} for it in complete)


def test_log_probabilities_are_those_without_drafts(vllm: Vllm) -> None:
    plain = vllm.outputs(32, drafted=False, temperature=1.0, logprobs=3)
    drafted = vllm.outputs(32, drafted=True, temperature=1.0, logprobs=3)
    for one, other in zip(plain, drafted, strict=True):
        assert one.token_ids == other.token_ids
        for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
            assert {token: it.rank for token, it in mine.items()} == {token: it.rank for token, it in theirs.items()}
            for token, it in mine.items():
                assert it.logprob == pytest.approx(theirs[token].logprob, abs=1e-3)


def test_mixed_requests_keep_their_own_ways_to_draw(vllm: Vllm) -> None:
    from vllm import SamplingParams

    def texts(drafted: int) -> list[list[int]]:
        ways = ((0.0, 0), (1.0, 1), (0.0, 1), (0.8, 1))
        params = [
            SamplingParams(
                temperature=temperature,
                seed=number,
                max_tokens=40,
                extra_args={"outrider_drafts": drafted, "outrider_shared_noise": noise},
            )
            for number, (temperature, noise) in enumerate(ways)
        ]
        asked = [{"prompt_token_ids": [301 + number, 17, 25, 77]} for number in range(len(ways))]
        return [list(it.outputs[0].token_ids) for it in vllm.llm.generate(asked, params, use_tqdm=False)]

    assert texts(1) == texts(0)


def test_a_text_ends_where_the_context_does(vllm: Vllm) -> None:
    from vllm import SamplingParams

    asked = [{"prompt_token_ids": [301 + place % 200 for place in range(length)]} for length in (240, 250, 255, 30)]
    texts = [
        [
            (list(it.outputs[0].token_ids), it.outputs[0].finish_reason)
            for it in vllm.llm.generate(
                asked,
                SamplingParams(temperature=1.0, seed=5, max_tokens=60, ignore_eos=True,
                               extra_args={"outrider_drafts": drafted, "outrider_shared_noise": 1}),
                use_tqdm=False,
            )
        ]
        for drafted in (0, 1)
    ]  # fmt: skip
    assert texts[0] == texts[1]
    assert [len(tokens) for tokens, _ in texts[1]] == [16, 6, 1, 60]


def test_shared_noise_draws_as_vllm_does(vllm: Vllm) -> None:
    """Chi-square of both ways to draw against each other, over all texts of two tokens from five."""
    count, ids = 1200, [310, 402, 350, 420, 333]
    drawn = {}
    for noise in (False, True):
        found: Counter[tuple[int, ...]] = Counter()
        for first in range(0, count, 100):
            from vllm import SamplingParams

            said = {"outrider_drafts": int(noise), "outrider_shared_noise": int(noise)}
            params = [
                SamplingParams(temperature=1.0, seed=first + it, max_tokens=2, allowed_token_ids=ids, extra_args=said,
                               ignore_eos=True)
                for it in range(100)
            ]  # fmt: skip
            asked = [{"prompt_token_ids": [301, 17, 25, 1012, 9, 77]}] * 100
            found.update(tuple(it.outputs[0].token_ids) for it in vllm.llm.generate(asked, params, use_tqdm=False))
        drawn[noise] = found
    outcomes = [it for it in drawn[False] | drawn[True] if drawn[False][it] + drawn[True][it] >= 10]
    assert len(outcomes) > 5
    square = sum((drawn[True][it] - drawn[False][it]) ** 2 / (drawn[True][it] + drawn[False][it]) for it in outcomes)
    assert square < _quantile(len(outcomes) - 1)


def _quantile(freedom: int) -> float:
    """The quantile 0.9999 of the chi-square distribution, by Wilson and Hilferty's approximation."""
    spread = 2.0 / (9.0 * freedom)
    return float(freedom * (1.0 - spread + 3.719 * spread**0.5) ** 3)


def test_finished_requests_are_forgotten(vllm: Vllm) -> None:
    vllm.texts(4, drafted=True, prompts=20, temperature=1.0)
    vllm.texts(4, drafted=False, prompts=1, temperature=1.0)
    assert len(vllm.drafts.rows) <= 1  # vLLM tells the end of its last request with the next step
    assert len(vllm.drafter._terms) <= 2
    assert len(vllm.drafter._noises) <= 2
