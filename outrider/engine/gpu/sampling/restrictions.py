"""Choice of tokens on the device under a bias, bans, penalties and filters.

`outrider.core.sampling.filters` defines them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from outrider.core.session.contract import MAX_LOGPROBS
from outrider.engine.gpu.passes.staging import FLAG, FLOAT, INTEGER, Staging, placed
from outrider.engine.gpu.sampling.penalties import PenaltyInputs, penalized
from outrider.engine.gpu.sampling.restricted_rows import RestrictedRow, grouped
from outrider.engine.gpu.sampling.sampling import best, gumbel, noise_bits, scores

OUTPUTS = 64  # rows of which tokens are chosen together
DEPTH = 1024  # best tokens of a row among which its filters are applied
ENTRIES = 2**15  # tokens of all these rows whose logits change
TOP = MAX_LOGPROBS + 1  # likeliest tokens of a row; one more than is wanted, which shows a tie with the last one
ROUNDING = 1e-9  # share of a row's probability; a bound of top-p that is closer may be rounding


class RestrictionInputs(NamedTuple):
    """What the choice reads for the rows that want logits."""

    cuts: Tensor  # [outputs] bool, whether there are filters
    top_k: Tensor  # [outputs] int64; 0 keeps all
    top_p: Tensor  # [outputs] float64
    log_min_p: Tensor  # [outputs] float64; -inf keeps all
    only: Tensor  # [outputs] bool, whether tokens without an entry are banned
    used: Tensor  # [1] int64, number of entries
    entries: Tensor  # [entries, 3] float64: rows, tokens, and what is added to their logits


_NEUTRAL = (False, 0, 1.0, -np.inf, False)  # of the first ones


class RestrictionBuffers:
    """The buffers of an engine, which recorded graphs read."""

    def __init__(self, device: torch.device) -> None:
        row = (OUTPUTS,)
        kinds = (FLAG, INTEGER, FLOAT, FLOAT, FLAG)
        fields = [*placed([*((kind, row) for kind in kinds), (INTEGER, (1,)), (FLOAT, (ENTRIES, 3))])]
        self._staging = Staging(fields[-1].stop, device)
        *self._rows, self._used, self._entries = map(self._staging.array, fields)
        self._device = RestrictionInputs(*map(self._staging.tensor, fields))
        self._entries_start = fields[-1].start
        self.send([])

    def inputs(self, count: int) -> RestrictionInputs:
        """Return what the choice of `count` rows reads on the device."""
        *rows, used, entries = self._device
        return RestrictionInputs._make([*(part[:count] for part in rows), used, entries])

    def send(self, rows: Sequence[RestrictedRow | None]) -> NDArray[np.bool_]:
        """Begin to copy the restrictions of at most `OUTPUTS` rows. Return which fit; the host chooses for others."""
        self._staging.wait()
        fits, used = np.ones(len(rows), np.bool_), 0
        for part, neutral in zip(self._rows, _NEUTRAL, strict=True):
            part.fill(neutral)
        for first, own in grouped(rows):
            it = own[0].restriction
            log_min_p = np.log(it.min_p) if it.min_p > 0.0 else -np.inf
            cuts = (it.top_k, it.top_p, it.min_p) != (0, 1.0, 0.0)
            values = (cuts, it.top_k, it.top_p, log_min_p, it.only)
            for part, value in zip(self._rows, values, strict=True):
                part[first : first + len(own)] = value
            early = np.array([row.position < it.first_stop for row in own])
            for which, (tokens, added) in ((~early, it.added), (early, it.added_early)):
                wanted = first + np.flatnonzero(which)
                taken = wanted[: (ENTRIES - used) // len(tokens)] if len(tokens) else wanted
                fits[wanted[len(taken) :]] = False
                stop = used + len(taken) * len(tokens)
                block = self._entries[used:stop].reshape(len(taken), len(tokens), 3)
                block[:, :, 0], block[:, :, 1], block[:, :, 2] = taken[:, None], tokens, added
                used = stop
        self._used[0] = used
        self._staging.copy((0, self._entries_start + self._entries[:used].nbytes))
        return fits


def choose_restricted(
    logits: Tensor,
    keys: Tensor,
    temperatures: Tensor,
    given: RestrictionInputs,
    steps: Tensor,
    count: int,
    penalties: PenaltyInputs | None = None,
) -> Tensor:
    """Return the `count` best tokens of each row and their scores, as `Kernels.choose` does: [rows, 2 * count] float64.

    `logits`: [rows, vocabulary]; `steps`: `noise_steps`; `penalties`: None if no row has any. A row's first score is
    not a number where the host chooses: where its filters keep more than `DEPTH` tokens, or rounding could decide what
    they keep or which token is first.
    """
    allowed = _adjusted(logits, given)
    if penalties is not None:
        allowed = penalized(allowed, penalties)
    tokens, values = best(scores(allowed, keys, temperatures, steps), count)
    weights = allowed / torch.where(temperatures == 0.0, 1.0, temperatures)[:, None]
    kept_weights, ids, unknown = _filtered(weights, given)
    noised = kept_weights + gumbel(noise_bits(keys, steps[ids]))
    found, found_values = best(noised, min(count, ids.shape[1]))
    short = count - found.shape[1]
    found = pad(ids.gather(1, found), (0, short))
    found_values = pad(found_values, (0, short), value=-torch.inf)
    first, second = found_values[:, 0], found_values[:, min(1, count - 1)]
    unknown = unknown | ((first == second) if count > 1 else torch.zeros_like(unknown)) | (first == -torch.inf)
    found_values[:, 0] = torch.where(unknown, torch.nan, first)
    cuts = given.cuts[:, None]
    return torch.cat((torch.where(cuts, found, tokens).double(), torch.where(cuts, found_values, values)), 1)


def likeliest(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return what log-probabilities are made of: [rows, 2 + 2 * TOP] float64.

    These are the logit of each of `tokens` [rows], the logarithm of the sum of exp(logits), the TOP likeliest tokens
    and their logits, lower ids first among equals; which of equal ones are the last of them is open.
    """
    raw = logits.double()
    values, ids = raw.topk(min(TOP, raw.shape[1]))
    order = ids.sort(1).indices
    ids, values = ids.gather(1, order), values.gather(1, order)
    values, order = torch.sort(values, stable=True, dim=1, descending=True)
    ids, short = ids.gather(1, order), TOP - values.shape[1]
    own = raw.gather(1, tokens[:, None])
    columns = (
        own,
        raw.logsumexp(1, keepdim=True),
        pad(ids.double(), (0, short)),
        pad(values, (0, short), value=-torch.inf),
    )
    return torch.cat(columns, 1)


def _adjusted(logits: Tensor, given: RestrictionInputs) -> Tensor:
    """Return the logits with bias and bans: [rows, vocabulary] float64."""
    rows, vocabulary = logits.shape
    adjusted = torch.zeros(rows + 1, vocabulary, dtype=torch.float64, device=logits.device)  # the last: of padding
    adjusted[:rows] = logits
    at, tokens = given.entries[:, 0].long(), given.entries[:, 1].long()
    unused = torch.arange(len(at), device=at.device) >= given.used
    at, tokens = at.clamp_max(rows).masked_fill(unused, rows), tokens.masked_fill(unused, 0)
    changed = adjusted[at, tokens] + given.entries[:, 2]
    adjusted[:rows].masked_fill_(given.only[:, None], -torch.inf)
    adjusted[at, tokens] = changed
    return adjusted[:rows]


def _filtered(weights: Tensor, given: RestrictionInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Apply top-k, top-p and min-p to log p: [rows, vocabulary].

    Return the best weights, -inf where a filter excludes them, their tokens, [rows, depth] each, and for which rows
    this does not show what is kept: [rows].
    """
    vocabulary = weights.shape[1]
    depth = min(DEPTH, vocabulary)
    values, ids = weights.topk(depth)
    limited = (given.top_k > 0) & (given.top_k < vocabulary)
    last = values.gather(1, (given.top_k - 1).clamp(0, depth - 1)[:, None])
    kept = ~limited[:, None] | (values >= last)  # ties with the k-th best stay
    chances = (values - values[:, :1]).exp()
    total = torch.where(limited, (chances * kept).sum(1), (weights - values[:, :1]).exp().sum(1))
    cumulative, limit = chances.cumsum(1), (given.top_p * total)[:, None]
    by_p = given.top_p < 1.0
    before = pad(cumulative[:, :-1], (1, 0))
    close = (kept & ((cumulative - limit).abs() <= ROUNDING * total[:, None])).any(1)
    within = ~by_p[:, None] | (before < limit)
    count = within.sum(1, keepdim=True)
    following = values.gather(1, count.clamp_max(depth - 1))
    tied = (count[:, 0] < depth) & (values.gather(1, count - 1) == following)[:, 0]  # lower ids stay, in no order here
    open_ended = kept & within & (values >= values[:, :1] + given.log_min_p[:, None])
    unknown = (by_p & (close | tied)) | (limited & (given.top_k > depth))
    if depth < vocabulary:
        unknown |= open_ended.all(1)
    return torch.where(open_ended, values, -torch.inf), ids, unknown
