"""The versions of a drafter: their folders on the disk, and their announcements in Redis."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from outrider.engine.checkpoints.model_card import ModelCard, read_card, weights_digest, write_card
from outrider.store.versions import PublishedVersions, Version, Versions
from outrider.training.saving.atomic_save import recover, replaced

KEPT = 3  # usable versions whose folders are kept: the one in use, and those to fall back to


class VersionStore:
    """The folders `OUTPUT/versions/00001` and so on. They are written atomically."""

    def __init__(self, output: Path, versions: Versions) -> None:
        self._folders = output.resolve() / "versions"
        self._notes = output.resolve() / "trainer.json"
        self._versions = versions

    def folder(self, number: int) -> Path:
        """Return the folder of a version."""
        return self._folders / f"{number:05d}"

    def write(self, number: int, card: ModelCard, save: Callable[[Path], None]) -> None:
        """Write a version. Raises CheckpointError when the disk is full; earlier versions are intact then."""
        with replaced(self.folder(number)) as new:
            save(new)
            write_card(new, card)

    async def announce(self, number: int) -> None:
        """Announce a written version to drafters. Raises Unavailable, and CheckpointError if the folder is gone."""
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

    async def tidy(self, published: PublishedVersions) -> None:
        """Remove versions that are neither in use nor a fallback. Raises Unavailable."""
        kept = {version.number for version in published.usable[:KEPT]}
        for number in sorted({*self.written(), *published.versions} - kept):
            shutil.rmtree(self.folder(number), ignore_errors=True)
            if number in published.versions:
                await self._versions.forget(number)

    def written(self) -> list[int]:
        """Return the numbers of all versions on the disk."""
        names = [path.name for path in self._folders.iterdir()] if self._folders.is_dir() else []
        return sorted(int(name) for name in names if name.isdigit())

    @property
    def stream_position(self) -> str:
        """The position in the stream of training samples that an earlier run reached; "0": there was none."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            return str(json.loads(self._notes.read_text(encoding="utf-8"))["place"])
        return "0"

    def note(self, stream_position: str) -> None:
        """Save the position in the stream of training samples. Raises OSError."""
        self._notes.parent.mkdir(parents=True, exist_ok=True)
        beside = self._notes.with_suffix(".new")
        beside.write_text(json.dumps({"place": stream_position}) + "\n", encoding="utf-8")
        os.replace(beside, self._notes)
