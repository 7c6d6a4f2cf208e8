"""The sampling settings other than seed and temperature: filters, penalties, bias, bans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from outrider.core.session.contract import Contract


class Additions(NamedTuple):
    """The numbers to add to the logits of some tokens; -inf: banned."""

    tokens: NDArray[np.int64]
    values: NDArray[np.float64]


class History:
    """The committed tokens of a session, which only grow; its answer begins at `answer_position`."""

    def __init__(self, tokens: Sequence[int], answer_position: int) -> None:
        self.tokens = [*tokens]
        self.answer_position = answer_position


@dataclass(frozen=True, slots=True, eq=False)
class Restriction:
    """Bias, penalties, bans, and unless greedy the filters of unlikely tokens; see `outrider.core.sampling.filters`.

    Also carries how many log-probabilities to return.
    """

    top_k: int  # 0 keeps all
    top_p: float  # 1 keeps all
    min_p: float  # 0 keeps all
    added: Additions
    only: bool  # whether all other tokens are banned
    first_stop: int  # position from which a stop id may be chosen
    added_early: Additions  # before that position
    repetition: float  # penalties: 1, 0 and 0 are none
    presence: float
    frequency: float
    history: History | None  # what they count; None: there are none
    logprobs: int | None  # alternatives with log-probabilities beside the token's own; None: none at all

    @classmethod
    def of(cls, contract: Contract, vocabulary: int, first_stop: int, history: History | None) -> Self:
        """Return a contract's restriction. `first_stop`, `history`: see there."""
        filters = (0, 1.0, 0.0) if contract.greedy else (contract.top_k, contract.top_p, contract.min_p)
        added = dict(_added(contract, vocabulary))
        stops = {token: -np.inf for token in contract.stop_ids if token < vocabulary}
        return cls(
            *filters,
            added=_additions(added),
            only=bool(contract.allowed_ids),
            first_stop=first_stop,
            added_early=_additions(added | stops),
            repetition=contract.repetition_penalty,
            presence=contract.presence_penalty,
            frequency=contract.frequency_penalty,
            history=history,
            logprobs=contract.logprobs,
        )


def _additions(added: dict[int, float]) -> Additions:
    return Additions(np.array([*added], np.int64), np.array([*added.values()], np.float64))


def _added(contract: Contract, vocabulary: int) -> Iterator[tuple[int, float]]:
    """Yield tokens and what is added to their logits; of a token's pairs the last one counts."""
    allowed = set(contract.allowed_ids)
    yield from ((token, 0.0) for token in contract.allowed_ids if token < vocabulary)
    yield from (pair for pair in contract.logit_bias if pair[0] < vocabulary and (not allowed or pair[0] in allowed))
    yield from ((token, -np.inf) for token in contract.banned_ids if token < vocabulary)
