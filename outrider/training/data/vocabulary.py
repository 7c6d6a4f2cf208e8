"""Makes a byte-level BPE tokenizer from text, like that of the reference models."""

from __future__ import annotations

import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from outrider.training.data.texts import TrainingTexts
from outrider.training.recipe import TokenizerRecipe
from outrider.training.saving.atomic_save import refuse_to_replace, replaced

END = "<|endoftext|>"  # of a text; id 0


def make_tokenizer(recipe: TokenizerRecipe) -> int:
    """Write tokenizer.json and tokenizer_config.json into the recipe's folder. Held-out texts are not used.

    Return the number of tokens, which is smaller than the recipe's for a short text. Raises ConfigError for texts as
    `TrainingTexts` does, and for a folder that is not empty.
    """
    refuse_to_replace(recipe.output)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text.content for text in TrainingTexts(recipe) if not text.held_out), trainer)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "clean_up_tokenization_spaces": False,
    }
    with replaced(recipe.output) as folder:
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    return int(tokenizer.get_vocab_size())
