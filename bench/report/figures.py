"""The measurements of a run, and the statistics computed from them. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from bench.engine.formats import FormatResults, formats_line
from bench.engine.passes import PassTime
from bench.engine.roofline import Limit
from bench.peers.llama_cpp import CHAINS
from bench.rows.engine_time import IdleShares
from outrider.cli.performance.samples import Sample, bytes_per_token, paired_ratio

NOT_MEASURED = "-"


@dataclass(frozen=True, slots=True)
class Measurement:
    """One sample with its conditions. Takes that differ only in the row are a pair."""

    target: int  # parameters
    row: str
    prompt: str
    repetition: int
    temperature: float
    sample: Sample
    link: str = ""  # between drafter and verifier, in the suite distance
    idle: IdleShares | None = None  # of verifier and drafter, from the request to its end, in the suite distance

    @property
    def key(self) -> tuple[int, float, str, int]:
        """The conditions that a take shares with those that it is compared with."""
        return self.target, self.temperature, self.prompt, self.repetition


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Where a row's steps spend their time, with one session: medians from the verifier."""

    target: int
    row: str
    rows: int  # tokens in a pass
    forward_ms: float
    waited_ms: float
    overhead_ms: float  # neither pass nor wait
    predicted_ms: float  # of the pass, by the verifier's cost model; NaN beyond the model's range
    floor_ms: float  # lower bound of such a pass on this machine
    read_ms: float = math.nan  # lower bound of reading the weights

    @property
    def over_read(self) -> float:
        """The time of a step without its waits, over that of reading its weights."""
        return (self.forward_ms + self.overhead_ms) / self.read_ms

    @property
    def of_floor(self) -> float:
        """The time of a step without its waits, over the floor."""
        return (self.forward_ms + self.overhead_ms) / self.floor_ms


@dataclass(frozen=True, slots=True)
class RowMemory:
    """The memory of a row's process."""

    target: int
    row: str
    process: str
    peak_mb: float
    resident_mb: float  # at the end
    fixed_mb: float = 0.0  # part of it for weights and the KV of all slots, of a verifier


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """The figures of one row under one load."""

    target: int
    row: str
    callers: int
    repetition: int
    goodput: float  # tokens per second over all callers
    answers: int
    acceptance_length: float
    first_token_p50_s: float
    gap_p50_s: float
    gap_p99_s: float
    profile: StepProfile


@dataclass(frozen=True, slots=True)
class ColdFigures:
    """The first seconds of a cluster, and those of another one that decodes plainly under the same load."""

    target: int
    callers: int
    repetition: int
    goodput: float  # tokens per second over all callers, from the first request on
    plain: float


@dataclass(frozen=True, slots=True)
class SettlingTime:
    """How long a router decoded until it had chosen among several tiers."""

    target: int
    repetition: int
    temperature: float
    seconds: float | None  # None: it had not, after all trials


@dataclass(slots=True)
class BenchResults:
    """All measurements of a run."""

    takes: list[Measurement] = field(default_factory=list)
    # Of one token each, after prompts that no row has seen before.
    firsts: list[Measurement] = field(default_factory=list)
    profiles: list[StepProfile] = field(default_factory=list)
    memory: list[RowMemory] = field(default_factory=list)
    limits: dict[int, Limit] = field(default_factory=dict)  # by target, measured before and after its rows
    loads: list[LoadFigures] = field(default_factory=list)
    cold: list[ColdFigures] = field(default_factory=list)
    far: list[Measurement] = field(default_factory=list)  # the distance suite's
    passes: list[PassTime] = field(default_factory=list)
    tiers: list[Measurement] = field(default_factory=list)
    settling: list[SettlingTime] = field(default_factory=list)  # the suite tiers'
    formats: list[FormatResults] = field(default_factory=list)
    gpu: list[str] = field(default_factory=list)  # output lines of `bench.gpu`


def ratio(takes: Iterable[Measurement], over: str, under: str) -> float | None:
    """Return the median, over pairs of takes, of one row's speed over another's; None without a pair."""
    speeds: dict[str, dict[tuple[int, float, str, int], float]] = {over: {}, under: {}}
    for take in takes:
        if take.row in speeds:
            speeds[take.row][take.key] = take.sample.tokens_per_s
    return paired_ratio(speeds[over], speeds[under])


def over_best(takes: Sequence[Measurement], over: str, rows: Iterable[str]) -> float | None:
    """Return the smallest `ratio` of one row to any of `rows`; None without a pair."""
    found = [value for row in rows if (value := ratio(takes, over, row)) is not None]
    return min(found, default=None)


def of_first_link(takes: Sequence[Measurement], link: str) -> float | None:
    """Return the median, over pairs, of the speed over a link to that over the first link; None without a pair."""
    over, first = (
        {take.key: take.sample.tokens_per_s for take in takes if take.link == name} for name in (link, takes[0].link)
    )
    return paired_ratio(over, first)


def last_line(results: BenchResults) -> str:
    """Return the line for scripts, for the largest target whose rows were measured; a dash for missing figures.

    The suite formats alone has a line of its own.
    """
    if results.formats and not results.takes:
        return formats_line(results.formats)
    target = max((take.target for take in results.takes), default=0)
    takes = [take for take in results.takes if take.target == target]
    cold, hot = ([take for take in takes if take.temperature == temperature] for temperature in (0.0, 1.0))
    profiles = {profile.row: profile for profile in results.profiles if profile.target == target}
    plain, distributed = profiles.get("plain"), profiles.get("distributed")
    figures = {
        "spec_over_plain_t0": (ratio(cold, "distributed", "plain"), 2),
        "spec_over_plain_t1": (ratio(hot, "distributed", "plain"), 2),
        "over_assisted": (ratio(takes, "distributed", "assisted"), 2),
        "plain_over_transformers": (ratio(takes, "plain", "transformers"), 2),
        "distributed_over_in_process": (ratio(takes, "distributed", "in-process"), 2),
        "overhead_ms": (distributed.overhead_ms if distributed else None, 2),
        "bytes_per_token": (bytes_per_token(take.sample for take in takes if take.row == "distributed"), 0),
        "fraction_of_floor": (plain.of_floor if plain else None, 2),
        "step_over_floor": (plain.over_read if plain else None, 2),
        "over_llama_cpp_t0": (over_best(cold, "distributed", CHAINS), 2),
        "over_llama_cpp_t1": (over_best(hot, "distributed", CHAINS), 2),
    }
    return "bench: " + " ".join(f"{name}={shown(value, digits)}" for name, (value, digits) in figures.items())


def shown(value: float | None, digits: int = 1) -> str:
    """Format a figure for tables; a dash for a missing one."""
    return NOT_MEASURED if value is None or not math.isfinite(value) else f"{value:.{digits}f}"
