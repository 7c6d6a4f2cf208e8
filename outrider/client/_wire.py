"""Converts between the SDK's values and wire messages."""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar, Unpack

from google.protobuf.message import Message

from outrider.client._terms import calls_json, grammar_of, object_json, tools_of
from outrider.client._types import (
    Chunk,
    LogprobRows,
    Model,
    ModelAdapter,
    Session,
    StepNode,
    StepTree,
    TokenizedPrompt,
    Usage,
)
from outrider.core.session.contract import (
    DEFAULT_MAX_TOKENS,
    FILLING,
    Contract,
    FinishReason,
    PolicyName,
    Priority,
    RuleName,
)
from outrider.core.session.speculation_status import printable
from outrider.core.tree.score_codec import edge_from_code
from outrider.errors import InternalError, InvalidRequest
from outrider.v1 import inference_pb2 as pb
from outrider.v1 import types_pb2
from outrider.wire import inference, types

ResultT = TypeVar("ResultT")

_TERMS = Contract.names()

_PRIORITIES = {"interactive": pb.PRIORITY_INTERACTIVE, "batch": pb.PRIORITY_BATCH}


class Options(TypedDict, total=False):
    """The keywords of `generate` and `stream`; all are optional."""

    # For the chat template, and no prompt: {"role": "user", "content": "..."}, ... With "tool_calls" and
    # {"role": "tool", "tool_call_id": "...", "content": "..."} in OpenAI's form; "reasoning_content" of an answer.
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]  # with messages: functions that the answer may call, in OpenAI's form
    tool_choice: str | Mapping[str, Any]  # "auto" (the default), "none", "required", or a function in OpenAI's form
    parallel_tool_calls: bool  # whether an answer that has to make calls may make several; True
    template_variables: Mapping[
        str, Any
    ]  # with messages: for the chat template, for example {"enable_thinking": False}
    chat_template: str  # with messages: renders them instead of the model's own, in Jinja's language; "": the model's
    continue_final_message: bool  # with messages: the answer continues the last one instead of answering it; False
    add_generation_prompt: bool  # with messages: the prompt ends with what the template writes before an answer
    model: str  # its name; may be left out if the cluster serves one model
    temperature: float  # 0 (greedy) to 100; 1
    top_k: int  # keep the k most likely tokens; 0 (the default) keeps all
    top_p: float  # nucleus, above 0 and at most 1; 1
    min_p: float  # keep tokens with this share of the likeliest token's probability; 0 (the default) keeps all
    repetition_penalty: float  # above 1: tokens of the session, prompts included, become less likely; 1
    presence_penalty: float  # subtracted from the logits of tokens that the answer contains; 0
    frequency_penalty: float  # subtracted once for each time that the answer contains the token; 0
    logit_bias: Mapping[int, float]  # added to the logits of these token ids, -100 to 100
    allowed_ids: Sequence[int]  # the only token ids that may be generated; none (the default): all
    banned_ids: Sequence[int]  # token ids that may not be generated
    min_tokens: int  # length of the answer before a stop id or string can end it; 0
    seed: int | None  # 0 to 2**64 - 1; the router draws it when left out, and the result has it
    choice: int  # number of the sample, of several with one prompt and seed; 0
    max_tokens: int | None  # 128; None: as many as fit into the context after the prompt
    stop: str | Sequence[str]  # strings that end the text and are not part of it
    include_stop_str_in_output: bool  # the text includes the stop string that ended it, or a stop id's text; False
    skip_special_tokens: bool  # special tokens have no text in the answer; True
    stop_ids: Sequence[int]  # token ids that end the text, beside the model's end of text
    ignore_eos: bool  # continue after the model's end of text; False
    speculation: PolicyName | None  # changes the speed, never the text; None: the router's; only "rounds" never rests
    depth: int | None  # ceiling on gamma, 1 to 64; None takes the router's default
    rule: RuleName  # acceptance rule; "shared-noise". The last two are lossy: they change the text's distribution
    lenience: float  # of "lenient-speculative-sampling": above 0 and at most 1, which is lossless
    typical_epsilon: float  # of "typical-acceptance": 0.09
    typical_delta: float  # of "typical-acceptance": 0.3
    add_special_tokens: bool  # with a prompt of text: those that the tokenizer itself puts around it; True
    truncate_prompt_tokens: int | None  # keep the prompt's last tokens, at most this many; -1: leave room to answer
    return_prompt_token_ids: bool  # Generation.prompt_token_ids has the prompt's tokens; False
    tokenizer_digest: bytes  # with a prompt of token ids: refuse the request if the model's tokenizer differs
    schema: Any  # the answer is JSON of this schema: a mapping, or a pydantic model's class
    regex: str | None  # the answer as a whole matches this regular expression
    choices: Sequence[str] | None  # the answer is one of these
    grammar: str | None  # the answer follows this grammar, in Lark's form
    logprobs: int | None  # return each token's log-probability and those of this many likeliest tokens, 0 to 20
    prompt_logprobs: int | None  # of each token of the prompt, too; in a session of all before the answer
    session: str  # the session to continue with a turn; the prompt follows its tokens
    whole_history: bool  # the prompt is the whole conversation; where it differs, a new session forks off
    priority: Priority  # "interactive", or "batch": the request may wait while the cluster is full
    idempotency_key: str  # a repeated request with this key gets the first one's answer; random if left out


def request_to_pb(prompt: str | Sequence[int] | None, **options: Unpack[Options]) -> pb.GenerateRequest:
    """Return the request. Raises InvalidRequest for values that cannot be encoded; the router checks the rest."""
    if unknown := options.keys() - Options.__annotations__.keys():
        raise TypeError(f"there is no option {min(unknown)!r}; see outrider.Options")
    max_tokens, seed, depth = options.get("max_tokens", DEFAULT_MAX_TOKENS), options.get("seed"), options.get("depth")
    priority, stop = options.get("priority", "interactive"), options.get("stop", ())
    terms: dict[str, Any] = {name: value for name, value in options.items() if name in _TERMS and value is not None}
    grammar = terms["grammar"] = grammar_of(options)
    checked = Contract(**terms | {"seed": seed or 0, "max_tokens": FILLING if max_tokens is None else max_tokens})
    checked.check_vocabulary(2**32)
    if priority not in _PRIORITIES:
        raise InvalidRequest("priority", f"is {priority!r}, must be one of: {', '.join(_PRIORITIES)}")
    continued = options.get("continue_final_message", False)
    if continued and options.get("add_generation_prompt"):
        raise InvalidRequest("continue_final_message", "continues a message, and add_generation_prompt begins another")
    if max_tokens is not None and max_tokens >= FILLING:
        raise InvalidRequest("max_tokens", f"is {max_tokens}, more than any model's context")
    if depth is not None and not 1 <= depth <= 64:
        raise InvalidRequest("depth", f"is {depth}, must be 1 to 64; speculation='off' turns it off")
    sampling = {name: getattr(checked, name) for name in _TERMS.intersection(pb.Sampling.DESCRIPTOR.fields_by_name)}
    request = pb.GenerateRequest(
        model=encodable("model", options.get("model", "")),
        sampling=pb.Sampling(
            **sampling
            | {
                "seed": seed,
                "max_tokens": max_tokens or 0,
                "logit_bias": dict(checked.logit_bias),
                "stop": [encodable("stop", text) for text in ([stop] if isinstance(stop, str) else stop)],
                "ignore_eos": options.get("ignore_eos", False),
                "grammar": None if grammar is None else types_pb2.Grammar(kind=grammar.kind, text=grammar.text),
            }
        ),
        speculation=pb.Speculation(policy=options.get("speculation") or "", depth=depth or 0),
        acceptance=pb.Acceptance(**{name: getattr(checked, name) for name in pb.Acceptance.DESCRIPTOR.fields_by_name}),
        session_id=encodable("session", options.get("session", "")),
        whole_history=options.get("whole_history", False),
        priority=_PRIORITIES[priority],
        continue_final_message=continued,
        include_stop=options.get("include_stop_str_in_output", False),
        show_special_tokens=not options.get("skip_special_tokens", True),
        omit_special_tokens=not options.get("add_special_tokens", True),
        truncate_prompt_tokens=_truncation(options.get("truncate_prompt_tokens")),
        return_prompt=options.get("return_prompt_token_ids", False),
        omit_generation_prompt=not options.get("add_generation_prompt", not continued) and not continued,
        chat_template=encodable("chat_template", options.get("chat_template", "")),
        idempotency_key=encodable("idempotency_key", options.get("idempotency_key", "")) or random_key(),
    )
    request.messages.extend(_message(index, message) for index, message in enumerate(options.get("messages", ())))
    if variables := options.get("template_variables"):
        request.template_variables = object_json("template_variables", variables)
    if (tools := tools_of(options)) is not None:
        request.tools.CopyFrom(tools)
    if prompt is None:
        return request
    if isinstance(prompt, str):
        request.text = encodable("prompt", prompt)
    else:
        request.token_ids.CopyFrom(token_ids("prompt", prompt, options.get("tokenizer_digest", b"")))
    return request


def _truncation(tokens: int | None) -> int:
    if tokens == -1:
        return FILLING
    if tokens is not None and not 1 <= tokens < FILLING:
        raise InvalidRequest("truncate_prompt_tokens", f"is {tokens}, must be at least 1 token, or -1")
    return tokens or 0


def resume_to_pb(session: str, generation: int, next_position: int, text_offset: int) -> pb.ResumeRequest:
    """Return the request message. Raises InvalidRequest for values that cannot be encoded."""
    for field, value, bits in (
        ("generation", generation, 32),
        ("next_position", next_position, 64),
        ("text_offset", text_offset, 64),
    ):
        if not 0 <= value < 2**bits:
            raise InvalidRequest(field, f"is {value}, must be from 0 to 2**{bits} - 1")
    return pb.ResumeRequest(
        session_id=encodable("session", session),
        generation=generation,
        next_position=next_position,
        text_offset=text_offset,
    )


def random_key() -> str:
    """Return an idempotency key that no other request has."""
    return secrets.token_hex(16)


def encodable(field: str, text: str) -> str:
    """Return the text. Raises InvalidRequest when it cannot be encoded in UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, f"is not valid Unicode: {error.reason} at {error.start}") from None
    return text


def _message(index: int, message: Any) -> pb.Message:
    field, texts = f"messages[{index}]", ("role", "content", "tool_call_id", "reasoning_content")
    known = isinstance(message, Mapping) and {"role", "content"} <= set(message) <= {*texts, "tool_calls"}
    if not known or not all(isinstance(message.get(name, ""), str) for name in texts):
        raise InvalidRequest(
            field,
            'must be {"role": "...", "content": "..."}, both text, with "tool_calls", "tool_call_id" or '
            '"reasoning_content" at most',
        )
    given = {name: encodable(f"{field}.{name}", message[name]) for name in texts if name in message}
    return pb.Message(**given, tool_calls=calls_json(f"{field}.tool_calls", message.get("tool_calls")))


def token_ids(field: str, ids: Sequence[int], tokenizer_digest: bytes = b"") -> pb.TokenIds:
    """Return the message of token ids. Raises InvalidRequest for what is none."""
    try:
        return pb.TokenIds(ids=ids, tokenizer_digest=tokenizer_digest)
    except ValueError:
        raise InvalidRequest(field, "token ids must be from 0 to the vocabulary's size - 1") from None


def chunk_from_pb(message: pb.Chunk) -> Chunk:
    """Return the chunk of a message. Raises InternalError when the lengths of its lists do not match."""
    count = len(message.token_ids)
    uneven = any(
        len(entry.top_ids) != len(entry.top_logprobs) or len(entry.top_texts) not in (0, len(entry.top_ids))
        for entry in itertools.chain(message.logprobs, message.prompt_logprobs)
    )
    if uneven or len(message.gaps) not in (0, count) or len(message.logprobs) not in (0, count):
        raise InternalError(f"the router sent a malformed chunk of {count} tokens")
    if count and message.prompt_logprobs:
        raise InternalError("the router sent a chunk with tokens of both prompt and answer")
    for entry, token in zip(message.logprobs, message.token_ids, strict=False):
        entry.id = token
    return Chunk(
        text=message.text,
        token_ids=tuple(message.token_ids),
        gaps=tuple(message.gaps) or (math.nan,) * count,  # the token log does not store gaps
        next_position=message.next_position,
        text_offset=message.text_offset,
        logprobs=LogprobRows(entry.SerializeToString() for entry in message.logprobs),
        prompt_logprobs=LogprobRows(entry.SerializeToString() for entry in message.prompt_logprobs),
    )


def reason_from_pb(reason: int) -> FinishReason:
    """Return the finish reason of a wire value. Raises InternalError for a value that this version does not know."""
    try:
        return types.reason_from_pb(reason)
    except ValueError:
        raise InternalError(f"the router gave the unknown finish reason {reason}; update this client") from None


def usage_from_pb(message: pb.Usage) -> Usage:
    """Return the usage of a message, with durations in seconds."""
    return _same_fields(
        Usage,
        message,
        reached_by_depth=tuple(message.reached_by_depth),
        tried_by_depth=tuple(message.tried_by_depth),
        first_token_s=message.first_token_us / 1e6,
        total_s=message.total_us / 1e6,
        decode_s=message.decode_us / 1e6,
        speculation=inference.speculation_from_pb(message.speculation),
    )


def session_from_pb(message: pb.Session) -> Session:
    """Return the session of a message."""
    reason = reason_from_pb(message.reason) if message.reason else None
    return _same_fields(Session, message, finish_reason=reason, drafters=tuple(message.drafters))


def step_tree_from_pb(message: types_pb2.StepTree) -> StepTree:
    """Return the step of a message. Raises InternalError when the lengths of its lists do not match."""
    count, accepted, drafters = len(message.tokens), set(message.accepted), ["", *message.drafters]
    lengths = {len(message.parents), len(message.edges), len(message.senders), len(message.texts)}
    if lengths - {count} or max(message.senders, default=0) >= len(drafters):
        raise InternalError(f"the router sent a malformed step of {count} nodes")
    return StepTree(
        position=message.position,
        committed=tuple(message.committed),
        texts=tuple(message.committed_texts),
        nodes=tuple(
            StepNode(token, text, parent - 1, math.exp(edge_from_code(edge)), at in accepted, drafters[sender])
            for at, (token, text, parent, edge, sender) in enumerate(
                zip(message.tokens, message.texts, message.parents, message.edges, message.senders, strict=True)
            )
        ),
        left_out=message.left_out,
        hidden=message.hidden,
        forward_s=message.report.forward_us / 1e6,
        waited_s=message.report.waited_us / 1e6,
        depth=message.plan.depth,
        width=message.plan.width,
        missed=message.missed,
    )


def model_from_pb(message: pb.Model) -> Model:
    """Return the model of a message."""
    adapters = tuple(map(adapter_from_pb, message.adapters))
    return _same_fields(Model, message, misfits=tuple(map(printable, message.misfits)), adapters=adapters)


def tokenized_from_pb(message: pb.TokenizeResponse) -> TokenizedPrompt:
    """Return the tokens of a prompt."""
    return _same_fields(TokenizedPrompt, message, ids=tuple(message.ids), names=tuple(message.names))


def adapter_from_pb(message: pb.ModelAdapter) -> ModelAdapter:
    """Return the adapter of a message."""
    return _same_fields(ModelAdapter, message)


def _same_fields(kind: Callable[..., ResultT], message: Message, **others: Any) -> ResultT:
    """Return a result whose fields are those of the same names in a message, but for `others`."""
    names = kind.__annotations__.keys() - others.keys()
    return kind(**{name: getattr(message, name) for name in names}, **others)
