"""The recipes make the reference family: its shapes in full, and something in seconds with their sizes cut down."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.config import parse
from outrider.engine.loading import load_engine
from outrider.training.recipe import DrafterRecipe, TokenizerRecipe, read_recipe
from tests.training.family import PAGES, ROOT

RECIPES = ROOT / "recipes"
TEXT = ("--text", str(PAGES), "--pattern", "*.md", "--held-out", "20")
LITTLE = ("--window", "32", "--batch", "2", "--tokens", "256", "--warm-up", "0", "--threads", "1")


def made(kind: str, name: str, *arguments: str) -> str:
    """The last line of the command with the recipe of that name."""
    command = ["train", kind, "--recipe", str(RECIPES / f"{name}.toml"), *TEXT, *arguments]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.stderr
    return result.stdout.splitlines()[-1]


def test_each_recipe_makes_its_part_of_a_family_with_its_sizes_cut_down(tmp_path: Path) -> None:
    tokenizer, target = tmp_path / "tokenizer", tmp_path / "target"
    printed = made("tokenizer", "tokenizer", "--vocabulary", "400", "--output", str(tokenizer))
    assert printed == f"outrider train: wrote {tokenizer}: tokens=400"
    small = ("--width", "32", "--heads", "2", "--kv-heads", "1", "--head-dim", "16", "--ffn", "48", "--context", "64")
    made("drafter", "target", *small, *LITTLE, "--tokenizer", str(tokenizer), "--output", str(target))
    assert load_engine(target, dtype="bfloat16", slots=1, threads=1).eos_ids == (0,)
    assert not (target / "outrider.json").exists()  # it drafts for no target
    for name in ("mid", "drafter"):
        printed = made("drafter", name, *LITTLE, "--target", str(target), "--output", str(tmp_path / name))
        assert re.fullmatch(
            rf"outrider train: wrote {tmp_path / name}: steps=4 tokens=256 seconds=\d+\.\d tokens_per_s=\d+ "
            r"loss=\d\.\d+ held_out_loss=\d\.\d+ acceptance_t0=\d\.\d\d acceptance_t1=\d\.\d\d",
            printed,
        )
        assert json.loads((tmp_path / name / "outrider.json").read_text(encoding="utf-8"))["target"] == "target"
        load_engine(tmp_path / name, dtype="bfloat16", slots=1, threads=1)
    again = made("drafter", "drafter", *LITTLE, "--target", str(target), "--output", str(tmp_path / "drafter"))
    assert " held_out_loss=" in again
    assert "loss=nan" not in again


def reference(name: str) -> tuple[DrafterRecipe, dict[str, int]]:
    """A recipe, and what the reference model of that name is."""
    recipe = parse(DrafterRecipe, read_recipe(RECIPES / f"{name}.toml"), name)
    assert recipe.text == ("stdlib",)
    is_of: dict[str, int] = json.loads((ROOT / "models" / name / "config.json").read_text(encoding="utf-8"))
    return recipe, is_of


@pytest.mark.parametrize("name", ["mid", "drafter"])
def test_recipes_of_drafters_keep_as_many_layers_as_the_reference_models_have(name: str) -> None:
    recipe, is_of = reference(name)
    assert len(recipe.layers) == is_of["num_hidden_layers"]
    assert recipe.target == ROOT / "recipes" / "../build/family/target"


def test_the_recipe_of_the_target_makes_the_shape_of_the_reference_model() -> None:
    recipe, is_of = reference("target")
    assert [recipe.width, recipe.depth, recipe.heads, recipe.kv_heads, recipe.head_dim, recipe.ffn, recipe.context] == [
        is_of[key]
        for key in (
            *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
            *("head_dim", "intermediate_size", "max_position_embeddings"),
        )
    ]
    tokenizer = parse(TokenizerRecipe, read_recipe(RECIPES / "tokenizer.toml"), "tokenizer")
    assert tokenizer.vocabulary == is_of["vocab_size"]
    assert tokenizer.output == recipe.tokenizer
