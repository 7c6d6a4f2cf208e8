"""The commands on the pages do what the pages promise."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from docs.hooks.commands import commands
from outrider.errors import ConfigError
from outrider.store.redis.embedded import EmbeddedRedis
from tests.docs.checks import check_shell, check_toml, make_targets
from tests.docs.pages import NAMES, ROOT, blocks, prose
from tests.docs.sandbox import Sandbox

SHELLS = {"bash", "console", "sh"}
RUN = SHELLS | {"python", "toml"}
EXCUSED = 5  # blocks, at the most

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def sandbox(redis_server: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    with Sandbox(tmp_path_factory.mktemp("checkout"), redis_server.url) as running:
        yield running


@pytest.mark.parametrize("name", [name for name in NAMES if any(block.language in RUN for block in blocks(name))])
def test_every_command_and_snippet_of_a_page_works(name: str, sandbox: Sandbox) -> None:
    sandbox.turn_page()
    for block in blocks(name):
        if block.excuse:
            continue
        try:
            if block.language in SHELLS:
                check_shell(block.commands, sandbox)
            elif block.language == "toml":
                check_toml(block.text, sandbox)
            elif block.language == "python":
                sandbox.need_cluster()
                sandbox.run_python(block.text)
        except Exception as error:
            error.add_note(f"in {name}, line {block.line}")
            raise


@pytest.mark.parametrize(
    "command",
    [
        "outrider generate x --nothing",
        "outrider bench examples/held_out.jsonl --nothing",
        "outrider up examples/nothing.toml",
        "make nothing",
        "pip install '.[serve,nothing]'",
        "python -m bench --nothing",
        "python examples/nothing.py",
        "kubectl apply -f deploy/nothing.yaml",
        "nothing --known",
    ],
)
def test_a_command_that_is_wrong_is_found(command: str, sandbox: Sandbox) -> None:
    with pytest.raises(AssertionError):
        check_shell([command], sandbox)


@pytest.mark.parametrize("text", ["[router]\nnothing = 1", "[[kind]]\nnothing = 1", "[[verifier]]\nslots = 0"])
def test_a_setting_that_is_wrong_is_found(text: str, sandbox: Sandbox) -> None:
    with pytest.raises(ConfigError):
        check_toml(text, sandbox)


def test_every_block_that_is_not_run_has_a_reason_and_their_number_is_bounded() -> None:
    excused = [block for name in NAMES for block in blocks(name) if block.excuse]
    assert len(excused) <= EXCUSED
    assert all(len(block.excuse.split()) > 2 for block in excused)


@pytest.mark.parametrize("name", NAMES)
def test_every_command_on_a_page_stands_in_a_fence(name: str) -> None:
    assert not re.findall(r"^ {4}(?:make|outrider|pip|python|pytest) .*", prose(name), re.MULTILINE), "fence it"
    assert all(block.language for block in blocks(name)), "a fence names its language"


@pytest.mark.parametrize("name", NAMES)
def test_commands_that_the_text_names_exist(name: str) -> None:
    text = re.sub(r"\s+", " ", prose(name))
    assert set(re.findall(r"`make ([\w-]+)", text)) <= make_targets()
    assert set(re.findall(r"`outrider ([a-z][a-z-]*)", text)) <= {entry.split()[0] for entry, _ in commands()}


@pytest.mark.parametrize("name", NAMES)
def test_files_that_the_text_names_exist(name: str) -> None:
    made = {"build", "site"}  # by commands, and maybe not there
    tops = "|".join(sorted(path.name for path in ROOT.iterdir() if path.is_dir() and path.name not in made))
    for path in re.findall(rf"`((?:{tops})/[\w./-]+)", prose(name)):
        assert (ROOT / path).exists() or path.startswith("bench/results"), path


@pytest.mark.parametrize("name", NAMES)
def test_links_to_files_lead_somewhere(name: str) -> None:
    folder = (ROOT / name).parent
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", prose(name)):
        assert (folder / target).exists(), target
