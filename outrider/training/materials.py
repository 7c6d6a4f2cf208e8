"""What a training starts from: the target, who learns from it, the texts as ids. What cannot work is refused here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.engine.card import weights_digest
from outrider.engine.engine import Dtype
from outrider.engine.pretrained import Pretrained
from outrider.errors import TokenizerMismatch
from outrider.hub import checkpoint_folder
from outrider.training.corpus import Corpus, Heard, Vocabulary, prepare
from outrider.training.heads import make_heads
from outrider.training.recipe import DrafterRecipe, HeadsRecipe, TrainingRecipe
from outrider.training.students import load, make_student
from outrider.training.texts import Texts


@dataclass(frozen=True, slots=True)
class Materials:
    """All that a recipe names, loaded."""

    target_folder: Path | None
    target: Pretrained | None
    tokenizer_folder: Path  # the target's, if there is one
    pupil: Any  # a drafter's model, or heads: as it is before the first step
    corpus: Corpus
    digests: dict[str, str | None]  # of texts, tokenizer and target


def gather(recipe: TrainingRecipe, dtype: Dtype, heard: Heard) -> Materials:
    """Loads models first, which is quick to fail, and tokenizes then. `dtype`: of the target.

    Raises CheckpointError, TokenizerMismatch and ConfigError.
    """
    texts = Texts(recipe)
    heard("loading models", 0.0)
    target_folder = None if recipe.target is None else checkpoint_folder(recipe.target)
    target = None if target_folder is None else load(target_folder, dtype)
    tokenizer_folder = target_folder or (recipe.tokenizer if isinstance(recipe, DrafterRecipe) else None)
    assert tokenizer_folder is not None  # the recipe has seen to it
    end = target.eos_ids[0] if target and target.eos_ids else None
    vocabulary = Vocabulary.read(tokenizer_folder, end)
    if target is not None and vocabulary.size > target.vocabulary:
        raise TokenizerMismatch(
            f"{recipe.target}: its tokenizer has {vocabulary.size:,} tokens, the model {target.vocabulary:,}; the "
            "two must belong together"
        )
    pupil = _pupil(recipe, target, target_folder, vocabulary)
    corpus = prepare(texts, vocabulary, recipe.run / "ids", heard)
    corpus.require(recipe.window + 1)
    digests = {
        "texts": corpus.digest,
        "tokenizer": vocabulary.digest.hex(),
        "target": None if target_folder is None else weights_digest(target_folder),
    }
    return Materials(target_folder, target, tokenizer_folder, pupil, corpus, digests)


def _pupil(
    recipe: TrainingRecipe, target: Pretrained | None, target_folder: Path | None, vocabulary: Vocabulary
) -> Any:
    if isinstance(recipe, DrafterRecipe):
        return make_student(recipe, target, vocabulary)
    assert isinstance(recipe, HeadsRecipe)
    assert target is not None
    assert target_folder is not None
    return make_heads(recipe, target, target_folder)
