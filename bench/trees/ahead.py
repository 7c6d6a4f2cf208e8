"""Measures what drafting ahead covers. `python -m bench.trees.ahead`.

A pass over the best 8 nodes follows the pass before it at once; while it runs, the drafter expands some levels of its
tree. The commit makes the accepted path and a bonus token the new root, which is *covered* if the drafter has expanded
it by then. What is left below it is all that the next pass verifies. In turns the drafter expands as many levels
between two passes, and none while one runs. There are no times: all levels count alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path as File
from typing import Annotated, NamedTuple

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from bench.trees.cells import DEPTH, Setting, contract_of
from bench.trees.drafts import ModelScores, hints_of
from bench.trees.fitting import DrafterRates, TargetText
from bench.trees.measuring import SEED, teach, text_of
from bench.trees.paths import PathRows, load
from outrider.cli.performance.load import read_prompts
from outrider.core.construction.expansion import floor_score, frontier, propose
from outrider.core.construction.offline import Scored, mark_sent
from outrider.core.sampling.sampler import Sampler
from outrider.core.session.contract import SHARED_NOISE, Contract, Plan
from outrider.core.tree.node import Node
from outrider.core.tree.token_tree import TokenTree
from outrider.fleet import process_env

NODES = 8  # most nodes that a pass verifies
MIN_PATH_SCORE = 0.07  # path score below which a node is not worth verifying: a usual one of small trees
TINY = 1e-6  # path score below which a drafter that knows the target's tokens loses sight of them
TURNS, AHEAD, UNDECIDED, KNOWN = "turns", "ahead", "ahead, undecided first", "ahead, the target's path known"


class Drafting(NamedTuple):
    """How a drafter works beside the passes."""

    rule: str  # the order in which it expands nodes
    rows: int  # nodes that a level expands at most
    width: int  # children of a node at most


class Coverage(NamedTuple):
    """The figures of some passes."""

    length: float  # tokens that a pass commits
    covered: float  # share of the new roots that were expanded before their commit


DRAFTINGS = (
    Drafting(TURNS, 8, 4),
    Drafting(AHEAD, 8, 4),
    Drafting(UNDECIDED, 8, 4),
    Drafting(AHEAD, 8, 16),
    Drafting(AHEAD, 32, 16),
    Drafting(KNOWN, 1, 64),
)


class AheadTree:
    """A drafter's tree along the target's text."""

    def __init__(
        self, rows: PathRows, learned: DrafterRates, text: TargetText, contract: Contract, drafting: Drafting
    ) -> None:
        self._rows, self._learned, self._text, self._contract = rows, learned, text, contract
        self._drafting = drafting
        self._ahead = drafting.rule != TURNS
        self._floor = TINY if drafting.rule == KNOWN else floor_score(MIN_PATH_SCORE, ahead=self._ahead)
        self._plan = Plan(depth=DEPTH, width=drafting.width, nodes=NODES)
        self._scored: dict[Node, Scored] = {}
        self.tree = TokenTree(text.tokens[: text.prompt])
        self._re_read()

    @property
    def _length(self) -> int:
        """Committed tokens."""
        return self.tree.root.position + 1

    @property
    def left(self) -> int:
        """Tokens of the text after the root."""
        return len(self._text.tokens) - self._length

    def verified(self) -> list[Node]:
        """Return the nodes that a pass verifies now."""
        best = self.tree.best(NODES, depth=DEPTH, width=self._drafting.width)
        return [node for score, node in best if score >= MIN_PATH_SCORE]

    def expand(self, verified: Sequence[Node], *, last: bool) -> bool:
        """Run one level. `verified`: the nodes in the pass that runs; `last`: no other level follows before its commit.
        Return False if no node is worth expanding.
        """
        nodes = self._frontier(set(verified), last)
        for node, scored in zip(
            nodes, self._scores.after([tuple(self.tree.path(node)) for node in nodes]), strict=True
        ):
            self._scored[node] = scored
            self._propose(node)
        return bool(nodes)

    def commit(self, verified: Sequence[Node]) -> tuple[int, bool]:
        """Commit the target's tokens: those of accepted nodes, and the bonus token. Return how many there are, and
        whether the new root is expanded.
        """
        accepted = sum(node in set(verified) for node in self._target_path())
        self.tree.commit(self._text.tokens[self._length : self._length + accepted + 1])
        self._re_read()
        self._scored = {node: scored for node, scored in self._scored.items() if self.tree.holds(node)}
        for node in self._scored:
            if self.tree.score(node) > self._floor:
                self._propose(node)
        return accepted + 1, self.tree.root.expanded

    def _frontier(self, verified: set[Node], last: bool) -> list[Node]:
        if self._drafting.rule == KNOWN:
            path = [self.tree.root, *self._target_path()]
            return [node for node in path if not node.expanded][:1]
        limit = self._drafting.rows + len(verified)
        nodes = frontier(self.tree, self._plan, MIN_PATH_SCORE, limit, ahead=self._ahead)
        if self._drafting.rule == UNDECIDED and last:
            nodes = [node for node in nodes if node not in verified]  # their children can only be bonus tokens
        return nodes[: self._drafting.rows]

    def _target_path(self) -> Iterator[Node]:
        """Yield the nodes below the root that the target's text goes through."""
        node = self.tree.root
        for token in self._text.tokens[self._length :]:
            if token not in node.children:
                return
            node = node.children[token]
            yield node

    def _propose(self, node: Node) -> None:
        scored = self._scored[node][: self._drafting.width]
        mark_sent(self.tree, propose(self.tree, node, scored, self._floor))

    def _re_read(self) -> None:
        before = self._text.tokens[: self._length]
        self._rows.read(before)
        self._rows.root(len(before) - 1)
        sampler = Sampler(self._contract, self._rows.vocabulary, before, self._text.prompt)
        self._scores = ModelScores(self._rows, sampler, self._learned, hints_of(before, DEPTH), shared=True)


def coverage(trees: Iterator[AheadTree], levels: int, *, turns: bool) -> Coverage:
    """Run passes along the texts of some trees, with as many levels for each pass."""
    passes = tokens = covered = 0
    for tree in trees:
        tree.expand((), last=False)
        while tree.left > DEPTH:
            verified = tree.verified()
            if not turns:
                _levels(tree, levels, verified)
            committed, expanded = tree.commit(verified)
            if turns:
                _levels(tree, levels, ())
            passes, tokens, covered = passes + 1, tokens + committed, covered + expanded
    return Coverage(tokens / passes, covered / passes)


def _levels(tree: AheadTree, levels: int, verified: Sequence[Node]) -> None:
    for level in range(levels):
        if not tree.expand(verified, last=level == levels - 1):
            return


def table_of(temperature: float, found: dict[Drafting, list[Coverage]], levels: Sequence[int]) -> Table:
    """Return the table of one temperature."""
    title = f"temperature {temperature:g}: tokens a pass (share of new roots covered)"
    table = Table(title=title, title_justify="left", box=SIMPLE)
    for heading in ("drafter", "rows", "width", *(f"{count} levels" for count in levels)):
        table.add_column(heading, justify="left" if heading == "drafter" else "right")
    for drafting, figures in found.items():
        shown = (f"{length:.2f} ({covered:.2f})" for length, covered in figures)
        table.add_row(drafting.rule, str(drafting.rows), str(drafting.width), *shown)
    return table


def main(
    prompts: Annotated[int, typer.Option(min=1, help="Prompts to measure on.")] = 6,
    taught: Annotated[int, typer.Option("--taught", min=1, help="Other prompts, for the drafter to learn from.")] = 6,
    tokens: Annotated[int, typer.Option(min=DEPTH + 1, help="Tokens of each text.")] = 100,
    drafter: Annotated[str, typer.Option(help="Folder of the drafter in --models.")] = "drafter",
    temperatures: Annotated[list[float] | None, typer.Option("--temperature", help="[default: 0 and 1]")] = None,
    levels: Annotated[list[int] | None, typer.Option("--levels", min=1, help="[default: 2, 4, 8, 16]")] = None,
    models: Annotated[File, typer.Option(help="Folder that holds target/ and the drafter's.")] = File("models"),
    texts: Annotated[File, typer.Option(help="JSON lines with an id and a prompt.")] = File("examples/held_out.jsonl"),
) -> None:
    """Measure what drafting ahead covers, by levels in a pass, rows of a level, and width."""
    process_env.set_variables(1)
    counts = tuple(levels or (2, 4, 8, 16))
    tokenizer = Tokenizer.from_file(str(models / "target" / "tokenizer.json"))
    ids = [tokenizer.encode(prompt).ids for _, prompt in islice(read_prompts(texts, "#short"), prompts + taught)]
    rows = {name: PathRows(load(models / name)) for name in ("target", drafter)}
    screen = Console(highlight=False)
    for temperature in temperatures or (0.0, 1.0):
        setting = Setting(drafters=(drafter,), temperatures=(temperature,))
        learned = teach(setting, rows, ids[prompts:]).of[drafter, temperature, True]
        measured = []
        for seed, prompt in enumerate(ids[:prompts], SEED + 1000):
            text = text_of(rows["target"], prompt, temperature, seed, tokens)
            measured.append((text, contract_of(SHARED_NOISE, temperature, seed)))
        found: dict[Drafting, list[Coverage]] = {}
        for drafting in DRAFTINGS:
            found[drafting] = [
                coverage(
                    (AheadTree(rows[drafter], learned, *text, drafting) for text in measured),
                    count,
                    turns=drafting.rule == TURNS,
                )
                for count in counts
            ]
        screen.print(table_of(temperature, found, counts))


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
