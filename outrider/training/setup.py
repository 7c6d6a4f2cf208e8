"""Loads all that a training starts from: target, student and token ids. Recipes that cannot work are refused here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.engine.checkpoints.model_card import weights_digest
from outrider.engine.interface.engine import Dtype
from outrider.engine.transformers.pretrained import Pretrained
from outrider.errors import TokenizerMismatch
from outrider.hub import checkpoint_folder
from outrider.training.data.corpus import Corpus, OnProgress, Vocabulary, prepare
from outrider.training.data.texts import TrainingTexts
from outrider.training.recipe import DrafterRecipe, HeadsRecipe, TrainingRecipe
from outrider.training.tasks.heads_task import make_heads
from outrider.training.tasks.student_init import load, make_student


@dataclass(frozen=True, slots=True)
class TrainingSetup:
    """The loaded models and texts of a recipe."""

    target_folder: Path | None
    target: Pretrained | None
    tokenizer_folder: Path  # the target's, if there is one
    student: Any  # the drafter's model or the heads, before the first step
    corpus: Corpus
    digests: dict[str, str | None]  # of texts, tokenizer and target


def gather(recipe: TrainingRecipe, dtype: Dtype, on_progress: OnProgress) -> TrainingSetup:
    """Load the models, whose errors come quickly, and then tokenize the texts. `dtype`: of the target.

    Raises CheckpointError, TokenizerMismatch and ConfigError.
    """
    texts = TrainingTexts(recipe)
    on_progress("loading models", 0.0)
    target_folder = None if recipe.target is None else checkpoint_folder(recipe.target)
    target = None if target_folder is None else load(target_folder, dtype)
    tokenizer_folder = target_folder or (recipe.tokenizer if isinstance(recipe, DrafterRecipe) else None)
    assert tokenizer_folder is not None  # the recipe checks this
    end = target.eos_ids[0] if target and target.eos_ids else None
    vocabulary = Vocabulary.read(tokenizer_folder, end)
    if target is not None and vocabulary.size > target.vocabulary:
        raise TokenizerMismatch(
            f"{recipe.target}: its tokenizer has {vocabulary.size:,} tokens, the model {target.vocabulary:,}; the "
            "two must belong together"
        )
    student = _student(recipe, target, target_folder, vocabulary)
    corpus = prepare(texts, vocabulary, recipe.run / "ids", on_progress)
    corpus.require(recipe.window + 1)
    digests = {
        "texts": corpus.digest,
        "tokenizer": vocabulary.digest.hex(),
        "target": None if target_folder is None else weights_digest(target_folder),
    }
    return TrainingSetup(target_folder, target, tokenizer_folder, student, corpus, digests)


def _student(
    recipe: TrainingRecipe, target: Pretrained | None, target_folder: Path | None, vocabulary: Vocabulary
) -> Any:
    if isinstance(recipe, DrafterRecipe):
        return make_student(recipe, target, vocabulary)
    assert isinstance(recipe, HeadsRecipe)
    assert target is not None
    assert target_folder is not None
    return make_heads(recipe, target, target_folder)
