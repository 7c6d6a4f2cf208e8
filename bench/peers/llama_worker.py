"""llama.cpp in a separate process, run by the interpreter of `build/llama.cpp` (bench.peers.llama_cpp).

`python -P llama_worker.py --target FILE [--draft FILE] --unpadded-vocabulary N --threads N --context N`. It needs numpy
and llama_cpp alone and imports nothing of Outrider. When it has loaded, it writes "ready" to stdout, and then answers
each line of stdin with a line of JSON, until stdin ends. There are four kinds of requests:

- {"prompt": [...], "temperature": T, "seed": S, "max_tokens": N, "chain": C}: decode N tokens, with a chain of C
  drafted tokens before each pass of the target, or without drafting where C is 0. With "lookup": 1 they are what
  llama-cpp-python's prompt lookup finds in the text. The answer is a `Sample`.
- {"rows": N}: the seconds of one pass over N tokens after PASS_CONTEXT others. One untimed pass precedes it.
- {"prompt_rows": N}: the seconds from nothing to the logits after a prompt of N tokens.
- {"logits": [...], "file": FILE}: write the logits after each token of a text to FILE, as numpy does.

Ids from `--unpadded-vocabulary` on are never chosen.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

PASS_CONTEXT = 256  # tokens
MOST_NGRAM = 2  # tokens of what prompt lookup looks for, llama-cpp-python's default
RANDOM_SEED = 2**32 - 1  # llama.cpp replaces this value by a random seed

Choose = Callable[[NDArray[np.float32]], int]  # returns a token from the logits of the ids that may be chosen


class WorkerDecoder(Protocol):
    """A model with the KV of one text."""

    def decode(self, tokens: Sequence[int], start: int, outputs: int) -> NDArray[np.float32]:
        """Run `tokens` at the positions from `start` on; return the logits after the last `outputs` of them."""

    def forget(self, start: int) -> None:
        """Drop the KV of all positions from `start` on."""


class LlamaDecoder:
    """A GGUF file in llama.cpp."""

    def __init__(self, library: Any, path: str, threads: int, context: int) -> None:
        self._library = library
        model = library.llama_model_load_from_file(path.encode(), library.llama_model_default_params())
        if not model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        self.vocabulary = int(library.llama_vocab_n_tokens(library.llama_model_get_vocab(model)))
        params = library.llama_context_default_params()
        params.n_ctx = params.n_batch = context
        params.n_threads = params.n_threads_batch = threads
        # With flash attention a pass of the reference target after 256 tokens took two to three times as long.
        params.flash_attn_type = library.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._context = library.llama_init_from_model(model, params)
        if not self._context:
            raise SystemExit(f"llama.cpp cannot make a context of {context} tokens for {path}")
        self._memory = library.llama_get_memory(self._context)
        # One batch, whose arrays are filled anew for each pass.
        self._tokens, self._positions = np.zeros(context, np.int32), np.zeros(context, np.int32)
        self._outputs, self._counts = np.zeros(context, np.int8), np.ones(context, np.int32)
        self._sequence = np.zeros(1, np.int32)
        self._sequences = np.full(context, self._sequence.ctypes.data, np.uintp)
        self._batch = library.llama_batch()
        for name, array in (
            ("token", self._tokens),
            ("pos", self._positions),
            ("n_seq_id", self._counts),
            ("seq_id", self._sequences),
            ("logits", self._outputs),
        ):
            kind = dict(library.llama_batch._fields_)[name]
            setattr(self._batch, name, ctypes.cast(array.ctypes.data, kind))

    def decode(self, tokens: Sequence[int], start: int, outputs: int) -> NDArray[np.float32]:
        """See `WorkerDecoder.decode`. The result is valid until the next call."""
        count = len(tokens)
        self._tokens[:count] = tokens
        self._positions[:count] = np.arange(start, start + count)
        self._outputs[: count - outputs] = 0
        self._outputs[count - outputs : count] = 1
        self._batch.n_tokens = count
        if status := self._library.llama_decode(self._context, self._batch):
            raise SystemExit(f"llama.cpp cannot decode {count} tokens at position {start}: status {status}")
        if not outputs:
            self._library.llama_synchronize(self._context)
            return np.empty((0, self.vocabulary), np.float32)
        found = ctypes.cast(self._library.llama_get_logits(self._context), ctypes.c_void_p)
        kind = ctypes.c_float * (outputs * self.vocabulary)
        logits: NDArray[np.float32] = np.ctypeslib.as_array(kind.from_address(found.value or 0))
        return logits.reshape(outputs, self.vocabulary)

    def forget(self, start: int) -> None:
        """See `WorkerDecoder.forget`."""
        self._library.llama_memory_seq_rm(self._memory, 0, start, -1)


class LlamaSampler:
    """llama.cpp's sampling from the whole distribution, at a temperature above 0."""

    def __init__(self, library: Any, temperature: float, seed: int, candidates: int) -> None:
        self._library = library
        self._chain = library.llama_sampler_chain_init(library.llama_sampler_chain_default_params())
        library.llama_sampler_chain_add(self._chain, library.llama_sampler_init_temp(temperature))
        library.llama_sampler_chain_add(self._chain, library.llama_sampler_init_dist(seed % RANDOM_SEED))
        self._ids = np.arange(candidates, dtype=np.int32)
        self._data = np.zeros(candidates, [("id", np.int32), ("logit", np.float32), ("p", np.float32)])
        self._array = library.llama_token_data_array()
        self._data_type = dict(library.llama_token_data_array._fields_)["data"]

    def __call__(self, logits: NDArray[np.float32]) -> int:
        """Return a token."""
        self._data["id"] = self._ids
        self._data["logit"] = logits
        array = self._array
        array.data = ctypes.cast(self._data.ctypes.data, self._data_type)
        array.size, array.selected, array.sorted = len(self._ids), -1, False
        self._library.llama_sampler_apply(self._chain, ctypes.byref(array))
        return int(array.data[array.selected].id)

    def close(self) -> None:
        """Free the sampler."""
        self._library.llama_sampler_free(self._chain)


def greedy(logits: NDArray[np.float32]) -> int:
    """Return the token with the largest logit."""
    return int(logits.argmax())


class ChainDrafter:
    """Proposes a chain of a draft model's most likely tokens, as llama.cpp's `speculative-simple` does.

    The KV of accepted drafted tokens is kept.
    """

    def __init__(self, model: WorkerDecoder, unpadded_vocabulary: int) -> None:
        self._model = model
        self._unpadded_vocabulary = unpadded_vocabulary
        self._filled = 0  # positions of the KV that hold the text

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a text: run all tokens of the prompt but the last one."""
        self._model.forget(0)
        if len(prompt) > 1:
            self._model.decode(prompt[:-1], 0, 0)
        self._filled = len(prompt) - 1

    def propose(self, text: Sequence[int], count: int) -> list[int]:
        """Return `count` tokens that may follow the text."""
        self._filled = min(self._filled, len(text) - 1)
        self._model.forget(self._filled)
        pending, drafted = list(text[self._filled :]), list[int]()
        while len(drafted) < count:
            logits = self._model.decode(pending, self._filled, 1)
            self._filled += len(pending)
            pending = [greedy(logits[0, : self._unpadded_vocabulary])]
            drafted += pending
        return drafted


class LookupDrafter:
    """Proposes what followed the text's last tokens before: llama-cpp-python's own prompt lookup."""

    def __init__(self, find: Callable[..., NDArray[np.intc]]) -> None:
        """`find`: returns the tokens that follow the last `ngram` of a text at an earlier place there."""
        self._find = find

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a text: nothing to do."""

    def propose(self, text: Sequence[int], count: int) -> list[int]:
        """Return up to `count` tokens that may follow the text."""
        return [int(token) for token in self._find(np.array(text, np.intc), MOST_NGRAM, count)]


def generate(
    target: WorkerDecoder,
    drafter: ChainDrafter | LookupDrafter | None,
    choose: Choose,
    unpadded_vocabulary: int,
    request: dict[str, Any],
) -> dict[str, Any]:
    """Decode a text. `choose` chooses every token; drafted tokens only save passes of the target.

    A drafted token is accepted if `choose` returns it at its position, so a text is the same with and without drafts,
    up to the rounding of passes of several rows.
    """
    began = time.perf_counter()
    text = list(request["prompt"])
    end = len(text) + request["max_tokens"]
    chain = request["chain"] if drafter is not None else 0
    first = len(text)
    arrivals: list[float] = []
    steps = 0
    target.forget(0)
    if first > 1:
        target.decode(text[:-1], 0, 0)
    if drafter is not None and chain:
        drafter.begin(text)
    while len(text) < end:
        drafted: list[int] = []
        if drafter is not None and chain:
            drafted = drafter.propose(text, min(chain, end - len(text) - 1))
        logits = target.decode([text[-1], *drafted], len(text) - 1, 1 + len(drafted))
        steps += 1
        for row, guess in zip(logits, [*drafted, None], strict=True):
            text.append(choose(row[:unpadded_vocabulary]))
            if text[-1] != guess:
                break
        arrivals += [time.perf_counter() - began] * (len(text) - first - len(arrivals))
        target.forget(len(text) - 1)
    empty: list[int] = []
    sample = {"tokens": text[first:], "arrivals": arrivals, "steps": steps}
    return sample | {"wire_bytes": 0, "reached_by_depth": empty, "tried_by_depth": empty}


def fill_context(model: WorkerDecoder) -> None:
    """Run the PASS_CONTEXT tokens that are before timed passes."""
    model.forget(0)
    model.decode([0] * PASS_CONTEXT, 0, 0)


def pass_seconds(model: WorkerDecoder, rows: int) -> float:
    """Time a pass over `rows` tokens after the context. One pass before it does not count."""
    seconds = 0.0
    for _ in range(2):
        began = time.perf_counter()
        model.decode([0] * rows, PASS_CONTEXT, rows)
        seconds = time.perf_counter() - began
        model.forget(PASS_CONTEXT)
    return seconds


def prompt_seconds(model: WorkerDecoder, rows: int) -> float:
    """Time a prompt of `rows` tokens, of which llama.cpp computes 512 at once, its default."""
    model.forget(0)
    began = time.perf_counter()
    model.decode([0] * rows, 0, 1)
    return time.perf_counter() - began


def serve(
    target: WorkerDecoder,
    chains: ChainDrafter | None,
    lookup: LookupDrafter | None,
    sampler: Callable[[float, int], LlamaSampler],
    unpadded_vocabulary: int,
    lines: Iterable[str],
    emit: Callable[[Any], None],
) -> None:
    """Answer each line."""
    filled = False  # a large model takes a minute for the contexts of a round
    for line in lines:
        request = json.loads(line)
        drafter = lookup if request.get("lookup") else chains
        if "rows" in request:
            if not filled:
                fill_context(target)
            emit(pass_seconds(target, request["rows"]))
        elif "prompt_rows" in request:
            emit(prompt_seconds(target, request["prompt_rows"]))
        elif "logits" in request:
            target.forget(0)
            np.save(request["file"], target.decode(request["logits"], 0, len(request["logits"])))
            emit(None)
        elif request["temperature"] == 0.0:
            emit(generate(target, drafter, greedy, unpadded_vocabulary, request))
        else:
            choose = sampler(request["temperature"], request["seed"])
            emit(generate(target, drafter, choose, unpadded_vocabulary, request))
            choose.close()
        filled = "rows" in request


def main() -> None:
    """Load the models and serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft")
    for name in ("--unpadded-vocabulary", "--threads", "--context"):
        parser.add_argument(name, type=int, required=True)
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the output of libraries must not mix with the answers
    import llama_cpp  # type: ignore[import-not-found]
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding  # type: ignore[import-not-found]

    library = llama_cpp.llama_cpp
    library.llama_backend_init()
    target = LlamaDecoder(library, options.target, options.threads, options.context)
    drafter = None
    if options.draft:
        model = LlamaDecoder(library, options.draft, options.threads, options.context)
        drafter = ChainDrafter(model, min(options.unpadded_vocabulary, model.vocabulary))

    def sampler(temperature: float, seed: int) -> LlamaSampler:
        return LlamaSampler(library, temperature, seed, options.unpadded_vocabulary)

    def emit(answer: Any) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    print("ready", file=answers, flush=True)
    lookup = LookupDrafter(LlamaPromptLookupDecoding.find_candidate_pred_tokens)
    serve(target, drafter, lookup, sampler, options.unpadded_vocabulary, sys.stdin, emit)


if __name__ == "__main__":
    main()
