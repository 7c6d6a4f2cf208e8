"""The host's work for the choices of a step of many sessions, with a device's results already there.

`python -m bench.engine.host_work [--vocabulary N]` prints a table: milliseconds of a step of 32 sessions whose
contracts differ, each with a tree of `NODES` nodes of which `WALKED` rows are walked. On a device the choices of all
rows come with the pass; without that the host fetches the walked rows, and chooses.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from itertools import cycle, islice
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from bench.engine.choice import SAMPLING_TERMS, TEXT, row
from outrider.core.sampling.sampler import Sampler
from outrider.core.session.contract import Contract
from outrider.engine.gpu.passes.input_buffers import Outputs
from outrider.engine.gpu.passes.packing import packed
from outrider.engine.gpu.sampling.device_logits import DeviceLogits
from outrider.engine.gpu.sampling.penalties import PenaltyBuffers
from outrider.engine.gpu.sampling.restrictions import OUTPUTS, RestrictionBuffers, choose_restricted, likeliest
from outrider.engine.gpu.sampling.sampling import best, noise_steps, scores
from outrider.engine.interface.batch import Segment

VOCABULARY = 128_256  # of Llama 3
SESSIONS = 32
NODES, WALKED = 4, 3
ROUNDS = 9
VERIFIED = 2  # tokens of a row
CPU = torch.device("cpu")
WITHOUT_PENALTIES = {name: terms for name, terms in SAMPLING_TERMS.items() if "repetition_penalty" not in terms}


def milliseconds(vocabulary: int, kinds: Sequence[dict[str, Any]], *, restricts: bool) -> float:
    """Return the host's milliseconds for a step: what goes to the device before the pass, and the walk behind it."""
    text = [*range(1, TEXT + 1)]
    kinds = [*islice(cycle(kinds), SESSIONS)]
    contracts = [Contract(seed=seed, max_tokens=TEXT, **terms) for seed, terms in enumerate(kinds)]
    samplers = [Sampler(contract, vocabulary, text, TEXT // 2) for contract in contracts]
    draws = [sampler.draw(restricts=restricts, penalizes=restricts) for sampler in samplers]
    tokens, positions = np.zeros(1 + NODES, np.int64), np.arange(TEXT - 1, TEXT + NODES)
    segments = [Segment(slot, TEXT - 1, tokens, positions) for slot in range(SESSIONS)]
    (parts,) = packed(segments)
    first = [slot * (1 + NODES) for slot in range(SESSIONS)]
    buffers, penalties = RestrictionBuffers(CPU), PenaltyBuffers(SESSIONS, OUTPUTS, vocabulary, CPU)
    logits = torch.from_numpy(row(vocabulary, 50)).expand(SESSIONS * (1 + NODES), -1).contiguous()
    ready = [_chosen(run, logits[run.places], buffers, penalties) for run in Outputs.of(parts, draws, first).divided()]
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        runs = Outputs.of(parts, draws, first).divided()
        result = DeviceLogits(vocabulary, [1 + NODES] * SESSIONS)
        for run, (rows, choices, likely) in zip(runs, ready, strict=True):
            drawn = run.drawn
            if run.restricted:
                drawn = drawn & buffers.send(run.restricted) & penalties.send(run.restricted)
            wanted = [None if it is None else it.restriction.logprobs for it in run.restricted]
            result.add(run.places, drawn, rows, choices, likely, wanted)
        result.fetch()
        for sampler, at in zip(samplers, first, strict=True):
            for walked in range(WALKED):
                result.choice(at + walked) or sampler.choose(result.row(at + walked), text[:walked])
        seconds.append(time.perf_counter() - began)
    return median(seconds) * 1e3


def _chosen(
    run: Outputs, logits: torch.Tensor, buffers: RestrictionBuffers, penalties: PenaltyBuffers
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the logits of some rows, and what the device makes of them."""
    keys, temperatures = torch.from_numpy(run.keys), torch.from_numpy(run.temperatures)
    steps = noise_steps(logits.shape[1], CPU)
    if not run.restricted:
        tokens, values = best(scores(logits, keys, temperatures, steps), VERIFIED)
        return logits, torch.cat((tokens.double(), values), 1), None
    buffers.send(run.restricted)
    penalties.send(run.restricted)
    given, counted = buffers.inputs(len(logits)), penalties.inputs(len(logits))
    choices = choose_restricted(logits, keys, temperatures, given, steps, VERIFIED, counted)
    return logits, choices, likeliest(logits, choices[:, 0].long())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine.host_work", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    vocabulary = parser.parse_args(arguments).vocabulary
    table = Table(title=f"The host's work for a step of {SESSIONS} sessions, {vocabulary:,} tokens, ms")
    for column in ("contracts", "the host chooses", "the device chooses"):
        table.add_column(column, justify="left" if column == "contracts" else "right", no_wrap=True)
    mixtures = {"all kinds": [*SAMPLING_TERMS.values()], "all but penalties": [*WITHOUT_PENALTIES.values()]}
    for name, kinds in (mixtures | {name: [terms] for name, terms in SAMPLING_TERMS.items()}).items():
        figures = (milliseconds(vocabulary, kinds, restricts=restricts) for restricts in (False, True))
        table.add_row(name, *(f"{figure:.2f}" for figure in figures))
    Console().print(table)


if __name__ == "__main__":
    main()
