"""What the benchmark on real text makes of its takes, and its prompts."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from bench.real import BOTH, DRAFTER, LOOKUP, OURS, PLAIN, PROMPTS, RealTake, last_line, ratio, steps

SPEEDS = {PLAIN: 10.0, LOOKUP: 12.0, DRAFTER: 20.0, BOTH: 24.0, "llama.cpp": 5.0, "llama.cpp-draft-3": 8.0}


def takes(temperature: float, slower: float = 1.0) -> list[RealTake]:
    """Of two prompts; the second takes `slower` times as long for all rows but llama.cpp's."""
    return [
        RealTake(row, "chat", prompt, temperature, 0, speed / (slower if prompt and row in OURS else 1), speed / 10)
        for prompt in range(2)
        for row, speed in SPEEDS.items()
    ]


def test_a_row_is_compared_with_the_fastest_of_others_at_each_place() -> None:
    peers = ("llama.cpp", "llama.cpp-draft-3")
    assert ratio(takes(0.0), DRAFTER, peers) == 20 / 8
    assert ratio(takes(0.0, 2.0), DRAFTER, peers) == pytest.approx((20 / 8 + 10 / 8) / 2)
    assert ratio(takes(0.0, 2.0), DRAFTER, (PLAIN,)) == 2.0
    assert steps(takes(0.0), BOTH) == 2.4


def test_the_last_line_has_the_best_way_at_both_temperatures() -> None:
    line = last_line(takes(0.0) + takes(1.0), ("llama.cpp", "llama.cpp-draft-3"), "1B")
    assert line.startswith(
        "real: target=1B over_peers_t0=3.00 over_plain_t0=2.40 tokens_a_step_t0=2.40 over_peers_t1=3.00"
    )


def test_every_category_has_ten_prompts() -> None:
    lines = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    counts = Counter(line["category"] for line in lines)
    assert counts == dict.fromkeys(("chat", "code", "summary", "translation", "json"), 10)
    assert len({line["prompt"] for line in lines}) == 50
