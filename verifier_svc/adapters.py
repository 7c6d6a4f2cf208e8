"""The low-rank adapters of a verifier's model: those in its folder, loaded when a session first needs them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

from outrider.core.session.contract import Adapter
from outrider.engine.adapters.low_rank import adapter_folder
from outrider.engine.interface.engine import Engine
from outrider.errors import CheckpointError, ConfigError, Conflict, InvalidRequest, NotFound


class LoadedAdapter(NamedTuple):
    """An adapter that sessions may have."""

    weights: object  # the weights for segments; a session keeps them, also after they were dropped here
    digest: str
    rank: int
    parameters: int


class AdapterStore:
    """Loads adapters one at a time, beside the passes, and keeps the most recently used ones."""

    def __init__(self, engine: Engine, folder: Path | None, most: int) -> None:
        """`folder`: below which adapters are; None: there are none. `most`: adapters that it keeps."""
        self._engine = engine
        self._folder = folder
        self._most = most
        self._loaded: OrderedDict[str, LoadedAdapter] = OrderedDict()  # by folder, least recently used first
        self._loading = asyncio.Lock()

    @property
    def loaded(self) -> int:
        """Number of adapters that are kept."""
        return len(self._loaded)

    async def get(self, adapter: Adapter | None) -> object | None:
        """Return the weights of a session's adapter, loaded if need be; None for none.

        Raises Conflict where its files are not those of the session's version, and as `load`.
        """
        if adapter is None:
            return None
        found = self._loaded.get(adapter.folder)
        if found is None or found.digest != adapter.digest:
            found = await self.load(adapter.folder, adapter.digest)
        if found.digest != adapter.digest:
            raise Conflict(f"adapter {adapter.folder!r} has changed since this session began; begin another session")
        self._loaded.move_to_end(adapter.folder)
        return found.weights

    async def load(self, folder: str, digest: str = "") -> LoadedAdapter:
        """Return an adapter, read anew unless the one with that digest has been loaded meanwhile.

        Raises NotFound where this verifier has no such folder; InvalidRequest for what cannot be served.
        """
        path = self._path(folder)
        async with self._loading:
            found = self._loaded.get(folder)
            if found is None or found.digest != digest:
                try:
                    weights, read = await asyncio.to_thread(self._engine.load_adapter, path)
                except (CheckpointError, ConfigError) as error:
                    raise InvalidRequest("adapter", str(error)) from None
                found = LoadedAdapter(weights, read.digest, read.rank, read.parameters)
                self._loaded[folder] = found
            self._loaded.move_to_end(folder)
            while len(self._loaded) > self._most:
                self._loaded.popitem(last=False)
            return found

    def _path(self, folder: str) -> Path:
        """Return the path of an adapter's folder, which is below the store's. Raises NotFound."""
        if self._folder is None:
            raise NotFound("this verifier has no adapters; start it with --adapters, the folder that holds them")
        if (path := adapter_folder(self._folder, folder)) is None:
            raise NotFound(f"adapter {folder[:80]!r} is not here: no such folder in {self._folder}")
        return path
