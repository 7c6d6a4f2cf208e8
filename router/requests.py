"""Requests: what has become an `Ask` has been checked."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from outrider.config import RouterConfig
from outrider.core.contract import FILLING, SHARED_NOISE, Contract, Overlap, Plan
from outrider.core.control import GammaPolicy, policy
from outrider.core.goodput import Lessons
from outrider.errors import InvalidRequest, NotFound, TokenizerMismatch
from outrider.rpc.codec import check_tokens
from outrider.store.registry import Worker
from outrider.store.sessions import SessionRecord
from outrider.v1 import inference_pb2
from router.chat import Message
from router.fair_queue import Priority
from router.models import ServedModel

DEFAULT_MAX_TOKENS = 128
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_DEPTH = 64
MAX_KEY = 128  # characters
CHARACTERS = 4  # of a token, roughly
PRIORITIES: dict[int, Priority] = {
    inference_pb2.PRIORITY_UNSPECIFIED: Priority.INTERACTIVE,
    inference_pb2.PRIORITY_INTERACTIVE: Priority.INTERACTIVE,
    inference_pb2.PRIORITY_BATCH: Priority.BATCH,
}
OVERLAP = {None: Overlap.MEASURED, True: Overlap.ALWAYS, False: Overlap.NEVER}


class Conversation(tuple[Message, ...]):
    """A prompt as messages: the whole conversation, for the model's chat template."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Ask:
    """One valid request, but for what depends on the verifier (see `check_fits`)."""

    model: ServedModel
    prompt: str | tuple[int, ...] | Conversation
    contract: Contract
    stops: tuple[str, ...]
    policy: GammaPolicy
    whole_history: bool
    key: str  # idempotency key; empty: none
    fingerprint: bytes  # of the request
    priority: Priority
    tenant: str = ""  # whose request it is

    @property
    def roughly(self) -> int:
        """About how many tokens the prompt has, before it is tokenized."""
        match self.prompt:
            case str() as text:
                return len(text) // CHARACTERS
            case Conversation() as messages:
                return sum(len(message.content) for message in messages) // CHARACTERS
            case tokens:
                return len(tokens)

    @property
    def fills(self) -> bool:
        """Whether the answer may be as long as there is room for."""
        return self.contract.max_tokens == FILLING

    @property
    def likely(self) -> int:
        """About how many tokens the answer may have."""
        return DEFAULT_MAX_TOKENS if self.fills else self.contract.max_tokens

    @property
    def name(self) -> str:
        """Names a request with a key; empty without one."""
        return hashlib.sha256(self.key.encode() + self.fingerprint).hexdigest()[:32] if self.key else ""


def parse(
    request: inference_pb2.GenerateRequest,
    models: Mapping[str, ServedModel],
    config: RouterConfig,
    held: SessionRecord | None = None,
    lessons: Callable[[ServedModel, str], Lessons] | None = None,
    *,
    tenant: str = "",
) -> Ask:
    """Checks a tenant's request and fills in what it leaves out; `held` is the session that it is a turn of, `lessons`
    what its policy may begin with.

    Raises InvalidRequest naming the field, NotFound for an unknown model, TokenizerMismatch for token ids of
    another tokenizer.
    """
    if (size := request.ByteSize()) > config.max_request_bytes:  # before time is spent on tokenizing it
        most = config.max_request_bytes
        raise InvalidRequest("prompt", f"the request has {size} bytes, must have at most {most} (max_request_bytes)")
    if held and request.model not in ("", held.model):
        raise InvalidRequest("model", f"is {request.model!r}, but session {held.session_id} is for {held.model!r}")
    model = named(held.model if held else request.model, models)
    if len(request.idempotency_key) > MAX_KEY:
        raise InvalidRequest("idempotency_key", f"must have at most {MAX_KEY} characters")
    contract = _contract(request.sampling, request.acceptance, model)
    known = lessons(model, contract.heat) if lessons is not None else None
    return Ask(
        model=model,
        prompt=_prompt(request, model),
        contract=contract,
        stops=_stops(request.sampling.stop),
        policy=_policy(request.speculation, config, known),
        whole_history=request.whole_history,
        key=request.idempotency_key,
        fingerprint=_fingerprint(request),
        tenant=tenant,
        priority=_priority(request.priority),
    )


def filled(tokens: Sequence[int], contract: Contract, verifiers: Sequence[Worker]) -> Contract:
    """The contract of an answer that may take all the room that one of these verifiers has behind the prompt.

    Raises InvalidRequest where that is less than its `min_tokens`.
    """
    room = max(worker.context for worker in verifiers) - len(tokens)
    return replace(contract, max_tokens=max(room, 1))  # where there is none, `check_fits` says so


def check_fits(
    tokens: Sequence[int], contract: Contract, verifiers: Sequence[Worker], answer_position: int | None = None
) -> list[Worker]:
    """Those of one model's verifiers that can hold prompt and answer. Raises InvalidRequest when none can.

    `tokens`: the prompt, or with an `answer_position` the prompt and a part of the answer.
    """
    prompt = tokens[:answer_position]
    vocabulary = max(worker.vocabulary for worker in verifiers)
    check_tokens(prompt, vocabulary, "prompt")
    contract.check_vocabulary(vocabulary)
    needed = len(prompt) + contract.max_tokens
    context = max(worker.context for worker in verifiers)
    if len(prompt) >= context:
        raise InvalidRequest("prompt", f"has {len(prompt)} tokens, must have at most {context - 1}")
    if needed > context:
        raise InvalidRequest(
            "max_tokens",
            f"is {contract.max_tokens}, must be at most {context - len(prompt)}: "
            f"the prompt takes {len(prompt)} of the context of {context}",
        )
    return [worker for worker in verifiers if worker.context >= needed]


def named(name: str, models: Mapping[str, ServedModel]) -> ServedModel:
    """The model of that name, or the only one. Raises NotFound."""
    if not name and len(models) == 1:
        return next(iter(models.values()))
    if name not in models:
        there = ", ".join(sorted(models))
        raise NotFound(f"model {name!r} is not served here; there are: {there}" if name else f"name one of: {there}")
    return models[name]


def _priority(value: int) -> Priority:
    if value not in PRIORITIES:
        raise InvalidRequest("priority", f"is {value}, must be INTERACTIVE (1, the default) or BATCH (2)")
    return PRIORITIES[value]


def _prompt(request: inference_pb2.GenerateRequest, model: ServedModel) -> str | tuple[int, ...] | Conversation:
    kind = request.WhichOneof("prompt")
    if request.messages:
        if kind is not None:
            raise InvalidRequest("messages", "are there beside a prompt; send one of the two")
        return _conversation(request.messages)
    if kind == "token_ids":
        digest = request.token_ids.tokenizer_digest
        if digest and digest != model.digest:
            raise TokenizerMismatch(
                f"token_ids.tokenizer_digest: is {digest.hex()}, model {model.name!r} has {model.digest.hex()}; "
                "tokenize with the model's own tokenizer or send text"
            )
        prompt: str | tuple[int, ...] = tuple(request.token_ids.ids)
    else:
        prompt = request.text
    if not prompt:
        raise empty_prompt()
    return prompt


def _conversation(messages: Iterable[inference_pb2.Message]) -> Conversation:
    conversation = Conversation(Message(message.role, message.content) for message in messages)
    for index, message in enumerate(conversation):
        if not message.role:
            raise InvalidRequest(f"messages[{index}].role", "is empty, must say who speaks, for example user")
    return conversation


def empty_prompt() -> InvalidRequest:
    """The error for a prompt without a single token."""
    return InvalidRequest(
        "prompt", "is empty, must be text or token_ids with at least one token, unless there are messages"
    )


def _contract(sampling: inference_pb2.Sampling, acceptance: inference_pb2.Acceptance, model: ServedModel) -> Contract:
    names = ("lenience", "typical_epsilon", "typical_delta")
    parameters = {name: getattr(acceptance, name) for name in names if acceptance.HasField(name)}
    return Contract(
        rule=acceptance.rule or SHARED_NOISE,
        **parameters,
        seed=sampling.seed if sampling.HasField("seed") else secrets.randbits(64),
        choice=sampling.choice,
        temperature=sampling.temperature if sampling.HasField("temperature") else 1.0,
        top_k=sampling.top_k,
        top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=tuple(sampling.logit_bias.items()),
        allowed_ids=tuple(sampling.allowed_ids),
        banned_ids=tuple(sampling.banned_ids),
        min_tokens=sampling.min_tokens,
        max_tokens=(sampling.max_tokens or FILLING) if sampling.HasField("max_tokens") else DEFAULT_MAX_TOKENS,
        stop_ids=(*sampling.stop_ids, *(() if sampling.ignore_eos else model.eos_ids)),
        logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
    )


def _stops(stops: Sequence[str]) -> tuple[str, ...]:
    if len(stops) > MAX_STOPS:
        raise InvalidRequest("stop", f"has {len(stops)} strings, must have at most {MAX_STOPS}")
    for index, stop in enumerate(stops):
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise InvalidRequest(f"stop[{index}]", f"has {len(stop)} characters, must have 1 to {MAX_STOP_CHARACTERS}")
    return tuple(stops)


def _policy(speculation: inference_pb2.Speculation, config: RouterConfig, lessons: Lessons | None) -> GammaPolicy:
    if speculation.depth > MAX_DEPTH:
        raise InvalidRequest("speculation.depth", f"is {speculation.depth}, must be 0 (the default) to {MAX_DEPTH}")
    return policy(speculation.policy or config.policy, ceilings(config, speculation.depth), lessons)


def ceilings(config: RouterConfig, depth: int = 0) -> Plan:
    """The router's ceilings; `depth` replaces its own unless it is 0."""
    return Plan(
        depth=depth or config.depth,
        width=config.width,
        nodes=config.nodes,
        wait_us=config.wait_us,
        overlap=OVERLAP[config.overlap],
    )


def _fingerprint(request: inference_pb2.GenerateRequest) -> bytes:
    """Names what a request asks for, whatever its key."""
    asked = inference_pb2.GenerateRequest()
    asked.CopyFrom(request)
    asked.idempotency_key = ""
    asked.priority = inference_pb2.PRIORITY_UNSPECIFIED  # when it is answered is no part of what
    return hashlib.sha256(asked.SerializeToString(deterministic=True)).digest()
