"""An index of contexts: finds the positions with the longest match of a text's end, the latest first.

The context of a position is the tokens before it, read backwards: at most `LONGEST` tokens, all of the position's own
document. The contexts of all positions form a trie in which a path without branches is one edge: the suffix tree of the
text read backwards (Weiner, 1973), cut at that depth. A token adds at most one leaf and one branch, in at most
`LONGEST` steps, however long the text is. What follows a position is read from the text: long continuations take no
memory.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator, Sequence

LONGEST = 16  # tokens of a context; longer matches are treated as this long
SEPARATOR = -1  # precedes each document


class _Branch:
    """The contexts that begin with the same `depth` tokens."""

    __slots__ = ("children", "depth", "latest")

    def __init__(self, depth: int, latest: int, children: dict[int, _Branch | int]) -> None:
        self.depth = depth
        self.latest = latest  # the latest position below
        self.children = children  # by the next token, latest last; a complete context is its latest position


class SuffixTrie:
    """An index over documents. Tokens are added at one end, and the oldest documents are removed at the other.

    Positions count from the first separator, which has position 0; separators have positions, too. Tokens are 0 to
    2**31 - 1. Measured: 200 bytes per token of Python source, and 1 to 3 microseconds to add one to 1,000 to 400,000
    tokens; at most 5 microseconds where the text is a single token or random bits.
    """

    def __init__(self) -> None:
        self._text = array("i", [SEPARATOR])  # [window]
        self._gaps = array("I", [0])  # [window] distance to the previous position with the same context; 0: none
        self._start = 0  # position of the window's first token
        self._first = 1  # position of the oldest document's first token
        self._root = _Branch(0, 0, {})

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the latest document."""
        text, gaps = self._text, self._gaps
        for token in tokens:
            gaps.append(self._insert(self._start + len(text)) if text[-1] != SEPARATOR else 0)
            text.append(token)

    def separate(self) -> None:
        """End the latest document."""
        self._text.append(SEPARATOR)
        self._gaps.append(0)

    def drop(self, count: int) -> None:
        """Remove the oldest `count` positions: complete documents, each with the separator after it."""
        for place in range(self._first + 1, self._first + count):
            index = place - self._start
            if self._text[index] != SEPARATOR and self._text[index - 1] != SEPARATOR:
                self._remove(place)
        self._first += count
        dead = self._first - 1 - self._start  # the oldest document keeps the separator before it
        if dead > len(self._text) // 2:
            del self._text[:dead], self._gaps[:dead]
            self._start += dead

    def follow(self, place: int, max_tokens: int) -> Sequence[int]:
        """Return the tokens from a position on: at most `max_tokens`, all of the position's document.

        Where the text ends before `max_tokens` tokens, the match overlaps the text's end, so the tokens are repeated as
        a loop.
        """
        index = place - self._start
        found = self._text[index : index + max_tokens]
        if SEPARATOR in found:
            return found[: found.index(SEPARATOR)]
        rounds = -(-max_tokens // len(found)) if len(found) < max_tokens else 1
        return (found * rounds)[:max_tokens] if rounds > 1 else found

    def matches(self, end: Sequence[int], shortest: int = 1) -> Iterator[tuple[int, int]]:
        """Yield every position whose context matches at least `shortest` tokens at the end of `end`, as (length of the
        match in tokens, position).

        The longest matches come first, and among equals the latest. The index must not change during the iteration.
        """
        text, start, last = self._text, self._start, len(end) - 1
        passed: list[tuple[_Branch, int]] = []  # with the token that leads on from each
        deepest: _Branch | int = self._root
        depth = 0
        while isinstance(deepest, _Branch) and depth == deepest.depth and depth <= last:
            child = deepest.children.get(end[last - depth])
            if child is None:
                break
            passed.append((deepest, end[last - depth]))
            length, other = (child.depth, child.latest) if isinstance(child, _Branch) else (LONGEST, child)
            index = other - start - 1
            depth += 1
            while depth < length and depth <= last and text[index - depth] == end[last - depth]:
                depth += 1
            deepest = child
        if depth >= shortest:
            for place in self._latest(deepest):
                yield depth, place
        for branch, token in reversed(passed):
            if branch.depth < shortest:
                break
            for place in self._latest(branch, besides=token):
                yield branch.depth, place

    def check_integrity(self) -> None:
        """Raise AssertionError when the index's data structures contradict one another. For tests."""
        held: set[int] = set()
        stack = [self._root]
        while stack:
            branch = stack.pop()
            assert branch is self._root or len(branch.children) > 1
            latest = []
            for token, child in branch.children.items():
                latest.append(child.latest if isinstance(child, _Branch) else child)
                assert self._text[latest[-1] - self._start - 1 - branch.depth] == token
                if isinstance(child, _Branch):
                    assert child.depth > branch.depth
                    stack.append(child)
                else:
                    held.update(self._latest(child))
            assert latest == sorted(latest)
            assert not latest or branch.latest == latest[-1]
        text = [SEPARATOR, *self._text[self._first - self._start :]]
        tokens = (index for index in range(1, len(text)) if SEPARATOR not in text[index - 1 : index + 1])
        assert held == {self._first + index - 1 for index in tokens}

    def _insert(self, place: int) -> int:
        """Add the context of a position. Return the distance to the previous position with this context, or 0."""
        text, start = self._text, self._start
        mine = place - start - 1
        branch = self._root
        while True:
            branch.latest = place
            depth = branch.depth
            first = token = text[mine - depth]
            child = branch.children.pop(first, None)  # put back below as the latest
            if child is None:
                branch.children[first] = place
                return 0
            length, other = (child.depth, child.latest) if isinstance(child, _Branch) else (LONGEST, child)
            index = other - start - 1
            while token != SEPARATOR and (depth := depth + 1) < length:
                token = text[mine - depth]
                if token != text[index - depth]:
                    branch.children[first] = _Branch(depth, place, {text[index - depth]: child, token: place})
                    return 0
            if not isinstance(child, _Branch):
                branch.children[first] = place
                return place - child
            branch.children[first] = child
            branch = child

    def _remove(self, place: int) -> None:
        """Remove the context of a position, the oldest of all."""
        mine = place - self._start - 1
        above, branch = self._root, self._root
        while isinstance(child := branch.children[self._text[mine - branch.depth]], _Branch):
            above, branch = branch, child
        if child != place:
            return  # the context has a later position
        del branch.children[self._text[mine - branch.depth]]
        if len(branch.children) == 1 and branch is not self._root:
            (above.children[self._text[mine - above.depth]],) = branch.children.values()

    def _latest(self, below: _Branch | int, besides: int | None = None) -> Iterator[int]:
        """Yield the positions below, latest first, except those below the child `besides`.

        Children are sorted by age, so each child is read only when the one after it was: many children cost nothing.
        """
        heap: list[tuple[int, _Branch | int, Iterator[_Branch | int]]] = []

        def push(siblings: Iterator[_Branch | int]) -> None:
            for node in siblings:
                heapq.heappush(heap, (-node.latest if isinstance(node, _Branch) else -node, node, siblings))
                break

        if isinstance(below, _Branch):
            left_out = below.children.get(besides) if besides is not None else None
            push(child for child in reversed(below.children.values()) if child is not left_out)
        else:
            push(iter((below,)))
        while heap:
            _, node, siblings = heapq.heappop(heap)
            push(siblings)
            if isinstance(node, _Branch):
                push(reversed(node.children.values()))
                continue
            yield node
            gap = self._gaps[node - self._start]
            if gap and node - gap >= self._first:
                push(iter((node - gap,)))
