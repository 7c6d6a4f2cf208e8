"""Messages of types.proto, which all services share, and what they stand for: contract, plan, report of a step.

What a peer sent is checked in the modules of this package, and only here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter

from outrider.core.session.contract import Adapter, Contract, FinishReason, Grammar, Plan, StepReport
from outrider.errors import InvalidRequest
from outrider.v1 import types_pb2 as pb

# What others handle as it is.
Heartbeat = pb.Heartbeat
StepTree = pb.StepTree

MAX_DELTA_NODES = 1024
_REASON = "FINISH_REASON_"


def field_names(kind: type[Contract | Plan | StepReport]) -> tuple[str, ...]:
    """Return the fields of a value, which are also those of its message."""
    return tuple(field.name for field in fields(kind))


_CONTRACT, _PLAN, _REPORT = field_names(Contract), field_names(Plan), field_names(StepReport)
_OPTIONAL = ("logprobs", "prompt_logprobs")  # numbers of a contract that may be absent
_figures = attrgetter(*_REPORT)  # of a report's message, in the order of the fields


def reason_to_pb(reason: FinishReason) -> str:
    """Return the name of the value for the reason for which an answer ended."""
    return _REASON + reason.name


def reason_from_pb(value: int) -> FinishReason:
    """Return the reason. Raises ValueError for a value that this version does not know."""
    return FinishReason(pb.FinishReason.Name(value).removeprefix(_REASON).lower())


def contract_to_pb(contract: Contract) -> pb.Contract:
    """Return the contract's message."""
    values = {name: getattr(contract, name) for name in _CONTRACT}
    messages = {"grammar": grammar_to_pb(contract.grammar), "adapter": adapter_to_pb(contract.adapter)}
    return pb.Contract(**values | {"logit_bias": dict(contract.logit_bias)} | messages)


def contract_from_pb(message: pb.Contract) -> Contract:
    """Return the contract. Raises InvalidRequest naming the field that is out of range."""
    values = {name: getattr(message, name) for name in _CONTRACT}
    wanted = {name: getattr(message, name) if message.HasField(name) else None for name in _OPTIONAL}
    grammar = grammar_from_pb(message.grammar) if message.HasField("grammar") else None
    adapter = adapter_from_pb(message.adapter) if message.HasField("adapter") else None
    return Contract(**values | wanted | {"grammar": grammar, "adapter": adapter})


def grammar_to_pb(grammar: Grammar | None) -> pb.Grammar | None:
    """Return a grammar's message."""
    if grammar is None:
        return None
    return pb.Grammar(kind=grammar.kind, text=grammar.text, reasoning=grammar.reasoning)


def grammar_from_pb(message: pb.Grammar) -> Grammar:
    """Return the grammar. Raises InvalidRequest."""
    return Grammar(message.kind, message.text, message.reasoning)


def adapter_to_pb(adapter: Adapter | None) -> pb.Adapter | None:
    """Return an adapter's message."""
    return None if adapter is None else pb.Adapter(folder=adapter.folder, digest=bytes.fromhex(adapter.digest))


def adapter_from_pb(message: pb.Adapter) -> Adapter:
    """Return the adapter. Raises InvalidRequest."""
    return Adapter(message.folder, message.digest.hex())


def plan_to_pb(plan: Plan) -> pb.Plan:
    """Return the plan's message."""
    return pb.Plan(**{name: getattr(plan, name) for name in _PLAN})


def plan_from_pb(message: pb.Plan) -> Plan:
    """Return the plan. Raises InvalidRequest naming the field that is out of range."""
    return Plan(**{name: getattr(message, name) for name in _PLAN})


def report_to_pb(report: StepReport) -> pb.StepReport:
    """Return the report's message."""
    return pb.StepReport(**{name: getattr(report, name) for name in _REPORT})


def report_from_pb(message: pb.StepReport) -> StepReport:
    """Return the report. Raises InvalidRequest for a step that is deeper than a tree can be."""
    if max(message.accepted, message.verified_depth) > MAX_DELTA_NODES:
        raise InvalidRequest("report", f"accepts {message.accepted} nodes, at most {MAX_DELTA_NODES} can be")
    return StepReport(*_figures(message))


def check_tokens(tokens: Sequence[int], vocabulary: int, field: str = "tokens") -> None:
    """Raise InvalidRequest unless every id is below `vocabulary`."""
    if tokens and max(tokens) >= vocabulary:
        raise InvalidRequest(field, f"token id {max(tokens)} is outside the vocabulary (0 to {vocabulary - 1})")
