"""A target writes what its drafter learns from: its own texts, with what it knew at each token."""

from __future__ import annotations

import json
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from outrider.cli.models.training_progress import last_line
from outrider.core.sampling.noise import gumbel_row
from outrider.engine.checkpoints.checkpoint import read_config
from outrider.engine.loading import load_engine
from outrider.errors import ConfigError
from outrider.training.acceptance import committed
from outrider.training.answers import teacher
from outrider.training.answers.answer_batches import (
    AnswerBatches,
    chosen_of,
    draft_ranks,
    expected_counts,
    frequent_ids,
)
from outrider.training.answers.answer_store import TOP, AnswerStore, TargetAnswer
from outrider.training.answers.dialogue import Dialogues, Prompt, read_prompts
from outrider.training.answers.teacher import Teacher
from outrider.training.recipe import DrafterRecipe, HeadsRecipe
from tests.training.family import begin, make_target, train

TEMPLATE = (
    "{% for it in messages %}<user>{{ it.content }}</user>{% endfor %}{% if add_generation_prompt %}<says>{% endif %}"
)


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a chat template."""
    folder = make_target(tmp_path_factory.mktemp("chatty") / "target")
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}), encoding="utf-8")
    return folder


def answered(target: Path, prompts: list[Prompt], count: int, most: int = 24) -> list[TargetAnswer]:
    engine = load_engine(target, dtype="float32", slots=3, rows=128, threads=1)
    texts = Teacher(engine, iter([*prompts, *repeat(prompts[0], 50)]), first_seed=40, most=most).texts()
    return list(islice((text for text in texts if text is not None), count))


def test_texts_are_the_targets_own_with_its_distribution(chatty: Path) -> None:
    asked = [Prompt((5, 6, 7), None), Prompt((9, 10), None), Prompt((11, 12), (20, 21))]
    model = AutoModelForCausalLM.from_pretrained(chatty).eval()
    texts = answered(chatty, asked, 6)
    assert {text.temperature for text in texts} == set(teacher.TEMPERATURES)
    for text in texts:
        import torch

        with torch.no_grad():
            logits = model(torch.from_numpy(text.tokens[None].astype(np.int64))).logits[0].double().numpy()
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        for row, place in enumerate(text.chosen):
            in_answer = place >= text.answer
            temperature = text.temperature if in_answer else 1.0
            scores = logits[place - 1]
            if temperature:
                scores = scores / temperature + gumbel_row(text.seed, 0, int(place), len(scores))
            assert scores.argmax() == text.tokens[place]
            ids = text.ids[row].astype(np.int64)
            assert np.abs(logprobs[place - 1][ids] - text.logprobs[row].astype(np.float64)).max() < 1e-2
            assert logprobs[place - 1][ids].min() >= np.sort(logprobs[place - 1])[-TOP] - 1e-5


def test_a_target_first_asks_and_then_answers(chatty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a turn is any of half of the tokens here, so that turns are short."""
    engine = load_engine(chatty, dtype="float32", slots=4, rows=200, threads=1)
    engine.eos_ids = tuple(range(0, 300, 8))
    (prompt,) = islice(Dialogues(chatty), 1)
    texts = Teacher(engine, repeat(prompt), first_seed=0, most=24).texts()
    found = list(islice((text for text in texts if text is not None), 12))
    for text in found:
        tokens = tuple(text.tokens.tolist())
        assert prompt.between is not None
        assert tokens[: text.asked.start] == prompt.before
        assert tokens[text.asked.stop : text.answer] == prompt.between
        assert text.asked.stop > text.asked.start
        assert not {*tokens[text.asked]} & {*engine.eos_ids}
        assert len(text.ids) == len(text.chosen)
    assert len({text.tokens.tobytes() for text in found}) == len(found)


def test_a_target_that_never_ends_its_instruction_is_refused(chatty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher, "MOST_ASKED", 2)
    monkeypatch.setattr(teacher, "MOST_LEFT_OUT", 20)
    engine = load_engine(chatty, dtype="float32", slots=4, rows=200, threads=1)
    engine.eos_ids = ()
    texts = Teacher(engine, repeat(Prompt((4, 5), (6,))), first_seed=0, most=24).texts()
    with pytest.raises(ConfigError, match="--prompts"):
        list(texts)


def some_answer(random: np.random.Generator, length: int = 9) -> TargetAnswer:
    tokens = random.integers(0, 300, length).astype(np.uint32)
    asked, answer = slice(2, 4), 6
    count = 2 + length - answer
    ids = np.stack([random.permutation(300)[:TOP] for _ in range(count)]).astype(np.uint32)
    return TargetAnswer(tokens, asked, answer, 0.5, 7, ids, -random.random((count, TOP)).astype(np.float16) - 3)


def equal(one: TargetAnswer, other: TargetAnswer) -> bool:
    same = (one.asked, one.answer, one.temperature, one.seed) == (
        other.asked,
        other.answer,
        other.temperature,
        other.seed,
    )
    return same and all(
        np.array_equal(getattr(one, name), getattr(other, name)) for name in ("tokens", "ids", "logprobs")
    )


@pytest.mark.parametrize("lost", ["tokens", "ids", "logprobs", "entries", ""])
def test_a_store_has_what_was_complete_when_its_process_was_killed(lost: str, tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    texts = [some_answer(random, length) for length in (9, 12, 8)]
    store = AnswerStore(tmp_path)
    for text in texts[:2]:
        store.add(text)
    if lost:  # a third one was not written as a whole
        with (tmp_path / lost).open("ab") as file:
            file.write(b"partial")
    again = AnswerStore(tmp_path)
    assert (len(again), again.chosen, again.last_seed) == (2, 5 + 8, 7)
    again.add(texts[2])
    for number, text in enumerate(texts):
        assert equal(again.read(number), text)
    assert again.lengths().tolist() == [9, 12, 8]


def test_each_pass_has_every_text_once_in_batches_of_one_length(tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    store = AnswerStore(tmp_path)
    for number in range(90):
        answer = some_answer(random, int(random.integers(8, 60)))
        answer.tokens[0] = number
        store.add(answer)
    texts = [*range(5, 90)]

    def batches() -> AnswerBatches:
        return AnswerBatches(store, texts, window=40, batch=3, seed=4, draft_ids=())

    own, seen, number = batches(), [], 0
    while len(seen) < 2 * len(texts):
        batch = own.batch(number)
        assert batch.tokens.numel() <= 3 * 40
        assert batch.tokens.count_nonzero() < own.tokens(number)
        seen += batch.tokens[:, 0].tolist()
        number += 1
    assert sorted(seen[: len(texts)]) == sorted(seen[len(texts) :]) == texts
    assert seen[: len(texts)] != seen[len(texts) :]
    for again in (number - 1, 3, number - 1):
        assert own.batch(again).tokens.equal(batches().batch(again).tokens)


def test_a_reduced_vocabulary_has_what_the_target_says_most(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path)
    random = np.random.default_rng(3)
    for _ in range(5):
        store.add(some_answer(random))
    weights = np.zeros(300)
    for number in range(5):
        it = store.read(number)
        np.add.at(weights, it.ids.astype(int), np.exp(it.logprobs.astype(float)))
    ids = frequent_ids(expected_counts(store), 50, (299,))
    assert ids == tuple(sorted([*np.argsort(-np.delete(weights, 299), kind="stable")[:49].tolist(), 299]))
    chosen = chosen_of(store.read(0), 100, draft_ranks(ids))
    original = store.read(0)
    for row, known in enumerate(np.isin(original.ids, ids)):
        assert np.array_equal(np.isfinite(chosen.logprobs[row]), known)
        assert np.array_equal(np.array(ids)[chosen.ids[row][known]], original.ids[row][known])


def settings(target: Path, output: Path, **changes: Any) -> DrafterRecipe:
    own = {"answers": 3000, "answer": 32, "window": 64, "batch": 4, "threads": 1, "precision": "float32"}
    own |= {"layers": (0, 2), "tokens": 40_000, "learning_rate": 1e-2, "measure_steps": 50, "held_out": 20}
    return DrafterRecipe(target=target, output=output, **own | changes)


def test_a_drafter_of_some_ids_learns_from_answers_to_a_users_prompts(chatty: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"say {word}"}) + "\n" for word in ("this", "that", "more")))
    output = tmp_path / "drafter"
    asked = tmp_path / "questions.jsonl"
    asked.write_text("".join(json.dumps({"prompt": f"what is {it}", "category": it}) + "\n" for it in ("here", "it")))
    recipe = settings(chatty, output, prompts=prompts, draft_vocabulary=120, questions=asked)
    training = train(recipe)
    figures = [json.loads(line) for line in (tmp_path / "drafter.run" / "figures.jsonl").read_text().splitlines()]
    assert figures[-1]["held_out_loss"] < 0.9 * figures[0]["held_out_loss"]
    assert set(figures[-1]["acceptance"]) == {"0", "0.7", "1"}
    assert set(figures[-1]["by_category"]) == {"here", "it"}
    assert sum(figures[-1]["acceptance"].values()) > sum(figures[0]["acceptance"].values())
    config = read_config(output)
    assert len(config.draft_ids) == 120
    assert 0 in config.draft_ids  # the end of a text
    engine = load_engine(output, dtype="bfloat16", slots=1, rows=32, threads=1)
    assert engine.vocabulary == 300
    assert training.progress.tokens >= 40_000
    measured, gain = training.progress.measured, training.expected_gain()
    assert measured is not None
    assert gain is not None
    assert 1.0 <= measured.by_chain[0] <= min(2.0, measured.by_chain[-1])
    assert gain.tokens_a_step == measured.by_chain[gain.depth - 1]
    turn = gain.pass_s + gain.depth * gain.level_s
    assert gain.speedup == pytest.approx(gain.tokens_a_step * gain.plain_s / turn)
    assert f"expected_speedup={gain.speedup:.2f}" in last_line(recipe, training.progress, gain)


def test_a_training_starts_from_a_drafter_of_some_ids(chatty: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("say this\nsay that\n")
    train(settings(chatty, first, prompts=prompts, draft_vocabulary=120, tokens=2000))
    ids = read_config(first).draft_ids
    train(settings(chatty, second, prompts=prompts, tokens=2000, layers=(), start=first, draft_vocabulary=50))
    assert read_config(second).draft_ids == ids
    figures = [(tmp_path / f"{it}.run" / "figures.jsonl").read_text().splitlines() for it in ("first", "second")]
    ended, began = json.loads(figures[0][-1]), json.loads(figures[1][0])
    assert began["held_out_loss"] == pytest.approx(ended["held_out_loss"], rel=0.05)  # saved in bfloat16


def test_ids_that_are_not_drafted_may_share_a_row(chatty: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("say this\nsay that\n")
    output = tmp_path / "drafter"
    train(settings(chatty, output, prompts=prompts, draft_vocabulary=120, tokens=2000, shared_row=True))
    ids, rows = read_config(output).draft_ids, load_file(output / "model.safetensors")["model.embed_tokens.weight"]
    own = load_file(chatty / "model.safetensors")["model.embed_tokens.weight"].to(rows.dtype)
    others = np.delete(np.arange(300), ids)
    assert bool((rows[list(ids)] == own[list(ids)]).all())
    assert bool((rows[others] == rows[others[0]]).all())


def test_heads_learn_from_answers(chatty: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("say this\nand that\n")
    own = {"answers": 3000, "answer": 32, "window": 32, "batch": 4, "threads": 1, "precision": "float32"}
    own |= {"tokens": 12_000, "learning_rate": 1e-2, "measure_steps": 40, "held_out": 20, "prompts": prompts}
    train(HeadsRecipe(target=chatty, output=tmp_path / "heads", kind="medusa", depth=2, **own))
    figures = [json.loads(line) for line in (tmp_path / "heads.run" / "figures.jsonl").read_text().splitlines()]
    assert figures[-1]["held_out_loss"] < 0.95 * figures[0]["held_out_loss"]


def test_a_training_goes_on_with_the_texts_that_were_written(chatty: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("say this\nand that\n")
    whole, parts = (settings(chatty, tmp_path / name, prompts=prompts, tokens=6000) for name in ("whole", "parts"))
    train(whole)
    train(parts, steps=7)
    before = (tmp_path / "parts.run" / "answers" / "entries").read_bytes()
    train(parts)
    assert (tmp_path / "parts.run" / "answers" / "entries").read_bytes() == before
    saved = "state/model.safetensors"
    assert (tmp_path / "parts.run" / saved).read_bytes() == (tmp_path / "whole.run" / saved).read_bytes()


def test_what_cannot_be_answered_is_named(target: Path, chatty: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        begin(settings(target, tmp_path / "out"))
    (tmp_path / "long.txt").write_text("word " * 100)
    with pytest.raises(ConfigError, match=r"answer: .* tokens; the target's context has 128"):
        begin(settings(chatty, tmp_path / "out", prompts=tmp_path / "long.txt"))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(tmp_path / "none", "prompts")
    for content, wrong in (("{}\n", "field prompt"), ("text\n", "field prompt"), ("\n", "no prompt")):
        (tmp_path / "p.jsonl").write_text(content)
        with pytest.raises(ConfigError, match=wrong):
            read_prompts(tmp_path / "p.jsonl", "prompts")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"on_policy": 0.5}, "on_policy"),
        ({"text": ("stdlib",), "draft_vocabulary": 50}, "draft_vocabulary"),
        ({"text": ("stdlib",), "shared_row": True}, "shared_row"),
        ({"width": 32, "layers": (), "shared_row": True}, "shared_row"),
        ({"text": ("stdlib",), "prompts": "p"}, "prompts"),
        ({"text": ("stdlib",), "questions": "q"}, "questions"),
        ({"text_weight": 0.5}, "text_weight"),
    ],
)
def test_settings_that_contradict_one_another_are_refused(changes: dict[str, Any], field: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=field):
        settings(tmp_path, tmp_path / "out", **changes)


def test_steps_through_a_text_commit_chains() -> None:
    agreed = np.array([True, True, False, False, True, True, True])
    assert committed(agreed, 8) == (3, 7)
    assert committed(agreed, 1) == (5, 7)
    assert committed(np.array([False]), 8) == (1, 1)


@pytest.mark.parametrize("shape", [{"layers": (0, 2)}, {"layers": (), "width": 32}])
def test_only_random_embeddings_learn_beside_a_reduced_head(
    shape: dict[str, Any], chatty: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("say this\nand that\n")
    training = begin(settings(chatty, tmp_path / "out", prompts=prompts, draft_vocabulary=120, **shape))
    assert training.student.get_input_embeddings().weight.requires_grad is ("width" in shape)
    assert training.student.get_output_embeddings().weight.shape[0] == 120
