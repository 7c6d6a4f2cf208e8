"""The versions of a drafter on the disk, as its trainer writes them and as Redis tells drafters of them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from outrider.engine.card import Card, read_card, weights_digest, write_card
from outrider.store.versions import Published, Version, Versions
from outrider.training.saving import recover, replaced

KEPT = 3  # good versions whose folders are kept: the one in use, and what can be gone back to


class Shelf:
    """`OUTPUT/versions/00001` and so on. Folders appear whole or not at all."""

    def __init__(self, output: Path, versions: Versions) -> None:
        self._folders = output.resolve() / "versions"
        self._notes = output.resolve() / "trainer.json"
        self._versions = versions

    def folder(self, number: int) -> Path:
        """Of a version."""
        return self._folders / f"{number:05d}"

    def write(self, number: int, card: Card, save: Callable[[Path], None]) -> None:
        """Raises CheckpointError when the disk is full; what was written before is intact then."""
        with replaced(self.folder(number)) as new:
            save(new)
            write_card(new, card)

    async def announce(self, number: int) -> None:
        """Has a version that was written be drafted with. Raises Unavailable, and CheckpointError where it is gone."""
        folder = self.folder(number)
        recover(folder)
        card = read_card(folder)
        version = Version(
            number=number,
            folder=str(folder),
            weights=weights_digest(folder),
            target=card.target if card else "",
            target_weights=card.target_digest if card else "",
            tokenizer_digest=card.tokenizer_digest if card else "",
        )
        await self._versions.publish(version)

    async def tidy(self, published: Published) -> None:
        """Removes what nobody drafts with or goes back to. Raises Unavailable."""
        kept = {version.number for version in published.good[:KEPT]}
        for number in sorted({*self.written(), *published.versions} - kept):
            shutil.rmtree(self.folder(number), ignore_errors=True)
            if number in published.versions:
                await self._versions.forget(number)

    def written(self) -> list[int]:
        """Numbers of all that are there."""
        names = [path.name for path in self._folders.iterdir()] if self._folders.is_dir() else []
        return sorted(int(name) for name in names if name.isdigit())

    @property
    def place(self) -> str:
        """How far in the stream of examples an earlier run came; "0": there was none."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            return str(json.loads(self._notes.read_text(encoding="utf-8"))["place"])
        return "0"

    def note(self, place: str) -> None:
        """Remembers that. Raises OSError."""
        self._notes.parent.mkdir(parents=True, exist_ok=True)
        beside = self._notes.with_suffix(".new")
        beside.write_text(json.dumps({"place": place}) + "\n", encoding="utf-8")
        os.replace(beside, self._notes)
