"""Acceptance priors that this router's sessions learn for later ones, and exchange with other routers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from outrider.core.control.depth.goodput import AcceptancePriors
from outrider.core.session.contract import Contract
from outrider.errors import OutriderError
from router.requests.served_models import ServedModel

SHARE_S = 5.0  # between two exchanges

Share = Callable[[str, AcceptancePriors], Awaitable[None]]

log = logging.getLogger(__name__)


class WarmStart:
    """Acceptance priors for each model, the models of its drafters, and temperature bucket."""

    def __init__(self, share: Share, drafter_models: Callable[[bytes], Sequence[str]]) -> None:
        """`drafter_models` returns the names of the models that draft for a tokenizer now."""
        self._share = share
        self._drafter_models = drafter_models
        self._entries: dict[str, AcceptancePriors] = {}
        self._entry_added = asyncio.Event()  # an entry was added that other routers may have priors for

    def priors(self, model: ServedModel, contract: Contract) -> AcceptancePriors:
        """Return the priors for a session of a model under a contract. A new entry gets the other routers' priors
        within some milliseconds."""
        name = f"{model.name}:{'+'.join(self._drafter_models(model.digest))}:{contract.temperature_bucket}"
        if name not in self._entries:
            self._entries[name] = AcceptancePriors()
            self._entry_added.set()
        return contract.own_or_shared(self._entries[name])

    def estimates(self) -> dict[str, Any]:
        """Return what is estimated, by model, models of its drafters, and temperature bucket."""
        return {name: priors.estimates() for name, priors in tuple(self._entries.items())}

    async def run(self) -> None:
        """Exchange all entries with other routers from time to time. Run until cancelled."""
        while True:
            for name, priors in [*self._entries.items()]:
                try:
                    await self._share(name, priors)
                except OutriderError as error:
                    log.debug("%s", error)  # retried at the next exchange
            with suppress(TimeoutError):
                async with asyncio.timeout(SHARE_S):
                    await self._entry_added.wait()
            self._entry_added.clear()
