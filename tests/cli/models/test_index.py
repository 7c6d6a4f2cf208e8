"""`outrider index` makes a store of text files, and prints what is in it, or what is wrong with its arguments."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from click.testing import Result
from tokenizers import Tokenizer
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.cli.models import index as command
from outrider.core.proposers.datastore import Datastore
from outrider.core.proposers.retrieval import Retrieval
from outrider.core.session.digest import tokenizer_digest

TARGET = Path(__file__).parents[3] / "models" / "target"
DIGEST = tokenizer_digest((TARGET / "tokenizer.json").read_bytes())
TOKENIZER = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
LINE = re.compile(
    r"outrider index: wrote (\S+): documents=(\d+) tokens=(\d+) megabytes=[\d.]+ seconds=[\d.]+ not_utf8=(\d+)"
)


def run(*arguments: str | Path, output: Path, tokenizer: Path = TARGET) -> Result:
    options = ("--tokenizer", tokenizer, "--output", output)
    return CliRunner().invoke(app, ["index", *map(str, (*arguments, *options))], env={"COLUMNS": "200"})


def refused(result: Result, *fragments: str) -> None:
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    for fragment in fragments:
        assert fragment in result.stderr


def documents(path: Path) -> list[str]:
    """The texts that a store holds."""
    store = Datastore.open(path, DIGEST)
    found: list[list[int]] = [[]]
    for token in store.tokens.tolist():
        if token >= store.vocabulary:
            found.append([])
        else:
            found[-1].append(token)
    return [TOKENIZER.decode(tokens) for tokens in found[:-1]]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    for name, text in {
        "b.py": "def second():\n    return 2\n",
        "a.py": "def first():\n    return 'ä'\n",
        "deeper/c.py": "import os\n",
        "notes.md": "# Notes\n",
        ".hidden.py": "secret = 1\n",
        ".git/d.py": "secret = 2\n",
        "empty.py": "",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "latin.py").write_bytes("name = 'Jérôme'\n".encode("latin-1"))
    return folder


def test_a_store_holds_each_file_of_a_folder_once_and_its_contents_are_printed(corpus: Path, tmp_path: Path) -> None:
    output = tmp_path / "code.rest"
    result = run(corpus, corpus / "a.py", "--pattern", "*.py", output=output)
    assert result.exit_code == 0, result.output
    found = LINE.fullmatch(result.stdout.strip())
    assert found
    path, count, tokens, skipped = found.groups()
    texts = ["def first():\n    return 'ä'\n", "def second():\n    return 2\n", "import os\n"]
    assert documents(output) == texts
    assert (path, int(count), int(skipped)) == (str(output), 3, 1)
    assert int(tokens) == sum(len(TOKENIZER.encode(text, add_special_tokens=False).ids) for text in texts)
    assert sorted(os.listdir(tmp_path)) == ["code.rest", "corpus"]


def test_an_indexed_file_is_proposed(corpus: Path, tmp_path: Path) -> None:
    assert run(corpus, output=tmp_path / "all.rest").exit_code == 0
    retrieval = Retrieval(Datastore.open(tmp_path / "all.rest", DIGEST))
    proposal = retrieval.propose(TOKENIZER.encode("def second():", add_special_tokens=False).ids, 9, 9)
    assert proposal.matched > 2
    assert TOKENIZER.decode(list(proposal.tokens)) == "\n    return 2\n"


def test_a_file_named_on_the_command_line_is_indexed_despite_the_pattern(corpus: Path, tmp_path: Path) -> None:
    output = tmp_path / "x.rest"
    assert run(corpus / "notes.md", corpus / ".hidden.py", "--pattern", "*.py", output=output).exit_code == 0
    assert documents(output) == ["# Notes\n", "secret = 1\n"]


def test_a_store_in_the_folder_is_not_indexed_itself(corpus: Path) -> None:
    output = corpus / "store.rest"
    assert run(corpus, "--pattern", "*", output=output).exit_code == 0
    first = output.read_bytes()
    again = run(corpus, "--pattern", "*", output=output)
    assert again.stdout.strip().endswith("not_utf8=1")  # the one in Latin-1
    assert output.read_bytes() == first


def test_long_texts_are_tokenized_in_parts_without_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "PIECE", 50)
    text = "".join(f"value_{number} = {number}\n" for number in range(40)) + "x" * 120 + "\nend"
    (tmp_path / "long.py").write_text(text)
    assert run(tmp_path / "long.py", output=tmp_path / "x.rest").exit_code == 0
    assert documents(tmp_path / "x.rest") == [text]


def test_sources_that_give_nothing_are_refused(corpus: Path, tmp_path: Path) -> None:
    output = tmp_path / "x.rest"
    refused(run(tmp_path / "nowhere", output=output), "nowhere: no such file or folder")
    refused(run(corpus, "--pattern", "*.rs", output=output), "'*.rs'", "--pattern")
    refused(run(corpus / "latin.py", corpus / "empty.py", output=output), "no text")
    assert not output.exists()


def test_a_missing_or_malformed_tokenizer_is_refused(corpus: Path, tmp_path: Path) -> None:
    output = tmp_path / "x.rest"
    refused(run(corpus, output=output, tokenizer=tmp_path), "tokenizer.json: missing", "checkpoint")
    (tmp_path / "tokenizer.json").write_text("{}")
    refused(run(corpus, output=output, tokenizer=tmp_path), "not a tokenizer")


def test_an_output_that_cannot_be_written_is_refused(corpus: Path, tmp_path: Path) -> None:
    refused(run(corpus, output=tmp_path / "no" / "x.rest"), "no/x.rest: cannot be written (No such file")
    refused(run(corpus, output=tmp_path), "cannot be written (Is a directory)")


def test_a_file_that_cannot_be_read_is_named(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Path.read_text

    def failing(self: Path, *arguments: str, **options: str) -> str:
        if self.name == "b.py":
            raise PermissionError(13, "Permission denied")
        return read(self, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", failing)
    refused(run(corpus, output=tmp_path / "x.rest"), "b.py: Permission denied")
    assert not (tmp_path / "x.rest").exists()
