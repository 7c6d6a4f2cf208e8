"""Everything that the compiled module does, with random models, passes, terms and bad input, on numpy alone.

`python -m tests.engine.cpu.exercise MODULE` runs it with a module that was built by itself, with a sanitizer for one.
It ends with `exercise: passes=… refused=…`. It is no more than a way to run the code: what that computes is compared
with other engines elsewhere.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.engine.cpu.native_parts import llama_parts

VOCABULARY, ROWS, SLOTS, ROUNDS = 97, 80, 3, 12
KINDS = (  # of weights, of the head, of KV
    ("float32", "float32", "float32"),
    ("bfloat16", "bfloat16", "bfloat16"),
    ("int8", "int8", "int8"),
    ("int4", "int8", "bfloat16"),
    ("stored", "stored", "int8"),
)
IN_BLOCKS = ("int4", "stored")
BLOCKS = {  # of 256 inputs: bytes
    "q8_0": 272,
    "q4_0": 144,
    "q4_1": 160,
    "q5_0": 176,
    "q5_1": 192,
    "q2_k": 84,
    "q3_k": 110,
    "q4_k": 144,
    "q5_k": 176,
    "q6_k": 210,
    "iq4_nl": 144,
    "iq4_xs": 136,
    "mxfp4": 136,
    "int4_128": 138,
    "int4_64": 148,
    "int4_32": 168,
    "int8_128": 266,
    "int8_32": 296,
    "nvfp4_256": 148,
    "nvfp4_64": 160,
    "fp8_128": 264,
    "fp8_32": 288,
}
SHAPE = (VOCABULARY, VOCABULARY, 8, 1, 1, 1, 8, 8, ROWS, SLOTS, ROWS, 1e-5, 0)
ANGLES = np.zeros((ROWS, 4), np.float32)
WEIGHTS = ["attention_norm", "query", "key", "value", "output", "ffn_norm", "gate", "up", "down"]  # of every layer
Dice = np.random.Generator


def load(path: Path) -> Any:
    """The module, though it lies somewhere else than the installed one."""
    loader = ExtensionFileLoader("_native", str(path))
    spec = spec_from_loader("_native", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def make(
    native: Any,
    dice: Dice,
    kinds: tuple[str, str, str],
    instructions: str,
    threads: int,
    features: tuple[int, ...],
    ranks: tuple[int, float, Sequence[int]] = (0, 0.0, ()),
) -> tuple[Any, int, list[Any]]:
    """A random model, its width and two adapters. `ranks`: this one, seconds that it waits, and sockets to each."""
    of = max(1, len(ranks[2]))
    heads, kv_heads, dim = ((4, 2, 8), (3, 1, 20), (2, 2, 32))[int(dice.integers(3))]
    width, ffn = int(dice.integers(5, 70)), int(dice.integers(5, 90))
    if kinds[0] in IN_BLOCKS:
        width, ffn = (64, 96) if kinds[0] == "int4" else (256, 256)
        heads, kv_heads, dim = 4, 2, width // 4
    width = -(-width // of) * of
    angles = np.outer(np.arange(ROWS), np.ones(dim // 2)).astype(np.float32)
    shape = (VOCABULARY, VOCABULARY - 7, width, 2, heads, kv_heads, dim, ffn, ROWS, SLOTS, ROWS, 1e-5, 0)
    model = native.Model(
        *(
            *kinds,
            shape,
            *llama_parts(2, dim),
            np.cos(angles),
            np.sin(angles),
            threads,
            instructions,
            features,
            bool(dice.integers(2)),
        ),
        ranks,
    )
    biased, normed = bool(dice.integers(2)), bool(dice.integers(2))

    def weight(*sizes: int) -> np.ndarray:
        values = dice.normal(0, 0.3, sizes).astype(np.float32)
        kind = int(dice.integers(3))
        bits = values.view(np.uint32) >> np.uint32(16)
        return values if kind == 0 else values.astype(np.float16) if kind == 1 else bits.astype(np.uint16)

    def linear(rows: int, columns: int) -> Any:
        if kinds[0] != "stored" or not dice.integers(8):
            return weight(rows, columns)
        name = str(dice.choice([*BLOCKS]))  # bytes of which no scale is large, or no number
        content = dice.integers(0, 256, (rows, columns // 256 * BLOCKS[name]), dtype=np.uint8) & np.uint8(0x2B)
        if dice.integers(2):
            return name, content
        file = os.memfd_create(name)
        files.callback(os.close, file)
        os.write(file, content.tobytes())
        return name, (file, 0, *content.shape, 0 if rows % 8 else 4)

    def maybe(there: bool, *sizes: int) -> np.ndarray | None:
        return weight(*sizes) if there else None

    queries, keys = heads * dim, kv_heads * dim
    with ExitStack() as files:
        for layer in range(2):
            linears = {
                "query": (queries, width),
                "key": (keys, width),
                "value": (keys, width),
                "output": (width, queries),
            }
            linears |= {"gate": (ffn, width), "up": (ffn, width), "down": (width, ffn)}
            given = {name: linear(*size) for name, size in linears.items()}
            given |= {"attention_norm": weight(width), "ffn_norm": weight(width)}
            if biased:
                given |= {f"{name}_bias": weight(size[0]) for name, size in linears.items()}
            if normed:
                given |= {"query_norm": weight(dim), "key_norm": weight(dim)}
            model.set_layer(layer, given)
        embedding = maybe(of > 1 or bool(dice.integers(2)), VOCABULARY, width // of)  # None: the head's
        model.set_ends(embedding, weight(width), linear(-(-VOCABULARY // of), width))
    kind = "float32" if kinds[0] == "float32" else "bfloat16"
    adapters = [native.Adapter(kind, width, queries, keys, ffn, 2) for _ in range(2)]
    shapes = [[(queries, width), (keys, width), (keys, width)], [(width, queries)], 2 * [(ffn, width)], [(width, ffn)]]
    for adapter in adapters:
        for layer in range(2):
            for part, joined in enumerate(shapes):
                pairs = []
                for outputs, inputs in joined:
                    rank, there = int(dice.integers(1, inputs + 1)), bool(dice.integers(2))
                    pairs += [maybe(there, rank, inputs), maybe(there, outputs, rank)]
                if any(it is not None for it in pairs):
                    adapter.set(layer, part, *pairs, *[None] * (6 - len(pairs)))
    return model, width, adapters


def segment(dice: Dice, slot: int, adapters: Sequence[Any] = ()) -> SimpleNamespace:
    """A chain or a tree behind some rows, with one of the adapters or none."""
    count = int(dice.choice([1, 2, 7, 13, 40]))
    span = count + int(dice.integers(0, 4)) * int(dice.integers(2))
    prefix = int(dice.integers(0, ROWS - span + 1))
    mask = None
    if span > count or dice.integers(2):
        mask = dice.random((count, span)) < 0.5
        mask[np.arange(count), span - count + np.arange(count)] = True
    wanted = None if dice.integers(2) else int(dice.integers(0, count + 1))
    tokens, positions = dice.integers(0, VOCABULARY, count), dice.integers(0, ROWS, count)
    adapter = [None, *adapters][int(dice.integers(1 + len(adapters)))]
    return SimpleNamespace(
        slot=slot, prefix=prefix, tokens=tokens, positions=positions, mask=mask, wanted=wanted, adapter=adapter
    )


def run(model: Any, dice: Dice, parts: int, width: int, adapters: Sequence[Any] = ()) -> np.ndarray:
    """One pass over some slots, after changes to their KV."""
    slots = dice.permutation(SLOTS)[: int(dice.integers(1, SLOTS + 1))].tolist()
    segments = [segment(dice, slot, adapters) for slot in slots]
    outputs = sum(len(it.tokens) if it.wanted is None else it.wanted for it in segments)
    rows = sum(len(it.tokens) for it in segments)
    best = int(dice.choice([0, 2, 5, VOCABULARY]))
    draws = [
        None if dice.integers(3) == 0 else (int(dice.integers(2**62)), float(dice.choice([0.0, 0.7]))) for _ in slots
    ]
    logits = np.zeros((outputs, VOCABULARY), np.float32)
    tokens, scores = np.zeros((outputs, best), np.int64), np.zeros((outputs, best))
    features = np.zeros((rows, max(1, parts) * width), np.float32) if parts else None
    moved = dice.permutation(ROWS)[: int(dice.integers(0, 6))].astype(np.int64)
    model.move(slots[0], moved, np.sort(moved))
    model.copy(slots[-1], int(dice.integers(SLOTS)), int(dice.integers(0, ROWS + 1)))
    model.release(int(dice.integers(SLOTS)), int(dice.integers(0, ROWS + 1)))
    needed, free = model.pages(slots[0], 0, ROWS)
    assert 0 <= needed <= free + ROWS // 16
    model.run(segments, draws, best, bool(dice.integers(2)), logits, tokens, scores, features)
    return logits


def exercise_models(native: Any) -> int:
    """Gives how many passes were made. Bits may not hang on the number of threads."""
    passes = 0
    for instructions in native.instruction_sets():
        for number, kinds in enumerate(KINDS):
            for features in ((), (1, 2)):
                logits = []
                for threads in (1, 3):
                    dice = np.random.default_rng(number)
                    model, width, adapters = make(native, dice, kinds, instructions, threads, features)
                    logits.append([run(model, dice, len(features), width, adapters) for _ in range(ROUNDS)])
                    passes += ROUNDS
                    assert model.sizes()["kv_bytes_taken"] <= model.sizes()["kv_bytes"]
                for one, three in zip(*logits, strict=True):
                    assert np.array_equal(one, three)
    return passes


def exercise_threads(native: Any) -> int:
    """Callers that use one model at once are refused, all but one; two models run beside one another."""
    dice = np.random.default_rng(0)
    models = [make(native, dice, KINDS[0], "", 2, ())[0] for _ in range(2)]
    refused = 0

    def call(model: Any, seed: int) -> None:
        nonlocal refused
        own = np.random.default_rng(seed)
        for _ in range(30):
            try:
                run(model, own, 0, 1)
            except RuntimeError:
                refused += 1

    callers = [threading.Thread(target=call, args=(models[number % 2], number)) for number in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    return refused


def exercise_ranks(native: Any) -> int:
    """Ranks that are threads of this process; then one goes, and the others notice. Gives how many passes were made."""
    passes = 0
    for of in (2, 3):
        pairs = {(one, other): socket.socketpair() for one in range(of) for other in range(one)}
        ends = [
            [-1 if it == rank else pairs[max(it, rank), min(it, rank)][it > rank].fileno() for it in range(of)]
            for rank in range(of)
        ]
        lost: list[int] = []

        def live(rank: int, ends: Any = ends, lost: list[int] = lost, gone: Any = pairs[1, 0][0], of: int = of) -> None:
            dice = np.random.default_rng(of)
            model, width, adapters = make(native, dice, KINDS[of % 2], "", 2, (1,), (rank, 1.0, ends[rank]))
            for _ in range(ROUNDS):
                run(model, dice, 1, width, adapters)
            if rank == 1:
                gone.shutdown(socket.SHUT_RDWR)
                return
            for _ in range(3):
                try:
                    run(model, dice, 1, width)
                except ConnectionError:
                    lost.append(rank)

        ranks = [threading.Thread(target=live, args=(rank,)) for rank in range(of)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        assert sorted(lost) == sorted(3 * [rank for rank in range(of) if rank != 1])
        passes += of * ROUNDS
        for pair in pairs.values():
            for end in pair:
                end.close()
    return passes


def exercise_samplers(native: Any) -> None:
    dice = np.random.default_rng(1)
    nothing = np.empty(0, np.int64)
    for _ in range(300):
        size = int(dice.choice([1, 2, 17, 600]))

        def ids(size: int = size) -> np.ndarray:
            return np.unique(dice.integers(0, size, int(dice.integers(0, 5))))

        biased, penalties = ids(), (1.3, 0.5, 0.2) if dice.integers(2) else (1.0, 0.0, 0.0)
        sampler = native.Sampler(
            *(size, int(dice.integers(2**62)), float(dice.choice([0.0, 0.5, 3.0])), int(dice.choice([0, 3, 10**9]))),
            *(float(dice.choice([1.0, 0.8])), float(dice.choice([0.0, 0.1])), penalties),
            *(biased, dice.normal(0, 1, biased.size), ids(), ids(), bool(dice.integers(2)), ids(), 5),
        )
        sampler.extend(dice.integers(0, 2 * size, 30), False)
        sampler.extend(nothing, True)
        for _ in range(4):
            row = dice.normal(0, 3, size).astype(np.float32)
            row[dice.random(size) < 0.1] = dice.choice(np.array([np.nan, np.inf, -np.inf], np.float32))
            count = int(dice.integers(1, size + 1))
            tokens, scores = np.zeros(count, np.int64), np.zeros(count)
            sampler.lead(row, dice.integers(0, 2 * size, 3), bool(dice.integers(2)), tokens, scores)
            native.logprobs(row, tokens, scores)
            sampler.extend(dice.integers(0, 2 * size, 2), True)


def exercise_refusals(native: Any) -> int:
    """Gives how many calls were refused: with arguments of the wrong kind, size or order."""
    dice = np.random.default_rng(2)
    model, _, (adapter, _) = make(native, dice, KINDS[1], "", 1, ())
    good = segment(dice, 0)
    garbage: list[Any] = [
        *(None, 0, -1, 2**40, 2**70, 1.5, "x", b"x", (), [], {}),
        *(np.zeros(3), np.zeros(3, np.int64), np.zeros((2, 2), np.int64), np.zeros((4, 4), np.bool_), np.int64(3)),
        *(np.zeros(0, np.float32), np.zeros(10**4, np.float32)[::2]),
    ]
    calls, refused = 0, 0
    for _ in range(4000):
        attribute = str(dice.choice([*vars(good)]))
        bad = SimpleNamespace(**(vars(good) | {attribute: garbage[int(dice.integers(len(garbage)))]}))
        arguments: list[Any] = [
            *([bad], [None], 0, False),
            *(np.zeros((80, VOCABULARY), np.float32), np.zeros((80, 2), np.int64), np.zeros((80, 2)), None),
        ]
        if dice.integers(2):
            arguments[int(dice.integers(8))] = garbage[int(dice.integers(len(garbage)))]
        whats = [garbage[int(dice.integers(len(garbage)))] for _ in range(14)]
        weights = {name: garbage[int(dice.integers(len(garbage)))] for name in WEIGHTS}
        for call, given in (
            (model.run, arguments),
            (model.move, whats[:3]),
            (model.copy, whats[:3]),
            (model.release, whats[:2]),
            (model.pages, whats[:3]),
            (model.set_layer, [int(dice.integers(3)), weights]),
            (model.set_layer, whats[:2]),
            (model.set_ends, whats[:3]),
            (adapter.set, [*whats[:2], *whats[:6]]),
            (native.Adapter, ["float32", *whats[:5]]),
            (
                native.Model,
                ["float32", "float32", "float32", SHAPE, *(2 * [ANGLES]), 1, "", (), False, tuple(whats[:3])],
            ),
            (native.Sampler, whats[:14]),
            (native.logprobs, whats[:3]),
        ):
            calls += 1
            try:
                call(*given)
            except (ValueError, TypeError, BufferError, AttributeError, OverflowError, MemoryError):
                refused += 1
    assert 0.8 * calls < refused <= calls
    return refused


def main() -> None:
    native = load(Path(sys.argv[1]))
    passes = exercise_models(native) + exercise_ranks(native)
    busy = exercise_threads(native)
    exercise_samplers(native)
    refused = exercise_refusals(native)
    print(f"exercise: {passes=} {refused=} {busy=}")


if __name__ == "__main__":
    main()
