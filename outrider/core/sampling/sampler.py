"""Token choice of one generation: from logits through the contract's penalties, filters and noise to a token.

The verifier and each drafter have a sampler over the same committed tokens. At a tree node the penalties also count the
tokens on the node's path.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.core.sampling.compiled import compiled_sampler
from outrider.core.sampling.filters import FloatRow, Occurrences, best_of, ids_within, keep_sampled, penalize
from outrider.core.sampling.grammar import GrammarState
from outrider.core.sampling.logprobs import pack
from outrider.core.sampling.noise import Draw, NoiseRows, generation_base
from outrider.core.sampling.restriction import History, Restriction
from outrider.core.session.contract import Contract

LOOKED_AT = 8  # best tokens of a row that are asked about, before the mask of all is computed


class Choice(NamedTuple):
    """The target's token, and by how much its log p + g exceeds the runner-up's (inf without one)."""

    token: int
    gap: float
    logprobs: bytes = b""  # see outrider.core.sampling.logprobs; empty where the contract asks for none


class Sampler:
    """Chooses one generation's tokens. In all methods `path` holds the tokens between the last committed one and the
    row of logits."""

    def __init__(
        self,
        contract: Contract,
        vocabulary: int,
        tokens: Sequence[int],
        answer_position: int,
        *,
        grammar: GrammarState | None = None,
        compiled: bool = True,
    ) -> None:
        """`tokens` are the committed tokens, prompt included; the answer begins at `answer_position`. `grammar`:
        that of the contract, behind these tokens. With `compiled`, compiled code chooses where it is installed; else
        numpy does.

        Tokens, and ids in the contract, may lie outside the vocabulary, because a drafter may lack ids of the target;
        they change nothing. The contract must allow at least one id of the vocabulary (`Contract.allows_any`).
        """
        self.contract = contract
        self.grammar = grammar
        self._compiled = compiled_sampler(contract, vocabulary, tokens, answer_position) if compiled else None
        self._length = len(tokens)
        self._first_stop = answer_position + contract.min_tokens  # position from which a stop id may be chosen
        self._noise = NoiseRows.of(contract, vocabulary)
        self._counts = Occurrences(vocabulary, tokens, answer_position) if contract.penalizes else None
        self._history = History(tokens, answer_position) if contract.penalizes else None
        self._biased = ids_within([token for token, _ in contract.logit_bias], vocabulary)
        self._bias = np.array([by for _, by in contract.logit_bias])[: self._biased.size]  # in the order of the ids
        self._stops = ids_within(contract.stop_ids, vocabulary)
        self._banned = self._forbidden_ids(vocabulary)
        self._vocabulary = vocabulary

    def draw(self, *, restricts: bool, penalizes: bool = False) -> Draw | None:
        """Return what `choose` needs beside the logits; None where it needs more than an engine can take.

        `restricts`: the engine takes restrictions; `penalizes`: penalties, too, for rows whose paths it knows.
        """
        contract = self.contract
        if self.grammar is not None:
            return None
        if contract.unrestricted and not self._may_not_stop(()):
            return Draw(self._base, contract.temperature)
        return self._restricted if restricts and (penalizes or not contract.penalizes) else None

    @cached_property
    def _base(self) -> int:
        return generation_base(self.contract.seed, self.contract.choice)

    @cached_property
    def _restricted(self) -> Draw:
        """The draw of every position; made when an engine asks for it."""
        restriction = Restriction.of(self.contract, self._vocabulary, self._first_stop, self._history)
        return Draw(self._base, self.contract.temperature, restriction)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens."""
        self._length += len(tokens)
        if self._compiled is not None:
            self._compiled.extend(tokens)
        self._noise.forget_below(self._length)
        if self.grammar is not None:
            self.grammar.extend(tokens)
        if self._counts is not None:
            self._counts.extend(tokens)
        if self._history is not None:
            self._history.tokens += tokens

    def prepare(self, position: int) -> None:
        """Compute the noise of `position` in advance, if numpy chooses."""
        if self._compiled is None:
            self._noise.row(position)

    def log_weights(self, logits: NDArray[np.float32], path: Sequence[int] = ()) -> FloatRow:
        """Return log p up to a constant, after all filters; -inf for forbidden tokens: [vocabulary].

        `logits` is the row after the path's last token. At temperature 0, temperature, top-k, top-p and min-p are not
        applied, because they cannot change an argmax.
        """
        scores = self._within_grammar(logits, path).astype(np.float64)
        if self._biased.size:
            scores[self._biased] += self._bias
        if self._counts is not None:
            with self._counts.following(path):
                penalize(scores, self.contract, self._counts)
        if self._banned.size:
            scores[self._banned] = -np.inf
        if self._may_not_stop(path):
            scores[self._stops] = -np.inf
        if self.grammar is not None and self._stops.size and not np.isfinite(scores).any():
            scores[self._ending_id(self.grammar, path)] = 0.0
        if not self.contract.greedy:
            keep_sampled(scores, self.contract)
        return scores

    def probabilities(self, logits: NDArray[np.float32], path: Sequence[int] = ()) -> FloatRow:
        """Return p: [vocabulary], sum 1. At temperature 0 the likeliest token has all of it, the lowest id on a tie."""
        weights = self.log_weights(logits, path)
        if self.contract.greedy:
            weights = np.where(np.arange(weights.size) == weights.argmax(), 0.0, -np.inf)
        p: FloatRow = np.exp(weights - weights.max())
        p /= p.sum()
        return p

    def scores(self, logits: NDArray[np.float32], path: Sequence[int] = ()) -> FloatRow:
        """Return log p + g up to a constant: [vocabulary]. The target's token is the first with the largest value."""
        scores = self.log_weights(logits, path)
        noise = self._noise.row(self._length + len(path))
        if noise is not None:
            scores += noise
        return scores

    def leading(
        self, logits: NDArray[np.float32], path: Sequence[int], count: int, *, noised: bool = True
    ) -> tuple[NDArray[np.int64], FloatRow]:
        """Return the tokens with the best scores, and these scores, best first; lower ids first among equals.

        The scores are those of `scores` if `noised`, else those of `log_weights`. There are at most `count`, and fewer
        where fewer tokens are allowed.
        """
        if self._compiled is not None:
            leading = self._compiled.leading(self._within_grammar(logits, path), path, count, noised=noised)
            if leading is not None and (leading[0].size or self.grammar is None):
                return leading
        return best_of(self.scores(logits, path) if noised else self.log_weights(logits, path), count)

    def choose(self, logits: NDArray[np.float32], path: Sequence[int] = ()) -> Choice:
        """Return the target's token. The lowest id wins a tie."""
        tokens, scores = self._leading_allowed(logits, path) or self.leading(logits, path, 2)
        if tokens.size:
            token, gap = int(tokens[0]), float(scores[0] - scores[1]) if tokens.size > 1 else np.inf
        else:  # no score is finite
            token, gap = int(self.scores(logits, path).argmax()), np.nan
        wanted = self.contract.logprobs
        return Choice(token, gap, b"" if wanted is None else pack(logits, token, wanted))

    def _leading_allowed(
        self, logits: NDArray[np.float32], path: Sequence[int]
    ) -> tuple[NDArray[np.int64], FloatRow] | None:
        """Return the best two tokens that the grammar allows, if they are among the best of all; else None.

        That spares the mask, which takes up to milliseconds. Where filters choose among what is allowed, it is needed.
        """
        if self.grammar is None or self._compiled is None or (self.contract.cuts and not self.contract.greedy):
            return None
        leading = self._compiled.leading(logits, path, LOOKED_AT, noised=True)
        if leading is None:
            return None
        tokens, scores = leading
        places = [*self.grammar.first_allowed(path, tokens.tolist(), 2)]
        return (tokens[places], scores[places]) if len(places) == 2 else None

    def _within_grammar(self, logits: NDArray[np.float32], path: Sequence[int]) -> NDArray[np.float32]:
        """Return the logits, -inf for what the grammar does not allow."""
        if self.grammar is None:
            return logits
        return np.where(self.grammar.allowed(path)[: self._vocabulary], logits, np.float32(-np.inf))

    def _may_not_stop(self, path: Sequence[int]) -> bool:
        """Return whether `min_tokens` bans the stop ids."""
        return self._stops.size > 0 and self._length + len(path) < self._first_stop

    def _ending_id(self, grammar: GrammarState, path: Sequence[int]) -> int:
        """Return the id that ends a text where the contract excludes all that the grammar allows.

        It is the lowest stop id that the grammar allows, or else the lowest.
        """
        allowed = self._stops[grammar.allowed(path)[self._stops]]
        return int((allowed if allowed.size else self._stops)[0])

    def _forbidden_ids(self, vocabulary: int) -> NDArray[np.int64]:
        """Return the ids that are banned or not among those allowed."""
        banned = ids_within(self.contract.banned_ids, vocabulary)
        if not self.contract.allowed_ids:
            return banned
        return np.union1d(banned, np.setdiff1d(np.arange(vocabulary), self.contract.allowed_ids))
