"""vLLM's proposer: it returns what remote drafters have sent for each request of a batch.

    vllm serve MODEL --additional-config '{"outrider": {"drafters": ["10.0.0.5:7072"]}}' --speculative-config \\
      '{"method": "custom_class", "model": "outrider_vllm.RemoteDrafter", "num_speculative_tokens": 4}'

vLLM gives a proposer the tokens of its batch, but neither the requests' names nor their ends. So this one follows the
model runner that it is made by: it wraps `execute_model` of its class.
"""

from __future__ import annotations

import functools
import logging
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import vllm
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from outrider.errors import CheckpointError
from outrider.hub import checkpoint_folder
from outrider.upstream.remote_drafts import RemoteDrafts
from outrider_vllm.metrics import serving_figures
from outrider_vllm.requests import RequestTerms, terms_of
from outrider_vllm.settings import Settings
from outrider_vllm.shared_noise import Noise, NoisyRow, SharedNoise
from outrider_vllm.verification import complete, repair

KNOWN = ("0.32.",)  # versions whose interfaces are those that are used here

log = logging.getLogger(f"vllm.{__name__}")


class RemoteDrafter:
    """The proposer of one worker. No call raises: where something fails, vLLM goes on without drafts."""

    def __init__(self, vllm_config: Any) -> None:
        """Raises ValueError for settings that do not hold."""
        model = vllm_config.model_config
        self._settings = Settings.read(vllm_config.additional_config)
        self._model = model
        self._depth = vllm_config.speculative_config.num_speculative_tokens
        self._longest = model.max_model_len
        self._instance = vllm_config.instance_id
        self._drafts: RemoteDrafts | None = None  # None: another rank asks for drafts
        self._pages = ExitStack()  # until the process ends
        self._runner: Any = None  # None: no step has begun
        self._step: Any = None  # vLLM's SchedulerOutput of the step that runs
        self._terms: dict[str, RequestTerms] = {}
        self._noises: dict[str, Noise] = {}
        self._read = 0  # prompt tokens of the step that runs
        self._idle = True  # there was nothing to do before it
        self._failed = False

    def load_model(self, model: Any) -> None:
        """Begin to listen for drafters, on the rank whose drafts count."""
        if not vllm.__version__.startswith(KNOWN):
            log.warning("vLLM %s is not known, so there are no drafts; known: %s*", vllm.__version__, ", ".join(KNOWN))
            return
        _follow(GPUModelRunner)
        repair()
        if get_tensor_model_parallel_rank() == 0:
            _show_logs()
            self._begin_drafting()

    def _begin_drafting(self) -> None:
        """Raises ConfigError for an address that cannot be bound."""
        it = self._model
        named = f"{it.tokenizer}@{it.tokenizer_revision}" if it.tokenizer_revision else it.tokenizer
        try:
            folder = checkpoint_folder(named, weights=False)
            settings = self._settings.upstream(folder, it.get_vocab_size(), self._depth)
            self._drafts = RemoteDrafts(settings)
        except CheckpointError as error:  # a tokenizer of a kind that no drafter can have
            log.warning("there are no drafts: %s", error)
            return
        if self._settings.metrics is not None:
            name = it.served_model_name or it.model
            self._pages.enter_context(serving_figures(self._drafts, self._settings.metrics, str(name)))

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return the drafts of each row of the batch, none for rows that chose no token in this step.

        `num_tokens_no_spec`: [rows] length of each text. `token_ids_cpu`: [rows, max_model_len] the texts.
        """
        found: list[list[int]] = [[] for _ in sampled_token_ids]
        if self._drafts is None or self._runner is None:
            return found
        try:
            names, rows, most = self._runner.input_batch.req_ids, [], []
            places = [place for place, new in enumerate(sampled_token_ids) if new and self._of(names[place]).drafted]
            for place in places:
                name, length, text = names[place], int(num_tokens_no_spec[place]), token_ids_cpu[place]
                known = self._drafts.length(name)
                if not 0 < known <= length:
                    terms, tokens = self._of(name), array("i", text[:length].tobytes())
                    prompt = int(self._runner.input_batch.num_prompt_tokens[place])
                    self._drafts.open(
                        name, tokens, terms.contract, prompt=prompt, accepts_at_random=terms.accepts_at_random
                    )
                    known = length
                rows.append((name, text[known:length].tolist()))
                most.append(min(self._depth, self._longest - length - 1))
            chains = self._drafts.step(rows, most, read=self._read, idle=self._idle)
            for place, chain in zip(places, chains, strict=True):
                found[place] = chain
        except Exception:
            self._note()
        return found

    def begin(self, runner: Any, step: Any) -> None:
        """Take account of a step that begins: vLLM's runner, and its SchedulerOutput."""
        try:
            self._step = step
            if self._runner is None:
                self._runner = runner
                SharedNoise(runner.sampler, self._noisy_rows)
                complete(runner)
            scheduled, drafted = step.num_scheduled_tokens, step.scheduled_spec_decode_tokens
            decoding = sum(count == 1 + len(drafted.get(name, ())) for name, count in scheduled.items())
            self._read = step.total_num_scheduled_tokens - decoding - sum(map(len, drafted.values()))
            self._idle = not step.scheduled_cached_reqs.req_ids  # nothing that this step goes on with
            for name in step.finished_req_ids:
                self._terms.pop(name, None)
                self._noises.pop(name, None)
                if self._drafts is not None:
                    self._drafts.close(name)
        except Exception:
            self._note()

    def _noisy_rows(self) -> list[NoisyRow]:
        """Return the rows of the step that draw by shared noise."""
        batch, drafted = self._runner.input_batch, self._step.scheduled_spec_decode_tokens
        found: list[NoisyRow] = []
        try:
            for row, name in enumerate(batch.req_ids):
                if (seed := self._of(name).noise_seed) is not None:
                    if name not in self._noises:
                        self._noises[name] = Noise(seed, batch.vocab_size)
                    length, drafts = int(batch.num_tokens_no_spec[row]), len(drafted.get(name, ()))
                    found.append(NoisyRow(row, self._noises[name], length, drafts))
        except Exception:
            self._note()
        return found

    def _of(self, name: str) -> RequestTerms:
        """Return the terms of a request of the batch."""
        if name not in self._terms:
            params = self._runner.requests[name].sampling_params
            shared = self._settings.shared_noise
            self._terms[name] = terms_of(name, params, shared_noise=shared, instance=self._instance)
        return self._terms[name]

    def _note(self) -> None:
        if not self._failed:
            self._failed = True
            log.exception("drafts fail, so vLLM goes on without; this is said once")


def _show_logs() -> None:
    """Write what Outrider logs where vLLM writes its own."""
    ours = logging.getLogger("outrider")
    if not ours.handlers:
        ours.handlers = logging.getLogger("vllm").handlers
        ours.setLevel(logging.INFO)


def _follow(runner_class: Any) -> None:
    """Have proposers know when a step of their runner begins."""
    execute = runner_class.execute_model
    if hasattr(execute, "followed"):
        return

    @functools.wraps(execute)
    def execute_model(runner: Any, step: Any, *more: Any, **named: Any) -> Any:
        if isinstance(drafter := getattr(runner, "drafter", None), RemoteDrafter):
            drafter.begin(runner, step)
        return execute(runner, step, *more, **named)

    execute_model.followed = True  # type: ignore[attr-defined]
    runner_class.execute_model = execute_model
