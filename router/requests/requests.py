"""Parses requests: a `GenerateParams` has been checked."""

from __future__ import annotations

import hashlib
import json
import reprlib
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.config import RouterConfig
from outrider.core.answers.formats import Tools, read_calls, read_tools
from outrider.core.answers.reasoning import BEGIN, END
from outrider.core.control.depth.goodput import AcceptancePriors
from outrider.core.control.depth.policies import GammaPolicy, policy
from outrider.core.json_bounds import JsonBounds
from outrider.core.session.contract import DEFAULT_MAX_TOKENS, FILLING, SHARED_NOISE, Contract, Plan, PlanOverlap
from outrider.errors import InvalidRequest, NotFound, TokenizerMismatch, TooLong
from outrider.limits.fair_queue import QueueClass
from outrider.store.registry import Worker
from outrider.store.sessions import SessionRecord
from outrider.v1 import inference_pb2
from outrider.wire.types import check_tokens, grammar_from_pb
from router.requests.chat_template import NO_VARIABLES, TEMPLATE_FIELD, PromptEnd, TemplateMessage
from router.requests.served_models import RequestedModel, ServedModel

JSON_KINDS = ("json_schema", "choices")  # grammars whose text is JSON
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_DEPTH = 64
MAX_KEY = 128  # characters
MAX_MESSAGES = 4096
MAX_TEMPLATE = 2**16  # characters of a caller's chat template
MAX_VARIABLES = 2**14  # characters of a chat template's further inputs
OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")  # of a chat template, beside special tokens
CHARACTERS = 4  # characters of a token, roughly
PRIORITIES: dict[int, QueueClass] = {
    inference_pb2.PRIORITY_UNSPECIFIED: QueueClass.INTERACTIVE,
    inference_pb2.PRIORITY_INTERACTIVE: QueueClass.INTERACTIVE,
    inference_pb2.PRIORITY_BATCH: QueueClass.BATCH,
}
_TERMS = Contract.names()
OVERLAP = {None: PlanOverlap.MEASURED, True: PlanOverlap.ALWAYS, False: PlanOverlap.NEVER}


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt as messages: all of the conversation, for a chat template."""

    messages: tuple[TemplateMessage, ...]
    tools: Tools | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)  # further inputs of the chat template
    characters: int = 0  # of all messages, the tools, and the caller's template
    end: PromptEnd = "answer"
    template: str = ""  # the caller's own; empty: the model's

    @property
    def within_reasoning(self) -> bool:
        """Whether the message that the answer continues has begun reasoning and not ended it."""
        text = self.messages[-1].content
        return self.end == "continue" and text.rfind(BEGIN) > text.rfind(END)


@dataclass(frozen=True, slots=True)
class GenerateParams:
    """One valid request, but for what depends on the verifier (see `check_fits`)."""

    model: ServedModel
    prompt: str | tuple[int, ...] | Conversation
    contract: Contract
    stops: tuple[str, ...]
    policy: GammaPolicy
    whole_history: bool
    idempotency_key: str  # idempotency key; empty: none
    fingerprint: bytes  # of the request's content
    priority: QueueClass
    tenant: str = ""
    context: int = 0  # the longest of the model's verifiers; 0: not known
    include_stop: bool = False  # the text has the stop string that ends it, or a stop id's text
    special_tokens: bool = False  # whether special tokens have text
    adds_special: bool = True  # a prompt of text gets the tokens that the tokenizer itself puts around it
    # The prompt keeps at most this many of its tokens, the last ones; 0: all; FILLING: as `longest_prompt` has it.
    truncated_to: int = 0
    returns_prompt: bool = False  # Started has the prompt's tokens
    broke_off: bool = False  # the caller's earlier call of this request broke before any event

    @property
    def estimated_prompt_tokens(self) -> int:
        """Estimated tokens of the prompt, before it is tokenized."""
        match self.prompt:
            case str() as text:
                return len(text) // CHARACTERS
            case Conversation():
                return self.prompt.characters // CHARACTERS
            case tokens:
                return len(tokens)

    @property
    def fills_context(self) -> bool:
        """Whether the response may take all the room in the context."""
        return self.contract.max_tokens == FILLING

    @property
    def estimated_output_tokens(self) -> int:
        """Estimated maximum of the response's tokens."""
        return DEFAULT_MAX_TOKENS if self.fills_context else self.contract.max_tokens

    @property
    def request_id(self) -> str:
        """Name of a request with an idempotency key; empty without one."""
        return (
            hashlib.sha256(self.idempotency_key.encode() + self.fingerprint).hexdigest()[:32]
            if self.idempotency_key
            else ""
        )


def parse(
    request: inference_pb2.GenerateRequest,
    models: Mapping[str, ServedModel],
    config: RouterConfig,
    session: SessionRecord | None = None,
    priors: Callable[[ServedModel, Contract], AcceptancePriors] | None = None,
    *,
    tenant: str = "",
    longest_context: Callable[[str], int] = lambda model: 0,
    requested: RequestedModel | None = None,
) -> GenerateParams:
    """Check a tenant's request and fill in defaults. `session` is the session that it continues; `priors` returns the
    acceptance priors that its policy starts with; `longest_context` that of a model's verifiers, or 0 if it is not
    known; `requested` is what its `model` means, if not a model.

    Raises InvalidRequest naming the field, NotFound for an unknown model, TokenizerMismatch for token ids of another
    tokenizer.
    """
    if (size := request.ByteSize()) > config.max_request_bytes:  # checked before the text is tokenized
        most = config.max_request_bytes
        raise InvalidRequest("prompt", f"the request has {size} bytes, must have at most {most} (max_request_bytes)")
    if len(request.messages) > MAX_MESSAGES:
        raise InvalidRequest("messages", f"are {len(request.messages)}, must be at most {MAX_MESSAGES}")
    requested = _of_session(requested or RequestedModel(request.model), session)
    model = find_model(requested.name, models)
    if len(request.idempotency_key) > MAX_KEY:
        raise InvalidRequest("idempotency_key", f"must have at most {MAX_KEY} characters")
    if request.truncate_prompt_tokens and session is not None:
        raise InvalidRequest("truncate_prompt_tokens", "does not go with a session, whose tokens stay")
    bounds = JsonBounds()
    tools = _tools(request, model, bounds)
    contract = replace(_contract(request.sampling, request.acceptance, model, tools, bounds), adapter=requested.adapter)
    known = priors(model, contract) if priors is not None else None
    context = longest_context(model.name)
    return GenerateParams(
        model=model,
        prompt=_prompt(request, model, context, tools, bounds),
        contract=contract,
        stops=_stops(request.sampling.stop),
        policy=_policy(request.speculation, config, known),
        whole_history=request.whole_history,
        idempotency_key=request.idempotency_key,
        fingerprint=_fingerprint(request),
        include_stop=request.include_stop,
        special_tokens=request.show_special_tokens,
        adds_special=not request.omit_special_tokens,
        truncated_to=request.truncate_prompt_tokens,
        returns_prompt=request.return_prompt,
        broke_off=request.broke_off,
        tenant=tenant,
        context=context,
        priority=_priority(request.priority),
    )


def longest_prompt(contract: Contract, verifiers: Sequence[Worker]) -> int:
    """Return the most tokens of a prompt that leave room for the response at one of these verifiers, 1 at least."""
    answer = 1 if contract.max_tokens == FILLING else contract.max_tokens
    return max(1, max(worker.context for worker in verifiers) - answer)


def fill_context(tokens: Sequence[int], contract: Contract, verifiers: Sequence[Worker]) -> Contract:
    """Return the contract of a response that may take all the room that one of these verifiers has behind the prompt.

    Raises InvalidRequest if that is less than its `min_tokens`.
    """
    room = max(worker.context for worker in verifiers) - len(tokens)
    return replace(contract, max_tokens=max(room, 1))  # without room `check_fits` raises


def check_fits(
    tokens: Sequence[int], contract: Contract, verifiers: Sequence[Worker], answer_position: int | None = None
) -> list[Worker]:
    """Return those of one model's verifiers that can hold prompt and response. Raises InvalidRequest when none can.

    `tokens`: the prompt, or with an `answer_position` the prompt and a part of the response.
    """
    prompt = tokens[:answer_position]
    vocabulary = max(worker.vocabulary for worker in verifiers)
    check_tokens(prompt, vocabulary, "prompt")
    contract.check_vocabulary(vocabulary)
    needed = len(prompt) + contract.max_tokens
    context = max(worker.context for worker in verifiers)
    _check_length(len(prompt), context)
    if needed > context:
        raise TooLong(
            "max_tokens",
            f"is {contract.max_tokens}, must be at most {context - len(prompt)}: "
            f"the prompt takes {len(prompt)} of the context of {context}",
        )
    return [worker for worker in verifiers if worker.context >= needed]


def _check_length(tokens: int, context: int) -> None:
    if tokens >= context:
        raise TooLong("prompt", f"has {tokens} tokens, must have at most {context - 1}: the context has {context}")


def find_model(name: str, models: Mapping[str, ServedModel]) -> ServedModel:
    """Return the model of that name, or for an empty name the only one. Raises NotFound."""
    if not name and len(models) == 1:
        return next(iter(models.values()))
    if name not in models:
        there = ", ".join(sorted(models))
        raise NotFound(f"model {name!r} is not served here; there are: {there}" if name else f"name one of: {there}")
    return models[name]


def _of_session(requested: RequestedModel, session: SessionRecord | None) -> RequestedModel:
    """Return model and adapter of a generation. Raises InvalidRequest where its session has others."""
    if session is None:
        return requested
    adapter = session.turn.contract.adapter if session.turn is not None else requested.adapter
    if not requested.name:
        return RequestedModel(session.model, adapter)
    if requested.name != session.model:
        raise InvalidRequest(
            "model", f"is {requested.name!r}, but session {session.session_id} is for {session.model!r}"
        )
    if requested.adapter != adapter:
        raise InvalidRequest(
            "model", f"has another adapter than session {session.session_id}, or another version of it"
        )
    return requested


def _priority(value: int) -> QueueClass:
    if value not in PRIORITIES:
        raise InvalidRequest("priority", f"is {value}, must be INTERACTIVE (1, the default) or BATCH (2)")
    return PRIORITIES[value]


def _tools(request: inference_pb2.GenerateRequest, model: ServedModel, bounds: JsonBounds) -> Tools | None:
    if not request.HasField("tools"):
        return None
    if not request.messages:
        raise InvalidRequest("tools", "are for messages, whose chat template shows them to the model")
    asked = request.tools
    tools = read_tools(asked.definitions, bounds, required=asked.required, name=asked.name, single=asked.single)
    if not model.form.tool_format:
        problem = f"model {model.name!r} has no chat template that knows tools, and no tool_formats"
        raise InvalidRequest("tools", problem)
    return tools


def _prompt(
    request: inference_pb2.GenerateRequest, model: ServedModel, context: int, tools: Tools | None, bounds: JsonBounds
) -> str | tuple[int, ...] | Conversation:
    kind = request.WhichOneof("prompt")
    if request.messages:
        if kind is not None:
            raise InvalidRequest("messages", "are set together with a prompt; send one of the two")
        parts = ((it.content, it.tool_calls, it.reasoning_content) for it in request.messages)
        characters = sum(len(text) for part in parts for text in part)
        characters += len(request.tools.definitions) + len(request.chat_template)
        variables = _template_variables(request.template_variables, bounds)
        messages = tuple(_messages(request.messages, bounds))
        template = _chat_template(request.chat_template)
        return Conversation(messages, tools, variables, characters, _prompt_end(request), template)
    if request.continue_final_message or request.omit_generation_prompt:
        name = "continue_final_message" if request.continue_final_message else "add_generation_prompt"
        raise InvalidRequest(name, "is for messages; a prompt is continued anyway")
    if request.template_variables:
        raise InvalidRequest("template_variables", "are for messages, which a chat template turns into a prompt")
    if request.chat_template:
        raise InvalidRequest(TEMPLATE_FIELD, "is for messages, which it turns into a prompt")
    if kind == "token_ids":
        digest = request.token_ids.tokenizer_digest
        if digest and digest != model.digest:
            raise TokenizerMismatch(
                f"token_ids.tokenizer_digest: is {digest.hex()}, model {model.name!r} has {model.digest.hex()}; "
                "tokenize with the model's own tokenizer or send text"
            )
        ids = request.token_ids.ids
        kept = min(request.truncate_prompt_tokens or len(ids), len(ids))
        if context and request.truncate_prompt_tokens == FILLING:
            kept = min(kept, context - 1)
        if context:
            _check_length(kept, context)  # before Python's numbers take ten times the memory
        prompt: str | tuple[int, ...] = tuple(ids[len(ids) - kept :])
    else:
        prompt = request.text
    if not prompt:
        raise empty_prompt()
    return prompt


def _chat_template(text: str) -> str:
    """Return the caller's chat template; empty if there is none. Raises InvalidRequest."""
    if len(text) > MAX_TEMPLATE:
        raise InvalidRequest(TEMPLATE_FIELD, f"has {len(text)} characters, must have at most {MAX_TEMPLATE}")
    return text


def _template_variables(text: str, bounds: JsonBounds) -> Mapping[str, Any]:
    """Return the inputs of a chat template beside messages and tools. Raises InvalidRequest."""
    if not text:
        return NO_VARIABLES
    if len(text) > MAX_VARIABLES:
        raise InvalidRequest("template_variables", f"have {len(text)} characters, must have at most {MAX_VARIABLES}")
    bounds.check("template_variables", text)
    try:
        variables = json.loads(text)
    except ValueError as error:
        raise InvalidRequest("template_variables", f"are no JSON: {error}") from None
    if not isinstance(variables, dict):
        raise InvalidRequest("template_variables", 'must be an object, for example {"enable_thinking": false}')
    for name in variables:
        if name in OWN_VARIABLES or name.endswith("_token"):
            raise InvalidRequest("template_variables", f"must not have {reprlib.repr(name)}, which the router sets")
    return variables


def _prompt_end(request: inference_pb2.GenerateRequest) -> PromptEnd:
    """Return where the prompt of messages ends. Raises InvalidRequest."""
    if not request.continue_final_message:
        return "bare" if request.omit_generation_prompt else "answer"
    last = request.messages[-1]
    if last.role != "assistant" or last.tool_calls:
        raise InvalidRequest(
            "continue_final_message", "needs a last message of the assistant, without calls, whose content is continued"
        )
    return "continue"


def _messages(messages: Iterable[inference_pb2.Message], bounds: JsonBounds) -> Iterator[TemplateMessage]:
    for index, message in enumerate(messages):
        if not message.role:
            raise InvalidRequest(f"messages[{index}].role", "is empty, must be a role, for example user")
        field, written = f"messages[{index}].tool_calls", message.tool_calls
        calls = read_calls(field, written, bounds) if written else ()
        yield TemplateMessage(message.role, message.content, calls, message.tool_call_id, message.reasoning_content)


def empty_prompt() -> InvalidRequest:
    """Return the error for a prompt without a single token."""
    return InvalidRequest(
        "prompt", "is empty, must be text or token_ids with at least one token, unless there are messages"
    )


def _contract(
    sampling: inference_pb2.Sampling,
    acceptance: inference_pb2.Acceptance,
    model: ServedModel,
    tools: Tools | None,
    bounds: JsonBounds,
) -> Contract:
    terms = _given(sampling) | _given(acceptance)
    max_tokens = terms.get("max_tokens", DEFAULT_MAX_TOKENS)
    grammar = grammar_from_pb(sampling.grammar) if sampling.HasField("grammar") else None
    if grammar is not None and grammar.kind in JSON_KINDS:
        bounds.check("grammar.text", grammar.text)
    if tools is not None and tools.forced:
        if grammar is not None:
            raise InvalidRequest("tools", "that have to be called do not go with a grammar of the answer")
        grammar = model.calls_grammar(tools)
    elif tools is not None and grammar is not None and grammar.kind == "json_schema":
        grammar = model.calls_grammar(tools, _schema(grammar.text))
    if grammar is not None and sampling.ignore_eos:
        raise InvalidRequest("ignore_eos", "does not go with a grammar: the answer ends where the grammar does")
    derived = {
        "grammar": grammar,
        "seed": terms.get("seed", secrets.randbits(64)),
        "rule": acceptance.rule or SHARED_NOISE,
        "logit_bias": tuple(sampling.logit_bias.items()),
        "max_tokens": max_tokens or FILLING,
        "stop_ids": (*sampling.stop_ids, *(() if sampling.ignore_eos else model.eos_ids)),
    }
    return Contract(**terms | derived)


def _schema(text: str) -> Mapping[str, Any]:
    """Return the schema of an answer that may be calls instead. Raises InvalidRequest."""
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise InvalidRequest("grammar", f"cannot be read: {error}") from None
    if not isinstance(schema, dict):
        raise InvalidRequest("grammar", "must be a JSON schema that is an object, where the answer may call tools")
    return schema


def _given(message: inference_pb2.Sampling | inference_pb2.Acceptance) -> dict[str, Any]:
    """Return the terms of a contract that a message states; those that it leaves out have the contract's defaults."""
    described = message.DESCRIPTOR.fields_by_name
    return {
        name: getattr(message, name)
        for name in _TERMS.intersection(described)
        if not described[name].has_presence or message.HasField(name)
    }


def _stops(stops: Sequence[str]) -> tuple[str, ...]:
    if len(stops) > MAX_STOPS:
        raise InvalidRequest("stop", f"has {len(stops)} strings, must have at most {MAX_STOPS}")
    for index, stop in enumerate(stops):
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise InvalidRequest(f"stop[{index}]", f"has {len(stop)} characters, must have 1 to {MAX_STOP_CHARACTERS}")
    return tuple(stops)


def _policy(
    speculation: inference_pb2.Speculation, config: RouterConfig, priors: AcceptancePriors | None
) -> GammaPolicy:
    if speculation.depth > MAX_DEPTH:
        raise InvalidRequest("speculation.depth", f"is {speculation.depth}, must be 0 (the default) to {MAX_DEPTH}")
    return policy(speculation.policy or config.policy, ceilings(config, speculation.depth), priors)


def ceilings(config: RouterConfig, depth: int = 0) -> Plan:
    """Return the router's ceilings; a `depth` other than 0 replaces the router's."""
    return Plan(
        depth=depth or config.depth,
        width=config.width,
        nodes=config.nodes,
        wait_us=config.wait_us,
        overlap=OVERLAP[config.overlap],
    )


def _fingerprint(request: inference_pb2.GenerateRequest) -> bytes:
    """Return a digest of the request's content, without what does not change the response."""
    content = inference_pb2.GenerateRequest()
    content.CopyFrom(request)
    content.idempotency_key = ""
    content.priority = inference_pb2.PRIORITY_UNSPECIFIED
    content.ClearField("route")
    content.broke_off = False
    return hashlib.sha256(content.SerializeToString(deterministic=True)).digest()
