"""Several generations at once with asyncio. usage: python examples/many.py [HOST:PORT]"""

import asyncio
import sys

import outrider


async def main() -> None:
    async with outrider.AsyncClient(*sys.argv[1:2]) as client:
        # `choice` numbers the samples of one prompt and seed.
        samples = [client.generate("x = [", max_tokens=24, seed=5, choice=number) for number in range(4)]
        for result in await asyncio.gather(*samples):
            print(repr(result.text))


asyncio.run(main())
