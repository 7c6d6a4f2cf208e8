"""llama.cpp with remote drafts, through the draft model of llama-cpp-python: its text beside that without drafts.

outrider quantize models/target target.gguf --to Q8_0
outrider drafter --model models/drafter --listen 127.0.0.1:7072
python examples/llama_cpp/remote_drafts.py target.gguf --model models/target --drafter 127.0.0.1:7072
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp import Llama, LogitsProcessorList
from llama_cpp.llama_speculative import LlamaDraftModel
from tokenizers import Tokenizer

from outrider.core.sampling.sampler import Sampler
from outrider.core.session.contract import Contract
from outrider.upstream.remote_drafts import RemoteDrafts, UpstreamSettings

ROW = "llama.cpp"  # it has one text at a time


class RemoteDraftModel(LlamaDraftModel):
    """Returns what drafters have sent by now. llama.cpp calls it after each pass, with the text so far."""

    def __init__(self, drafts: RemoteDrafts, contract: Contract) -> None:
        self._drafts = drafts
        self._contract = contract  # how the text is chosen
        self._text = np.zeros(0, np.intc)

    def __call__(self, input_ids: np.ndarray, /, **more: Any) -> np.ndarray:
        """Return the drafts that follow the text: [drafts]."""
        known, new = self._text, input_ids[len(self._text) :]
        if not len(known) or not np.array_equal(input_ids[: len(known)], known):  # another text
            self._drafts.open(ROW, input_ids.tolist(), self._contract)
            new = input_ids[:0]
        self._text = input_ids.copy()
        [chain] = self._drafts.step([(ROW, new.tolist())])
        return np.array(chain, np.intc)


class SharedNoise:
    """Leaves llama.cpp one token to choose: argmax(log p + g), with the noise g that drafters know, too.

    llama.cpp calls it once for each token, in their order, drafted or not.
    """

    def __init__(self, contract: Contract, vocabulary: int, prompt: Sequence[int]) -> None:
        self._sampler = Sampler(contract, vocabulary, prompt, len(prompt))

    def __call__(self, input_ids: np.ndarray, logits: np.ndarray) -> np.ndarray:
        """Return the logits of the next token: [vocabulary]."""
        token = self._sampler.choose(np.ascontiguousarray(logits), []).token
        self._sampler.extend([token])
        return np.where(np.arange(len(logits)) == token, 0.0, -np.inf).astype(np.float32)


def generate(model: Llama, prompt: Sequence[int], contract: Contract, tokens: int) -> tuple[list[int], float]:
    """Return the tokens that follow a prompt, and the seconds that they took."""
    began, text = time.perf_counter(), list[int]()
    noise = LogitsProcessorList([SharedNoise(contract, model.n_vocab(), prompt)])
    for token in model.generate(prompt, temp=0.0, logits_processor=noise):
        text.append(token)
        if len(text) == tokens:
            break
    return text, time.perf_counter() - began


def main() -> None:
    """Read the flags, generate with drafts and without, and print both."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("file", help="the target, a GGUF file")
    flags.add_argument("--model", type=Path, required=True, help="folder with the target's config and tokenizer")
    flags.add_argument("--drafter", required=True, help="its HOST:PORT")
    flags.add_argument("--prompt", default="def add(a, b):\n")
    flags.add_argument("--temperature", type=float, default=1.0)
    flags.add_argument("--seed", type=int, default=7)
    flags.add_argument("--tokens", type=int, default=120)
    given = flags.parse_args()

    tokenizer = Tokenizer.from_file(str(given.model / "tokenizer.json"))
    prompt = tokenizer.encode(given.prompt).ids
    contract = Contract(seed=given.seed, max_tokens=given.tokens, temperature=given.temperature)
    settings = UpstreamSettings([given.drafter], given.model)
    model = Llama(given.file, n_threads=1, n_ctx=1024, logits_all=True, verbose=False)
    with RemoteDrafts(settings) as drafts:
        while not drafts.drafters:
            time.sleep(0.1)
        found = {}
        for name, draft_model in [("plain", None), ("drafted", RemoteDraftModel(drafts, contract))]:
            model.draft_model = draft_model
            generate(model, prompt, contract, 8)
            text, seconds = found[name] = generate(model, prompt, contract, given.tokens)
            print(f"{name}: {len(text) / seconds:.1f} tokens/s\n{tokenizer.decode(text)}\n")
    (plain, before), (drafted, after) = found.values()
    same = "the same text" if plain == drafted else "another text: llama.cpp rounds otherwise in larger batches"
    counts = drafts.counts
    print(f"{same}; speed-up {before / after:.2f}; {counts.accepted} of {counts.drafted} drafts accepted")


if __name__ == "__main__":
    main()
