"""Which cells of llama.cpp a token sees, whatever passes, moves, copies and cuts came before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from outrider.engine.interface.batch import Segment
from outrider.engine.llama_cpp.sequences import BatchToken, SlotSequences

SLOTS = 3
MOST_NODES = 15
ENOUGH = 64  # sequences for the leaves of all slots


@dataclass(eq=False)
class Cell:
    position: int
    token: int
    sequences: set[int]


@dataclass
class Cells:
    """llama.cpp's memory with its checks: the positions of a sequence follow one another, and sequences that share a
    token have had the same tokens before it.
    """

    cells: list[Cell] = field(default_factory=list)

    def of(self, sequence: int) -> list[Cell]:
        return sorted((it for it in self.cells if sequence in it.sequences), key=lambda it: it.position)

    def remove(self, sequence: int, first: int) -> None:
        for cell in self.of(sequence):
            if cell.position >= first:
                cell.sequences.discard(sequence)
        self.cells = [cell for cell in self.cells if cell.sequences]

    def copy(self, source: int, target: int, end: int) -> None:
        assert not self.of(target)
        for cell in self.of(source):
            if cell.position < end:
                cell.sequences.add(target)

    def decode(self, tokens: Sequence[BatchToken], seen: dict[int, tuple[int, ...]]) -> None:
        for token in tokens:
            before = [self.of(sequence) for sequence in token.sequences]
            assert before
            assert all(cells == before[0] for cells in before)
            assert [cell.position for cell in before[0]] == [*range(token.row.position)]
            self.cells.append(Cell(token.row.position, token.row.token, {*token.sequences}))
            if token.output >= 0:
                seen[token.output] = (*(cell.token for cell in before[0]), token.row.token)


@dataclass
class Counting:
    """A memory that keeps the calls."""

    calls: list[tuple[object, ...]] = field(default_factory=list)

    def remove(self, *arguments: int) -> None:
        self.calls.append(("remove", *arguments))

    def copy(self, *arguments: int) -> None:
        self.calls.append(("copy", *arguments))


@dataclass
class Text:
    """A slot as an engine's caller knows it: committed tokens, and a tree behind them."""

    tokens: list[int] = field(default_factory=list)
    nodes: list[tuple[int, int]] = field(default_factory=list)  # token and parent, -1: the last committed token

    def chain(self, node: int) -> list[int]:
        """The nodes of a path, the first one first."""
        found = []
        while node >= 0:
            found.append(node)
            node = self.nodes[node][1]
        return found[::-1]

    def path(self, node: int) -> tuple[int, ...]:
        return (*self.tokens, *(self.nodes[it][0] for it in self.chain(node)))


class Passes:
    """Random passes and commits, as verifiers and drafters make them."""

    def __init__(self, seed: int, sequences: int) -> None:
        self.random = np.random.default_rng(seed)
        self.memory = Cells()
        self.sequences = SlotSequences(self.memory, SLOTS, sequences)
        self.texts = [Text() for _ in range(SLOTS)]
        self.lone = 0  # paths for which there was no sequence
        self.again = 0  # tokens that were computed again

    def step(self) -> None:
        slots = self.random.permutation(SLOTS)[: self.random.integers(1, SLOTS + 1)]
        first, tokens, lone, expected = 0, list[BatchToken](), [], list[tuple[int, ...]]()
        for segment, paths in map(self.segment, slots.tolist()):
            together, apart = self.sequences.place(segment, first)
            self.again += len(together) - len(segment.tokens)
            tokens += together
            lone += apart
            expected += paths[len(paths) - segment.outputs :]
            first += segment.outputs
        seen: dict[int, tuple[int, ...]] = {}
        self.memory.decode(tokens, seen)
        for path in lone:
            self.lone += 1
            if path.source is not None:
                self.memory.copy(path.source, self.sequences.lone, path.end)
            for token in path.tokens:
                token.sequences = [self.sequences.lone]
            self.memory.decode(path.tokens, seen)
            self.memory.remove(self.sequences.lone, 0)
        assert [seen[output] for output in range(first)] == expected
        for slot in slots.tolist():
            self.commit(slot)
        shared = sum(len(cell.sequences) for cell in self.memory.cells)
        assert len(self.memory.cells) <= sum(map(self.sequences.held, range(SLOTS))) <= shared

    def segment(self, slot: int) -> tuple[Segment, list[tuple[int, ...]]]:
        """More of a text, or nodes of its tree; and what each new row sees, itself included."""
        text, count = self.texts[slot], int(self.random.integers(1, 6))
        tokens, prefix = self.random.integers(0, 50, count), len(text.tokens)
        if not prefix or self.random.random() < 0.2:
            text.nodes.clear()
            text.tokens += tokens.tolist()
            paths = [(*text.tokens[: prefix + 1 + at],) for at in range(count)]
            return Segment(slot, prefix, tokens, np.arange(prefix, prefix + count)), paths
        if self.random.random() < 0.4 or len(text.nodes) > MOST_NODES:
            text.nodes.clear()  # another tree takes their place
        kept = len(text.nodes)
        mask = np.zeros((count, kept + count), bool)
        for at, token in enumerate(tokens.tolist()):
            text.nodes.append((token, int(self.random.integers(-1, kept + at))))
            mask[at, text.chain(kept + at)] = True
        paths = [text.path(kept + at) for at in range(count)]
        positions = np.array([len(path) - 1 for path in paths])
        return Segment(slot, prefix, tokens, positions, mask, int(self.random.integers(0, count + 1))), paths

    def commit(self, slot: int) -> None:
        """Commit a path, with what has been drafted below it or without; or take a text back; or share it."""
        text, chance, prefix = self.texts[slot], self.random.random(), len(self.texts[slot].tokens)
        if text.nodes and chance < 0.6:
            chosen = text.chain(int(self.random.integers(0, len(text.nodes))))
            below = [it for it in range(len(text.nodes)) if chosen[-1] in text.chain(it)[:-1]]
            rows = [*chosen, *below]
            self.sequences.move(slot, prefix + np.array(rows), prefix + np.arange(len(rows)))
            renamed = {row: at - len(chosen) for at, row in enumerate(rows)}
            text.tokens += [text.nodes[it][0] for it in chosen]
            text.nodes = [(text.nodes[it][0], renamed[text.nodes[it][1]]) for it in below]
        chance, prefix = self.random.random(), len(text.tokens)
        if chance < 0.2:
            text.nodes.clear()
            del text.tokens[int(self.random.integers(0, prefix + 1)) :]
        elif chance < 0.4:
            other = int(self.random.integers(0, SLOTS))
            if other != slot:
                shared = int(self.random.integers(0, prefix + 1))
                self.sequences.copy(slot, other, shared)
                self.texts[other] = Text(text.tokens[:shared])
        elif chance < 0.5:
            kept = int(self.random.integers(0, prefix + 1))
            self.sequences.release(slot, kept)
            self.texts[slot] = Text(text.tokens[:kept])


@pytest.mark.parametrize("sequences", [SLOTS + 1, SLOTS + 3, ENOUGH])
def test_a_token_sees_its_path_and_nothing_else(sequences: int) -> None:
    runs = [Passes(seed, sequences) for seed in range(60)]
    for run in runs:
        for _ in range(40):
            run.step()
    few = sequences < ENOUGH
    assert any(run.lone for run in runs) == few
    assert few or not any(run.again for run in runs)


def test_a_chain_and_a_tree_behind_it_take_no_copies_that_are_not_needed() -> None:
    """Plain decoding touches the memory in no step; a tree copies once for each leaf but one."""
    memory = Counting()
    sequences = SlotSequences(memory, 1, 16)
    for at in range(5):
        sequences.place(Segment(0, at, np.array([at]), np.array([at])), 0)
    assert memory.calls == []
    mask = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]], bool)
    sequences.place(Segment(0, 5, np.arange(4), np.array([5, 6, 6, 6]), mask), 0)
    assert [call[0] for call in memory.calls] == ["copy", "copy"]
    memory.calls.clear()
    sequences.move(0, np.array([7]), np.array([6]))
    sequences.place(Segment(0, 7, np.array([1]), np.array([7])), 0)
    assert [call[0] for call in memory.calls] == ["remove", "remove"]  # of the other leaves
