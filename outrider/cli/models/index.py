"""`outrider index`: builds a datastore from a corpus, for retrieval drafters (`outrider.core.proposers.retrieval`)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.command import reported

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PIECE = 2**18  # characters that are tokenized at once; pieces end at line ends


class _Corpus:
    """The tokens of each file of a corpus. A file that is not UTF-8 is skipped and counted."""

    def __init__(self, files: Sequence[Path], tokenizer: Tokenizer, on_file: Callable[[], None]) -> None:
        self._files = files
        self._tokenizer = tokenizer
        self._on_file = on_file  # called after each file
        self.skipped = 0

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the token ids of each file. Raises ConfigError for a file that cannot be read."""
        from outrider.errors import ConfigError

        for file in self._files:
            try:
                text = file.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                self.skipped += 1
            except OSError as error:
                raise ConfigError(f"{file}: {error.strerror}; leave it out, or make it readable") from None
            else:
                pieces = self._tokenizer.encode_batch(list(_pieces(text)), add_special_tokens=False)
                yield [token for piece in pieces for token in piece.ids]
            self._on_file()


def index(
    sources: Annotated[list[Path], typer.Argument(metavar="FILES_OR_FOLDERS", help="Text files in UTF-8.")],
    tokenizer: Annotated[Path, typer.Option(metavar="FOLDER", help="The target's checkpoint, for its tokenizer.json.")],
    output: Annotated[Path, typer.Option(metavar="FILE", help="The datastore to write, like code.rest.")],
    pattern: Annotated[str, typer.Option(help="Pattern of the file names to read in folders.")] = "*",
) -> None:
    """Index a corpus, so that retrieval drafters can look up continuations. Hidden files in folders are skipped."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    from outrider.core.proposers.datastore import write_datastore
    from outrider.engine.checkpoints.checkpoint import read_tokenizer

    began = time.monotonic()
    with reported():
        reader, digest = read_tokenizer(tokenizer)
        reader.no_truncation()
        reader.no_padding()
        files = _files(sources, pattern, exclude=output)
        screen = Console(stderr=True)
        columns = TextColumn("{task.description}"), BarColumn()
        with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as progress:
            reading = progress.add_task(f"reading {len(files)} files", total=len(files))
            sorting = progress.add_task("sorting", total=1.0)
            corpus = _Corpus(files, reader, on_file=lambda: progress.advance(reading))
            written = write_datastore(
                output,
                corpus,
                tokenizer_digest=digest,
                vocabulary=max(reader.get_vocab().values()) + 1,
                progress=lambda done: progress.update(sorting, completed=done),
            )
    print(
        f"outrider index: wrote {output}: documents={written.documents} tokens={written.tokens} "
        f"megabytes={written.bytes / 1e6:.1f} seconds={time.monotonic() - began:.1f} not_utf8={corpus.skipped}"
    )


def _files(sources: Sequence[Path], pattern: str, *, exclude: Path) -> list[Path]:
    """Return the files to read, each once, in an order that depends only on their names. Raises ConfigError."""
    from outrider.errors import ConfigError

    found: dict[Path, Path] = {}
    for source in sources:
        if not source.exists():
            raise ConfigError(f"{source}: no such file or folder")
        for file in _files_below(source, pattern) if source.is_dir() else [source]:
            found.setdefault(file.resolve(), file)
    found.pop(exclude.resolve(), None)
    if not found:
        raise ConfigError(f"no file matches {pattern!r}; give --pattern, like '*.md', or the files themselves")
    return list(found.values())


def _files_below(folder: Path, pattern: str) -> Iterator[Path]:
    for here, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            file = Path(here, name)
            if fnmatch(name, pattern) and not name.startswith(".") and file.is_file():
                yield file


def _pieces(text: str) -> Iterator[str]:
    """Split a text into pieces of whole lines, so that the tokenizer's memory does not grow with the file."""
    first = 0
    while first < len(text):
        last = text.rfind("\n", first, first + PIECE) + 1 if len(text) - first > PIECE else len(text)
        if last <= first:
            last = first + PIECE  # a single line is longer
        yield text[first:last]
        first = last
