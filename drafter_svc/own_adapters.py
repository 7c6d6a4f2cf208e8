"""The drafter's own low-rank adapters: for a target's adapter the one in the folder of the same name."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from outrider.core.session.contract import Adapter
from outrider.engine.adapters.low_rank import adapter_folder
from outrider.engine.interface.engine import Engine
from outrider.errors import OutriderError

log = logging.getLogger(__name__)


class OwnAdapters:
    """Loads adapters one at a time, beside the passes, and keeps those that were used most recently.

    Each version of a target's adapter has the drafter read its own anew.
    """

    def __init__(self, folder: Path, most: int) -> None:
        """`folder`: below which the adapters are; `most`: adapters that are kept."""
        self._folder = folder
        self._most = most
        self._loaded: OrderedDict[Adapter, object | None] = OrderedDict()  # None: there is none, or it does not fit
        self._loading: set[Adapter] = set()
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "adapters")

    def known(self, adapter: Adapter, engine: Engine, loaded: Callable[[], object]) -> object | None:
        """Return the weights that the drafter has for a target's adapter; None while it has none. What is not known yet
        is read; then `loaded` is called, in another thread."""
        with self._lock:
            if adapter in self._loaded:
                self._loaded.move_to_end(adapter)
                return self._loaded[adapter]
            if adapter in self._loading or len(self._loading) >= self._most:
                return None
            self._loading.add(adapter)
        self._thread.submit(self._load, adapter, engine).add_done_callback(lambda _: loaded())
        return None

    def _load(self, adapter: Adapter, engine: Engine) -> None:
        weights: object | None = None
        try:
            path = adapter_folder(self._folder, adapter.folder)
            if path is not None:
                weights, _ = engine.load_adapter(path)
                log.info("adapter %s is drafted for with the one in %s", adapter.folder, path)
        except Exception as error:  # whatever it is, sessions go on without it
            bug = not isinstance(error, OutriderError)
            log.warning("sessions with adapter %s are drafted for without it: %s", adapter.folder, error, exc_info=bug)
        with self._lock:
            self._loaded[adapter] = weights
            self._loading.discard(adapter)
            while len(self._loaded) > self._most:
                self._loaded.popitem(last=False)
