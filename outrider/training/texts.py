"""The texts that are learned from: files, folders, lines of JSON, or Python's standard library; in UTF-8, and split.

Whether a text is held out is decided by a digest of its name, so that it is so for every model that ever learns from
them. A single file is split by its end.
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

STDLIB_CHARACTERS = range(400, 400_001)  # of a file of it: neither empty modules nor tables
LINES = ".jsonl"


@dataclass(frozen=True, slots=True)
class Text:
    """One text."""

    name: str
    content: str
    held_out: bool


class Texts:
    """All texts of some settings, in an order that depends on their names alone. Each iteration reads them anew."""

    def __init__(self, settings: TextSettings) -> None:
        """Raises ConfigError for a source that is not there, and where no file matches."""
        self._settings = settings
        self._files = [entry for source in settings.text for entry in _found(source, settings.pattern)]
        if not self._files:
            raise ConfigError(f"text: no file matches {settings.pattern!r}; give another --pattern, or name files")
        self.skipped = 0  # files, and lines of JSON, that were not UTF-8, in the last iteration
        self._by_end = len(self._files) == 1 and self._files[0].path.suffix != LINES

    def __len__(self) -> int:
        """Files."""
        return len(self._files)

    def __iter__(self) -> Iterator[Text]:
        """Raises ConfigError for a file that cannot be read, is not UTF-8 or has lines that are not as they should be,
        naming it and the place."""
        self.skipped = 0
        for file in self._files:
            try:
                yield from self._split(file) if self._by_end else self._whole(file)
            except UnicodeDecodeError as error:
                self._leave_out(file, error.start)
            except OSError as error:
                raise ConfigError(f"{file.path}: {error.strerror}; leave it out, or make it readable") from None

    def digest(self) -> str:
        """Of all that they say, in hexadecimal. Reads everything; raises as iterating does."""
        total = hashlib.sha256()
        for text in self:
            content = text.content.encode()
            total.update(f"{text.name}\0{text.held_out}\0{len(content)}\0".encode())
            total.update(content)
        return total.hexdigest()

    def _leave_out(self, file: _File, offset: int) -> None:
        """What is not UTF-8 from a byte of a file on. Raises ConfigError where that was not asked for."""
        if not (self._settings.skip_invalid or file.stdlib):
            raise ConfigError(
                f"{file.path}: is not UTF-8 from byte {offset} on; convert it, or leave out what is like it with "
                "--skip-invalid"
            )
        self.skipped += 1

    def _whole(self, file: _File) -> Iterator[Text]:
        if file.path.suffix == LINES:
            yield from self._lines(file)
            return
        content = file.path.read_bytes().decode()
        if content and (not file.stdlib or len(content) in STDLIB_CHARACTERS):
            yield Text(file.name, content, self._held_out(file.name))

    def _split(self, file: _File) -> Iterator[Text]:
        """One file: what is held out is its end, from a line's beginning on."""
        content = file.path.read_bytes().decode()
        border = len(content) * (100 - self._settings.held_out) // 100
        border = content.rfind("\n", 0, border) + 1 or border
        yield Text(file.name, content[:border], False)
        yield Text(file.name, content[border:], True)

    def _lines(self, file: _File) -> Iterator[Text]:
        field, offset = self._settings.field, 0
        with file.path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                name = f"{file.name}:{number}"
                try:
                    if line.strip():
                        content = json.loads(line.decode())[field]
                        content.encode()  # JSON may escape what is no character
                        yield Text(name, content, self._held_out(name))
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
    """The files of a source. Raises ConfigError if there is no such thing."""
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
    """In the order of their names; hidden ones are left out."""
    found = []
    for here, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(here, name) for name in names if not name.startswith(".") and fnmatch(name, pattern)]
    return sorted(path for path in found if path.is_file())


def _ours(path: Path) -> bool:
    """Whether a file is the library's own, and not what was installed, or test data in old or broken Python."""
    return "site-packages" not in str(path) and "lib2to3/tests/data" not in path.as_posix()
