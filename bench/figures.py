"""What was measured, and the figures made of it. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from bench.limit import Limit
from bench.llama_cpp import CHAINS
from bench.passes import PassTime
from outrider.cli.samples import Sample, bytes_per_token, paired_ratio

MEASURED_NOT = "-"


@dataclass(frozen=True, slots=True)
class Take:
    """One sample and what it is a sample of. Takes that differ in the row alone are a pair."""

    target: int  # parameters
    row: str
    prompt: str
    repetition: int
    temperature: float
    sample: Sample
    round_trip_ms: float | None = None  # between drafter and verifier, where it was made longer

    @property
    def key(self) -> tuple[int, float, str, int]:
        """What it has in common with the takes that it is compared with."""
        return self.target, self.temperature, self.prompt, self.repetition


@dataclass(frozen=True, slots=True)
class Profile:
    """Where a row's steps spend their time, one session: medians, as the verifier says them."""

    target: int
    row: str
    rows: int  # tokens in a pass
    forward_ms: float
    waited_ms: float
    overhead_ms: float  # neither pass nor wait
    predicted_ms: float  # the pass, by the verifier's cost model; NaN where that does not reach
    floor_ms: float  # the least that such a pass can take on this machine
    read_ms: float = math.nan  # the least time to read its weights

    @property
    def over_read(self) -> float:
        """A step without its waits, over reading its weights."""
        return (self.forward_ms + self.overhead_ms) / self.read_ms

    @property
    def of_floor(self) -> float:
        """A step without its waits, over the floor."""
        return (self.forward_ms + self.overhead_ms) / self.floor_ms


@dataclass(frozen=True, slots=True)
class Memory:
    """What a process of a row held at most."""

    target: int
    row: str
    process: str
    peak_mb: float
    resident_mb: float  # at the end
    fixed_mb: float = 0.0  # of it, weights and the KV of all slots: a verifier's


@dataclass(frozen=True, slots=True)
class Loaded:
    """One row under one load."""

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
    profile: Profile


@dataclass(slots=True)
class Results:
    """All of a run."""

    takes: list[Take] = field(default_factory=list)
    firsts: list[Take] = field(default_factory=list)  # of one token each, after prompts that nobody has seen before
    profiles: list[Profile] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    limits: dict[int, Limit] = field(default_factory=dict)  # by target, measured around its rows
    loads: list[Loaded] = field(default_factory=list)
    far: list[Take] = field(default_factory=list)  # the distance suite's
    passes: list[PassTime] = field(default_factory=list)
    tiers: list[Take] = field(default_factory=list)
    gpu: list[str] = field(default_factory=list)  # what `bench.gpu` says


def ratio(takes: Iterable[Take], over: str, under: str) -> float | None:
    """The median over pairs of takes of one row's speed over another's; None without a pair."""
    speeds: dict[str, dict[tuple[int, float, str, int], float]] = {over: {}, under: {}}
    for take in takes:
        if take.row in speeds:
            speeds[take.row][take.key] = take.sample.tokens_per_s
    return paired_ratio(speeds[over], speeds[under])


def over_best(takes: Sequence[Take], over: str, rows: Iterable[str]) -> float | None:
    """As `ratio`, over the one of `rows` that leaves the smallest ratio; None without a pair with any."""
    found = [value for row in rows if (value := ratio(takes, over, row)) is not None]
    return min(found, default=None)


def of_shortest(takes: Sequence[Take], round_trip_ms: float) -> float | None:
    """The median over pairs of a speed at a round trip over that at the shortest one."""
    trips = [take.round_trip_ms for take in takes if take.round_trip_ms is not None]
    speeds = {
        trip: {take.key: take.sample.tokens_per_s for take in takes if take.round_trip_ms == trip}
        for trip in (round_trip_ms, min(trips, default=round_trip_ms))
    }
    return paired_ratio(speeds[round_trip_ms], speeds[min(trips, default=round_trip_ms)])


def last_line(results: Results) -> str:
    """The line for scripts: of the largest target whose rows were measured. What was not measured is a dash."""
    target = max((take.target for take in results.takes), default=0)
    takes = [take for take in results.takes if take.target == target]
    cold, hot = ([take for take in takes if take.temperature == heat] for heat in (0.0, 1.0))
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
    """A figure as tables show it; a dash where there is none."""
    return MEASURED_NOT if value is None or not math.isfinite(value) else f"{value:.{digits}f}"
