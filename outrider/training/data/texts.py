"""The texts of a training: files, folders, lines of JSON, or Python's standard library, in UTF-8.

A digest of a text's name decides whether it is held out, so that it is held out for every model that learns from these
texts. Of a single file, the end is held out.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from outrider.errors import ConfigError
from outrider.training.recipe import STDLIB, TextSettings

STDLIB_CHARACTERS = range(400, 400_001)  # length of the files taken from it: neither empty modules nor tables
LINES = ".jsonl"


@dataclass(frozen=True, slots=True)
class TrainingText:
    """One text of a training."""

    name: str
    content: str
    held_out: bool


class TrainingTexts:
    """All texts of some settings, in an order that depends only on their names. An iteration reads the files again."""

    def __init__(self, settings: TextSettings) -> None:
        """Find the files. Raises ConfigError for a source that does not exist, and if no file matches."""
        self._settings = settings
        self._files = [entry for source in settings.text for entry in _found(source, settings.pattern)]
        if not self._files:
            raise ConfigError(f"text: no file matches {settings.pattern!r}; give another --pattern, or name files")
        self.skipped = 0  # files and lines of JSON that were not UTF-8, in the last iteration
        self._single_file = len(self._files) == 1 and self._files[0].path.suffix != LINES

    def __len__(self) -> int:
        """The number of files."""
        return len(self._files)

    def __iter__(self) -> Iterator[TrainingText]:
        """Yield the texts.

        Raises ConfigError, with the file and the place, for a file that cannot be read, is not UTF-8 or has malformed
        lines.
        """
        self.skipped = 0
        for file in self._files:
            try:
                yield from self._split(file) if self._single_file else self._whole(file)
            except UnicodeDecodeError as error:
                self._leave_out(file, error.start)
            except OSError as error:
                raise ConfigError(f"{file.path}: {error.strerror}; leave it out, or make it readable") from None

    def digest(self) -> str:
        """Return the digest of all texts, in hexadecimal. Read all files; raise as an iteration does."""
        total = hashlib.sha256()
        for text in self:
            content = text.content.encode()
            total.update(f"{text.name}\0{text.held_out}\0{len(content)}\0".encode())
            total.update(content)
        return total.hexdigest()

    def _leave_out(self, file: _File, offset: int) -> None:
        """Count a text that is not UTF-8 as skipped. Raises ConfigError if the settings do not allow that."""
        if not (self._settings.skip_invalid or file.stdlib):
            raise ConfigError(
                f"{file.path}: is not UTF-8 from byte {offset} on; convert it, or leave out what is like it with "
                "--skip-invalid"
            )
        self.skipped += 1

    def _whole(self, file: _File) -> Iterator[TrainingText]:
        if file.path.suffix == LINES:
            yield from self._lines(file)
            return
        content = file.path.read_bytes().decode()
        if content and (not file.stdlib or len(content) in STDLIB_CHARACTERS):
            yield TrainingText(file.name, content, self._held_out(file.name))

    def _split(self, file: _File) -> Iterator[TrainingText]:
        """Split one file: its end is held out, from the start of a line on."""
        content = file.path.read_bytes().decode()
        border = len(content) * (100 - self._settings.held_out) // 100
        border = content.rfind("\n", 0, border) + 1 or border
        yield TrainingText(file.name, content[:border], False)
        yield TrainingText(file.name, content[border:], True)

    def _lines(self, file: _File) -> Iterator[TrainingText]:
        field, offset = self._settings.field, 0
        with file.path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                name = f"{file.name}:{number}"
                try:
                    if line.strip():
                        content = json.loads(line.decode())[field]
                        content.encode()  # raises for escaped surrogates, which UTF-8 cannot encode
                        yield TrainingText(name, content, self._held_out(name))
                except UnicodeDecodeError as error:
                    self._leave_out(file, offset + error.start)
                except (ValueError, TypeError, KeyError, AttributeError):
                    raise ConfigError(
                        f"{file.path}: line {number} is no JSON object with text in {field!r}; mend it, or name the "
                        "right field with --field"
                    ) from None
                offset += len(line)

    def _held_out(self, name: str) -> bool:
        return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 100 < self._settings.held_out


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    name: str  # from the source's own folder on
    stdlib: bool = False


def _found(source: str, pattern: str) -> list[_File]:
    """Return the files of a source. Raises ConfigError if the source does not exist."""
    if source == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        return [_File(path, str(path.relative_to(root)), stdlib=True) for path in _below(root, "*.py") if _ours(path)]
    path = Path(source)
    if path.is_dir():
        return [_File(each, str(each.relative_to(path))) for each in _below(path, pattern)]
    if not path.exists():
        raise ConfigError(f"text: {source}: no such file or folder")
    return [_File(path, path.name)]


def _below(folder: Path, pattern: str) -> list[Path]:
    """Return the files of a folder, in the order of their names, without hidden ones."""
    found = []
    for here, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(here, name) for name in names if not name.startswith(".") and fnmatch(name, pattern)]
    return sorted(path for path in found if path.is_file())


def _ours(path: Path) -> bool:
    """Return whether a file belongs to the standard library, and is no installed package and no invalid test data."""
    return "site-packages" not in str(path) and "lib2to3/tests/data" not in path.as_posix()
