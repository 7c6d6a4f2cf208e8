"""Lists of faults at servers, made from a seed or read from a file, reproducibly."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from outrider.errors import ConfigError
from tests.chaos.servers import ROLES, WORKERS, Role

Kind = Literal["kill", "freeze", "flap", "restart", "black-hole"]
Which = Literal["busiest", "idlest"]
LINKS = ("router", "verifier", "drafter", "router-redis", "verifier-redis", "drafter-redis")  # into a black hole

FROZEN_S = 10.0
BETWEEN = range(20, 200)  # tokens that all sessions together receive between two faults
FLAPS = 3  # times that a Redis which flaps dies in a row


@dataclass(frozen=True, slots=True)
class ServerFault:
    """One fault at one server."""

    kind: Kind
    role: Role
    which: Which  # of the role's servers, by the sessions that depend on it at that moment
    after: int  # tokens that all sessions together receive first
    lasts_s: float = 0.0  # of a freeze or a black hole
    link: str = ""  # what a black hole swallows: the way to the servers of a role, or from them to Redis

    def __str__(self) -> str:
        return f"{self.kind} {self.link or self.role}"


def _kills(roles: Sequence[Role]) -> Callable[[random.Random, int], list[ServerFault]]:
    def made(rng: random.Random, count: int) -> list[ServerFault]:
        """`count` kills of each role, in rounds."""
        return [_fault(rng, "kill", role) for _ in range(count) for role in rng.sample(roles, len(roles))]

    return made


def _freezes(rng: random.Random, count: int) -> list[ServerFault]:
    roles = [role for _ in range(count) for role in rng.sample(ROLES, len(ROLES))]
    return [_fault(rng, "freeze", role, lasts_s=FROZEN_S) for role in roles]


def _freeze_of(role: Role) -> Callable[[random.Random, int], list[ServerFault]]:
    def made(rng: random.Random, count: int) -> list[ServerFault]:
        return [_fault(rng, "freeze", role, lasts_s=FROZEN_S) for _ in range(count)]

    return made


def _black_holes(rng: random.Random, count: int) -> list[ServerFault]:
    faults = []
    for link in (link for _ in range(count) for link in rng.sample(LINKS, len(LINKS))):
        role: Role = "redis" if link.endswith("redis") else next(role for role in WORKERS if role == link)
        faults.append(_fault(rng, "black-hole", role, lasts_s=FROZEN_S, link=link))
    return faults


def _flaps(rng: random.Random, count: int) -> list[ServerFault]:
    return [_fault(rng, "flap", "redis") for _ in range(count)]


def _restarts(rng: random.Random, count: int) -> list[ServerFault]:
    return [_fault(rng, "restart", role) for _ in range(count) for role in ("router", "verifier", "drafter")]


def _fault(rng: random.Random, kind: Kind, role: Role, lasts_s: float = 0.0, link: str = "") -> ServerFault:
    which: Which = "idlest" if rng.random() < 0.1 else "busiest"
    return ServerFault(kind, role, which, rng.choice(BETWEEN), lasts_s, link)


SCENARIOS: dict[str, Callable[[random.Random, int], list[ServerFault]]] = {
    **{f"kill-{role}": _kills([role]) for role in ROLES},
    "kill": _kills(ROLES),
    "freeze": _freezes,
    **{f"freeze-{role}": _freeze_of(role) for role in ROLES},
    "flap": _flaps,
    "restart": _restarts,
    "black-hole": _black_holes,
}


def scenario(name: str, seed: int, count: int) -> list[ServerFault]:
    """The faults of a scenario: `count` rounds of them. Raises ConfigError for a name that is none."""
    if name not in SCENARIOS:
        raise ConfigError(f"scenario: there is no {name!r}; there are {', '.join(SCENARIOS)}")
    return SCENARIOS[name](random.Random(f"{name}/{seed}"), count)


def write(faults: Sequence[ServerFault], path: Path) -> None:
    """Writes them down, one a line, to be injected again."""
    path.write_text("".join(json.dumps(asdict(fault)) + "\n" for fault in faults), encoding="utf-8")


def read(path: Path) -> list[ServerFault]:
    """The faults that a file holds. Raises ConfigError."""
    try:
        return [ServerFault(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"faults: {path} is not what `--write` writes: {error}") from None
