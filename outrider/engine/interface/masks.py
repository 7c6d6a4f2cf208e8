"""Which rows of a pass see which: the masks of tree attention.

Source: SpecInfer (Miao et al., arXiv 2305.09781), section 4.2: one causal mask over all branches of a tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.engine.interface.batch import Segment

Mask = NDArray[np.bool_]


def path_mask(paths: Sequence[Iterable[int]], rows: int) -> Mask:
    """Return a mask [len(paths), rows] of rows that each see exactly the rows of one path."""
    mask = np.zeros((len(paths), rows), np.bool_)
    for row, path in enumerate(paths):
        mask[row, [*path]] = True
    return mask


def tree_mask(chain: int, parents: Sequence[int]) -> Mask:
    """Return the mask of a causal chain of `chain` rows with a tree behind it: [n, n], n = chain + len(parents).

    `parents`: for each node of the tree, the row that it follows: one of the chain, or of a node before it.
    """
    mask = np.tri(chain + len(parents), dtype=np.bool_)
    mask[chain:] = False
    for row, above in enumerate(parents, chain):
        mask[row] = mask[above]
        mask[row, row] = True
    return mask


def visible_keys(segments: Sequence[Segment], places: Sequence[int], shape: tuple[int, int, int]) -> Mask:
    """Return which keys each query of a padded batch sees: `shape` = [batch, width, keys].

    `places`: the batch row of each segment. Padding queries see the first key alone, because a softmax over no key has
    no value.
    """
    visible = np.zeros(shape, np.bool_)
    visible[:, :, 0] = True
    for place, segment in zip(places, segments, strict=True):
        count, prefix = len(segment.tokens), segment.prefix
        visible[place, :count, :prefix] = True
        visible[place, :count, prefix : prefix + segment.span] = segment.seen
    return visible
