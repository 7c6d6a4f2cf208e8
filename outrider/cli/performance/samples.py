"""Timed generations, and the statistics of their speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Protocol, TypeVar, Unpack

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from outrider.client import AsyncClient
    from outrider.client._wire import Options

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Sample:
    """One generation, timed by its caller."""

    tokens: tuple[int, ...]
    arrivals: tuple[float, ...]  # of each token, in seconds since the request; equal for tokens that arrive together
    steps: int  # passes of the target that committed the tokens
    wire_bytes: int = 0  # on drafters' streams, both directions
    reached_by_depth: tuple[int, ...] = ()  # as in outrider.client.Usage
    tried_by_depth: tuple[int, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        """Decode speed: the tokens after the first arrival over the time from the first arrival to the last."""
        seconds = self.arrivals[-1] - self.arrivals[0] if self.arrivals else 0.0
        return sum(arrival > self.arrivals[0] for arrival in self.arrivals) / seconds if seconds > 0 else 0.0

    @property
    def first_token_s(self) -> float:
        """Seconds from the request to the first token."""
        return self.arrivals[0] if self.arrivals else 0.0

    @property
    def gaps(self) -> list[float]:
        """Seconds between one arrival and the next; tokens that arrive together are one arrival."""
        distinct = sorted(set(self.arrivals))
        return [later - earlier for earlier, later in pairwise(distinct)]


async def timed(
    client: AsyncClient,
    prompt: str | Sequence[int] | None,
    on_tokens: Callable[[int], None] = lambda tokens: None,
    **options: Unpack[Options],
) -> Sample:
    """Run a generation and time it at the caller. `on_tokens` receives the number of tokens of each chunk."""
    began = time.perf_counter()
    tokens: list[int] = []
    arrivals: list[float] = []
    stream = client.stream(prompt, **options)
    async for chunk in stream:
        arrivals += [time.perf_counter() - began] * len(chunk.token_ids)
        tokens += chunk.token_ids
        on_tokens(len(chunk.token_ids))
    usage = stream.result.usage
    return Sample(
        tuple(tokens), tuple(arrivals), usage.steps, usage.wire_bytes, usage.reached_by_depth, usage.tried_by_depth
    )


def percentile(values: Iterable[float], percent: float) -> float:
    """Return a percentile of the values, interpolated between neighbours; NaN if there are no values."""
    known = list(values)
    return float(np.percentile(known, percent)) if known else float("nan")


def spread(values: Iterable[float]) -> float:
    """Return the interquartile range."""
    known = list(values)
    return percentile(known, 75) - percentile(known, 25)


def paired_ratio(over: Mapping[Key, float], under: Mapping[Key, float]) -> float | None:
    """Return the median of the ratios of values with the same key; None when there is no such pair."""
    ratios = [value / under[key] for key, value in over.items() if under.get(key, 0.0) > 0]
    return median(ratios) if ratios else None


def acceptance_length(samples: Iterable[Sample]) -> float:
    """Return the committed tokens per pass of the target, over all samples; NaN without a pass."""
    known = list(samples)
    steps = sum(sample.steps for sample in known)
    return sum(len(sample.tokens) for sample in known) / steps if steps else float("nan")


def bytes_per_token(samples: Iterable[Sample]) -> float:
    """Return the wire bytes per committed token, over all samples; NaN without a token."""
    known = list(samples)
    tokens = sum(len(sample.tokens) for sample in known)
    return sum(sample.wire_bytes for sample in known) / tokens if tokens else float("nan")


class DepthCounts(Protocol):
    """Steps by depth, as in outrider.client.Usage."""

    @property
    def reached_by_depth(self) -> tuple[int, ...]: ...

    @property
    def tried_by_depth(self) -> tuple[int, ...]: ...


def steps_by_depth(samples: Iterable[DepthCounts]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return, for depth d at index d - 1, the steps whose path reached d, and those that verified a node at d."""
    known = list(samples)
    depths = max((len(sample.tried_by_depth) for sample in known), default=0)
    reached, tried = np.zeros(depths), np.zeros(depths)
    for sample in known:
        reached[: len(sample.reached_by_depth)] += sample.reached_by_depth
        tried[: len(sample.tried_by_depth)] += sample.tried_by_depth
    return reached, tried


def acceptance_by_depth(samples: Iterable[DepthCounts]) -> list[float]:
    """Return, for depth d at index d - 1, the steps whose path reached d over the steps that verified a node at d."""
    reached, tried = steps_by_depth(samples)
    return [float(one / all_) for one, all_ in zip(reached, tried, strict=True) if all_]
