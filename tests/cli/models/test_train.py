"""`outrider train`: flags and recipes agree, and what cannot be done is refused before anything long starts."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.cli.models.train import recipe_of
from outrider.config import Section
from outrider.errors import ConfigError
from outrider.training.recipe import DrafterRecipe, HeadsRecipe, TokenizerRecipe

TEXT = {"text": ("a", "b"), "pattern": "*.md", "field": "said", "skip_invalid": True, "held_out": 7}
LEARNING = {
    "objective": "reverse-kl",
    "text_weight": 0.2,
    "temperature": 0.5,
    "window": 128,
    "batch": 3,
    "accumulate": 2,
    "tokens": 1_500_000,
    "minutes": 2.5,
    "learning_rate": 0.002,
    "warm_up": 0.07,
    "weight_decay": 0.3,
    "seed": 9,
    "precision": "float32",
    "device": "cpu",
    "threads": 2,
    "measure_steps": 50,
    "save_steps": 60,
    "save_minutes": 1.5,
}
ANSWERS = {"prompts": Path("p"), "teacher": "h:1", "answers": 3_000_000, "answer": 200}
RECIPES: dict[str, list[Section]] = {
    "tokenizer": [TokenizerRecipe(**TEXT, output=Path("o"), vocabulary=999)],
    "drafter": [
        DrafterRecipe(
            **TEXT,
            output=Path("o"),
            target=Path("t"),
            layers=(0, 5),
            on_policy=0.25,
            continuation=16,
            **LEARNING,
        ),
        DrafterRecipe(
            text=("a",),
            output=Path("o"),
            tokenizer=Path("k"),
            width=64,
            depth=3,
            heads=4,
            kv_heads=2,
            head_dim=32,
            ffn=96,
            context=512,
            objective="text",
            tokens=1,
        ),
        DrafterRecipe(text=("a",), output=Path("o"), target=Path("t"), start=Path("s"), minutes=1),
        DrafterRecipe(
            output=Path("o"),
            target=Path("t"),
            layers=(0,),
            minutes=1,
            questions=Path("q"),
            draft_vocabulary=8192,
            shared_row=True,
            **ANSWERS,
        ),
    ],
    **{
        command: [
            HeadsRecipe(
                **TEXT,
                **LEARNING,
                output=Path("o"),
                target=Path("t"),
                kind=kind,
                depth=6,
                own_head=True,
                inner=None if kind == "medusa" else 96,
                decay=0.7,
                regression=0.5 if kind == "eagle" else None,
            ),
            HeadsRecipe(output=Path("o"), target=Path("t"), kind=kind, minutes=1, **ANSWERS),
        ]
        for command, kind in {"medusa": "medusa", "mlp": "mlp", "eagle": "eagle"}.items()
    },
}
FIXED = {"medusa": {"kind": "medusa"}, "mlp": {"kind": "mlp"}}  # by the command itself
ALL = [(name, recipe) for name, recipes in RECIPES.items() for recipe in recipes]


def command(name: str) -> Any:
    group: Any = typer.main.get_command(app)
    return group.commands["train"].commands[name]


def flags(recipe: Section, fixed: Collection[str] = ()) -> list[str]:
    """As a user would type them."""
    typed = []
    for name in recipe.model_fields_set:
        value, flag = getattr(recipe, name), f"--{name.replace('_', '-')}"
        if value is None or name in fixed:
            continue
        if name == "text":
            typed += [part for source in value for part in (flag, source)]
        elif isinstance(value, bool):
            typed.append(flag)
        else:
            typed += [flag, ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
    return typed


def parsed(name: str, arguments: list[str]) -> Section:
    context = command(name).make_context(name, arguments)
    return recipe_of(type(RECIPES[name][0]), context, context.params["recipe"], **FIXED.get(name, {}))


@pytest.mark.parametrize(("name", "recipe"), ALL)
def test_every_setting_survives_the_command_line(name: str, recipe: Section) -> None:
    assert parsed(name, flags(recipe, FIXED.get(name, {}))) == recipe


def test_every_setting_of_a_recipe_is_covered_by_a_tested_flag() -> None:  # bites: the recipes above are the product's
    for recipes in RECIPES.values():
        tried = {field for recipe in recipes for field in recipe.model_fields_set}
        assert tried == type(recipes[0]).model_fields.keys()


def test_flags_override_the_recipe_whose_paths_are_relative_to_its_file(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "family").mkdir()
    file = tmp_path / "recipes" / "one.toml"
    file.write_text(
        'text = ["stdlib", "pages"]\ntarget = "../family"\noutput = "out"\nlayers = [1]\ntokens = 5\nbatch = 2\n',
        encoding="utf-8",
    )
    recipe = parsed("drafter", ["--recipe", str(file), "--batch", "3", "--output", "here", "--tokens", "2M"])
    base = file.parent.resolve()
    assert recipe == DrafterRecipe(
        text=("stdlib", str(base / "pages")),
        target=base / "../family",
        output=Path("here"),
        layers=(1,),
        tokens=2_000_000,
        batch=3,
    )
    file.write_text(file.read_text(encoding="utf-8").replace("../family", "org/model"), encoding="utf-8")
    assert parsed("drafter", ["--recipe", str(file)]).target == Path("org/model")  # type: ignore[attr-defined]


def test_an_unknown_key_of_a_recipe_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "one.toml"
    file.write_text('text = ["x"]\noutput = "o"\nvocabluary = 300\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"one\.toml: vocabluary: unknown key"):
        parsed("tokenizer", ["--recipe", str(file)])
    file.write_text("text = [", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"one\.toml: not valid TOML"):
        parsed("tokenizer", ["--recipe", str(file)])


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["--output", "o"], "flags: text: give files, folders"),
        (
            ["--text", "docs", "--output", "o", "--target", "models/target", "--layers", "0"],
            "tokens or minutes must say",
        ),
        (
            ["--text", "docs", "--output", "o", "--target", "models/target", "--layers", "0,x", "--tokens", "1"],
            "layers.1",
        ),
        (
            ["--text", "docs", "--output", "o", "--target", "nowhere", "--layers", "0", "--tokens", "1"],
            "nowhere: no such folder",
        ),
    ],
)
def test_a_mistake_is_one_message_and_status_2(arguments: list[str], fragment: str) -> None:
    result = CliRunner().invoke(app, ["train", "drafter", *arguments])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("outrider: ")
    assert fragment in result.stderr
    assert not Path("o.run").exists()


def test_a_count_that_is_no_number_is_reported_with_its_key() -> None:
    result = CliRunner().invoke(app, ["train", "drafter", "--tokens", "many"])
    assert result.exit_code == 2
    assert "tokens: Input should be a valid integer" in result.output
