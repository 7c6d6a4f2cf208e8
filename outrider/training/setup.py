"""Loads all that a training starts from: target, student and token ids. Recipes that cannot work are refused here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from outrider.engine.checkpoints.checkpoint import copy_tokenizer
from outrider.engine.checkpoints.model_card import weights_digest
from outrider.engine.checkpoints.model_config import DRAFT_IDS
from outrider.engine.interface.engine import Dtype
from outrider.engine.transformers.pretrained import Pretrained
from outrider.errors import TokenizerMismatch
from outrider.hub import checkpoint_folder, is_gguf
from outrider.training.answers.answer_batches import expected_counts, frequent_ids, learned_and_held_out
from outrider.training.answers.writing import Written, write_answers
from outrider.training.data.corpus import Corpus, OnProgress, Vocabulary, prepare
from outrider.training.data.texts import TrainingTexts
from outrider.training.recipe import DrafterRecipe, HeadsRecipe, TrainingRecipe
from outrider.training.tasks.heads_task import make_heads
from outrider.training.tasks.student_init import load, make_student, reduce_head, share_row

REDUCED = 8192  # ids of a head for a large vocabulary


@dataclass(frozen=True, slots=True)
class TrainingSetup:
    """The loaded models and texts of a recipe."""

    target_folder: Path | None
    target: Pretrained | None
    tokenizer_folder: Path  # the target's, if there is one
    student: Any  # the drafter's model or the heads, before the first step
    corpus: Corpus | None  # None: a drafter learns from what the target wrote
    answers: Written | None  # texts of the target; None: there is a corpus
    draft_ids: tuple[int, ...]  # of a reduced vocabulary; empty: the whole
    digests: dict[str, str | None]  # of texts, tokenizer and target


def gather(recipe: TrainingRecipe, dtype: Dtype, device: str, on_progress: OnProgress) -> TrainingSetup:
    """Load the models, whose errors come quickly; then tokenize the texts, or have the target write some.

    `dtype`: of the target where it judges texts; `device`: where it writes. Raises CheckpointError, TokenizerMismatch
    and ConfigError.
    """
    texts = TrainingTexts(recipe) if recipe.text else None
    on_progress("loading models", 0.0)
    target_folder = None if recipe.target is None else checkpoint_folder(recipe.target)
    target = None if target_folder is None else load(target_folder, dtype)
    tokenizer_folder = target_folder or (recipe.tokenizer if isinstance(recipe, DrafterRecipe) else None)
    assert tokenizer_folder is not None  # the recipe checks this
    if is_gguf(tokenizer_folder):
        tokenizer_folder = _tokenizer_of(tokenizer_folder, recipe.run / "tokenizer")
    end = target.eos_ids[0] if target and target.eos_ids else None
    vocabulary = Vocabulary.read(tokenizer_folder, end)
    if target is not None and vocabulary.size > target.vocabulary:
        raise TokenizerMismatch(
            f"{recipe.target}: its tokenizer has {vocabulary.size:,} tokens, the model {target.vocabulary:,}; the "
            "two must belong together"
        )
    student = _student(recipe, target, target_folder, vocabulary)
    corpus = answers = None
    if texts is not None:
        corpus = prepare(texts, vocabulary, recipe.run / "ids", on_progress)
        corpus.require(recipe.window + 1)
    else:
        assert target is not None
        assert target_folder is not None
        if isinstance(recipe, DrafterRecipe):
            target = replace(target, model=None)  # its memory is the writing engine's
        answers = write_answers(recipe, target_folder, device, on_progress)
        if not isinstance(recipe, DrafterRecipe):  # heads learn from the target's hidden states
            corpus, answers = _as_corpus(answers, recipe.held_out), None
            corpus.require(recipe.window + 1)
    draft_ids: tuple[int, ...] = ()
    if target is not None and answers is not None and (count := _draft_vocabulary(recipe, student.config.vocab_size)):
        counts = expected_counts(answers.texts)
        draft_ids = tuple(getattr(student.config, DRAFT_IDS, ()))  # of one to start from
        draft_ids = draft_ids or frequent_ids(counts, count, target.eos_ids)
        assert isinstance(recipe, DrafterRecipe)
        reduce_head(student, draft_ids, learns_embedding=recipe.width is not None)
        if recipe.shared_row:
            share_row(student.get_input_embeddings(), draft_ids, counts)
    digests = {
        "texts": corpus.digest if corpus else "",
        "tokenizer": vocabulary.digest.hex(),
        "target": None if target_folder is None else weights_digest(target_folder),
    }
    return TrainingSetup(target_folder, target, tokenizer_folder, student, corpus, answers, draft_ids, digests)


def _as_corpus(written: Written, held_out: int) -> Corpus:
    """Return what a target wrote as texts that follow one another; `held_out`: percent of them."""
    texts = written.texts
    learned, left_out = (
        np.concatenate([texts.tokens(text) for text in part]) for part in learned_and_held_out(len(texts), held_out)
    )
    return Corpus(learned, left_out, digest="", skipped=0)


def _draft_vocabulary(recipe: TrainingRecipe, vocabulary: int) -> int:
    """Return how many ids a drafter's head has; 0: all."""
    assert isinstance(recipe, DrafterRecipe)
    count = recipe.draft_vocabulary or (REDUCED if vocabulary >= 4 * REDUCED else vocabulary)
    return count if count < vocabulary else 0


def _tokenizer_of(file: Path, folder: Path) -> Path:
    """Write the tokenizer of a GGUF file into a folder, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    copy_tokenizer(file, folder)
    return folder


def _student(
    recipe: TrainingRecipe, target: Pretrained | None, target_folder: Path | None, vocabulary: Vocabulary
) -> Any:
    if isinstance(recipe, DrafterRecipe):
        return make_student(recipe, target, vocabulary)
    assert isinstance(recipe, HeadsRecipe)
    assert target is not None
    assert target_folder is not None
    return make_heads(recipe, target, target_folder)
