"""The references have everything that the code has, and describe it."""

from __future__ import annotations

import html
import re
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

import outrider
from docs.hooks import commands, configuration, redis_keys, sdk
from docs.hooks.references import GENERATED, page, written
from outrider import config
from outrider.config import Section
from outrider.simulation import deployment
from outrider.store.redis.acl import GRANTS
from outrider.store.redis.key_catalogue import KEYS
from outrider.training import recipe

ROOT = Path(__file__).parents[2]


def rows(markdown: str, heading: str) -> dict[str, list[str]]:
    """The cells of the table under a heading, by the first name in its first cell."""
    section = markdown.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [
        html.unescape(re.sub("</?code>", "`", line))
        for line in re.findall(r"^\| (?:`|<code>).*", section, re.MULTILINE)
    ]
    cells = [re.findall(r"(?:`[^`]*`|[^|`])+", line.strip("| ")) for line in lines]
    return {re.match(r"`([^`]+)`", row[0])[1]: [cell.strip() for cell in row] for row in cells}  # type: ignore[index]


@pytest.mark.parametrize(("heading", "section", "command"), configuration.SECTIONS)
def test_every_key_is_in_the_reference_and_described(heading: str, section: type[Section], command: str) -> None:
    found = rows(configuration.reference(), heading)
    assert found.keys() == section.model_fields.keys()
    for key, (_, value, default, what) in found.items():
        assert value.strip(), key
        assert default.strip(), key
        assert len(what.strip()) > 3, f"{section.__name__}.{key}: a comment behind it describes it"


@pytest.mark.parametrize("name", GENERATED)
def test_a_page_that_is_made_of_the_code_is_as_new_as_the_code(name: str) -> None:
    assert page(name).read_text(encoding="utf-8") == written(name), "make references"


def test_every_key_of_a_grant_is_described_and_each_key_has_a_reader_and_a_writer() -> None:
    patterns = {it.partition("~")[2] for grants in GRANTS.values() for grant in grants for it in grant.keys.split()}
    assert not [it for it in patterns if not any(fnmatchcase(key, it) for key in KEYS)]
    assert not [key for key in KEYS if not redis_keys.roles_with("R", key) or not redis_keys.roles_with("W", key)]


def test_everything_public_of_the_sdk_is_in_its_reference_and_described() -> None:
    shown = sdk.reference()
    for name in outrider.__all__:
        if name not in ("Client", "Stream", "errors"):
            assert f"\n## {name}\n" in f"\n{shown}", name
    for kind in (outrider.AsyncClient, outrider.AsyncStream):
        for name, method in vars(kind).items():
            if not name.startswith("_") and callable(method):
                assert f"### {kind.__name__}.{name}\n" in shown, f"{name}: a docstring describes it"
    assert "ForwardRef" not in shown


def test_the_layers_on_the_page_equal_the_checked_ones() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    shown = [re.split(r"[\s|:]+", line) for line in text.partition("```text\n")[2].partition("```")[0].splitlines()]
    layers = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"][
        0
    ]
    assert shown == [re.split(r"[\s|:]+", line) for line in layers["layers"]]


def test_every_section_is_in_the_reference() -> None:
    shown = {section for _, section, _ in configuration.SECTIONS}
    bases = {config.Section, config.RayResources, config.ServerConfig, config.GrpcConfig, config.WorkerConfig}
    bases |= {recipe.TextSettings, recipe.TrainingRecipe}
    for module in (config, deployment, recipe):
        of_module = {entry for entry in vars(module).values() if isinstance(entry, type) and issubclass(entry, Section)}
        assert of_module - bases <= shown


def test_the_reference_has_bounds_flags_and_variables() -> None:
    router = rows(configuration.reference(), "`[router]`")
    assert router["depth"][:3] == ["`depth`<br>`--depth`", "whole number from 0 to 64", "`24`"]
    assert router["ca"][0] == "`ca`<br>`--ca`<br>`OUTRIDER_CA`"
    assert router["models"][:3] == ["`models`<br>`--model`", "by name: path", "needed"]
    assert rows(configuration.reference(), "`[redis]`")["url"][0] == "`url`<br>`--redis`<br>`REDIS_URL`"


def test_every_command_and_flag_is_in_the_reference_and_described() -> None:
    reference = commands.reference()
    for name, command in commands.commands():
        found = rows(reference, f"outrider {name}")
        parameters = commands.flags_of(command)
        assert len(found) == len(parameters), name
        for flag in (parameter.opts[0] for parameter in parameters if parameter.param_type_name == "option"):
            assert any(flag in re.split(r"[ /]", key) for key in found), flag
        for key, (_, what) in found.items():
            assert re.sub(r"\[.*\]", "", what).strip(), f"outrider {name} {key}: its help describes it"


def test_every_test_named_on_a_page_exists() -> None:
    named = 0
    for file in (ROOT / "docs").rglob("*.md"):
        for path, test in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", file.read_text(encoding="utf-8")):
            named += 1
            assert (ROOT / path).is_file(), f"{file.name}: {path}"
            assert not test or re.search(rf"^(async )?def {test}\(", (ROOT / path).read_text(), re.MULTILINE), test
    assert named > 40
