"""Sessions of a router share what they measure, and a router that starts begins with other routers' figures."""

import asyncio

from outrider.core.control.depth.goodput import AcceptancePriors
from outrider.core.session.contract import Contract
from outrider.errors import Unavailable
from router.drafters.warm_start import WarmStart
from tests.router.test_tenants import MODEL

HOT = Contract(seed=0, max_tokens=1)
GREEDY = Contract(seed=0, max_tokens=1, temperature=0.0)


async def test_warm_start_entries_are_separate_by_drafters_and_temperature_bucket() -> None:
    names: list[str] = []
    drafters = ["drafter"]

    async def share(name: str, priors: AcceptancePriors) -> None:
        names.append(name)
        priors.first.observe(0.25)
        if len(names) == 1:
            raise Unavailable("no Redis")

    book = WarmStart(share, lambda _: drafters)
    keeping = asyncio.create_task(book.run())
    await asyncio.sleep(0)
    hot = book.priors(MODEL, HOT)
    assert book.priors(MODEL, HOT) is hot
    assert book.priors(MODEL, GREEDY) is not hot
    async with asyncio.timeout(5):
        while len(names) < 2:
            await asyncio.sleep(0.01)
    assert hot.first.mean == 0.25  # what was read is in the very entry that sessions hold
    assert names[0] == f"{MODEL.name}:drafter:hot"
    drafters.append("mid")
    assert book.priors(MODEL, HOT) is not hot
    async with asyncio.timeout(5):
        while f"{MODEL.name}:drafter+mid:hot" not in names:
            await asyncio.sleep(0.01)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    assert keeping.cancelled()
