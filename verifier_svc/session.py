"""One session on the verifier: committed tokens, the token tree that drafters grow, and the stream of commits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from outrider.core.control.cost.calibration import Calibration
from outrider.core.control.drafters.contributions import DrafterContribution
from outrider.core.control.drafting_terms import DraftingTerms
from outrider.core.control.holds.arrival_model import ArrivalPatterns, Arrivals
from outrider.core.sampling.grammar import GrammarState
from outrider.core.sampling.sampler import Choice, Sampler
from outrider.core.session.contract import Contract, Plan, StepReport
from outrider.core.session.decoding import SCORED_AHEAD, PromptScores
from outrider.core.session.digest import NOTHING, Prefix
from outrider.core.tree.delta import Delta
from outrider.core.tree.node import Node
from outrider.core.tree.sampled_tree import tree_of
from outrider.engine.kv.kv_slots import AcquiredSlot
from outrider.rpc.step_broadcast import StepBroadcast
from outrider.upstream.upstream_session import MAX_DRAFTERS, Subscription, UpstreamSession
from verifier_svc.commit_queue import CommitQueue, StepCommit
from verifier_svc.proposers.head_drafts import SENDER as HEADS
from verifier_svc.proposers.head_drafts import HeadDrafts
from verifier_svc.proposers.ngram_proposer import SENDER, NgramProposer
from verifier_svc.tracing import TracedSteps

FORCED = -2  # key in the tree of what a grammar forces
FORCED_EDGE = math.log(0.95)  # of a forced token: the target may divide the text into other tokens

TREE_CAPACITY = 512  # nodes that a session's tree may hold


@dataclass(frozen=True, slots=True)
class SessionStart:
    """A checked request to decode."""

    session_id: str
    tenant: str
    epoch: int
    tokens: Sequence[int]  # the session so far, prompt included; not empty
    answer_position: int  # where the contract's max_tokens counts from
    contract: Contract
    plan: Plan
    window: int  # tokens that may be committed beyond the durable position
    known: Prefix = NOTHING  # digest of a prefix of the tokens, computed outside the event loop's thread
    grammar: GrammarState | None = None  # of the contract, behind the tokens
    adapter: object | None = None  # of the contract, as the engine has loaded it
    scored: int | None = None  # first position whose log-probabilities are wanted, at least 1; None: of none

    @property
    def kv_scope(self) -> str:
        """Within what KV may be shared."""
        return self.contract.kv_scope(self.tenant)


class VerifierSession(UpstreamSession):
    """State of one session. Only the event loop's thread touches it."""

    terms: DraftingTerms

    def __init__(
        self,
        start: SessionStart,
        kv_slot: AcquiredSlot,
        vocabulary: int,
        patterns: ArrivalPatterns,
        ngram_proposer: NgramProposer | None = None,
        heads: HeadDrafts | None = None,
        *,
        unpadded_vocabulary: int | None = None,
    ) -> None:
        """`vocabulary`: ids that the target has; `unpadded_vocabulary`: it chooses only ids below it, if fewer."""
        super().__init__(start.contract, SENDER)
        self.id = start.session_id
        self.tenant = start.tenant
        self.kv_scope = start.kv_scope
        self.adapter = start.adapter
        self.epoch = start.epoch
        self.answer_position = start.answer_position
        self.vocabulary = vocabulary
        self.unpadded_vocabulary = vocabulary if unpadded_vocabulary is None else unpadded_vocabulary
        self.kv_slot = kv_slot
        self.tokens = list(start.tokens)
        self.cached = kv_slot.cached  # cache rows [0, cached) hold the KV of tokens[:cached]
        self.end = start.answer_position + start.contract.max_tokens  # the length at which it must stop
        self.tree = tree_of(start.contract, self.tokens, capacity=TREE_CAPACITY, known=start.known)
        self.sampler = Sampler(
            start.contract, self.unpadded_vocabulary, self.tokens, start.answer_position, grammar=start.grammar
        )
        self.arrivals = Arrivals(patterns)
        self.terms = DraftingTerms(start.plan, drawn=self.drawn)
        self.scored = start.answer_position if start.scored is None else start.scored  # the prompt's positions below
        self.commits = CommitQueue(self.scored if self.scoring else len(self.tokens), start.window)
        self.finished = False
        self.traced: TracedSteps | None = None  # set if the request is traced
        self.broadcast = StepBroadcast()
        self.ngram_proposer = ngram_proposer  # proposes without a model
        if ngram_proposer is not None:
            self._claims[SENDER] = ngram_proposer.calibration
        self._claims[FORCED] = Calibration()
        self._forced_id = 0  # of the last forced node
        self.heads = heads  # drafts with heads on the target
        if heads is not None:
            self._claims[HEADS] = heads.calibration

    @property
    def public_senders(self) -> set[int]:
        """Keys of the drafters and proposers whose nodes everybody may see, also those that are not accepted."""
        public = {it.sender for stream, it in self.subscriptions.items() if stream.public_sources} | {HEADS, FORCED}
        return public | {SENDER} if self.ngram_proposer is None or self.ngram_proposer.public else public

    @property
    def room(self) -> int:
        """Tokens that a step may commit now: up to the end, and to the window beyond the durable position."""
        return min(self.end, self.commits.limit) - len(self.tokens)

    @property
    def grammar(self) -> GrammarState | None:
        """The place in the contract's grammar behind the committed tokens."""
        return self.sampler.grammar

    @property
    def awaited_grammar(self) -> GrammarState | None:
        """The grammar, where a step would serve this session but for it, and it usually takes but a moment."""
        grammar = self.grammar
        if grammar is None or not grammar.pending or grammar.slow or self.finished or self.room <= 0 or self.scoring:
            return None
        return grammar

    @property
    def scoring(self) -> bool:
        """Whether log-probabilities of its prompt are still wanted."""
        return self.scored < self.answer_position

    def readable(self, rows: int) -> int:
        """Return how many tokens the next step may read, if it may compute log-probabilities from `rows` of their rows.

        A step that chooses a token computes none.
        """
        if not self.scoring:
            return self.unread
        return min(self.answer_position, self.commits.durable + SCORED_AHEAD, self.scored + rows) - 1 - self.cached

    @property
    def ready(self) -> bool:
        """Whether a step may serve this session now."""
        if self.scoring:
            return not self.finished and self.readable(1) > 0
        return not self.finished and self.room > 0 and not (self.grammar is not None and self.grammar.pending)

    @property
    def unread(self) -> int:
        """Tokens whose KV the next steps have to write."""
        return len(self.tokens) - self.cached

    @property
    def ceilings(self) -> Plan:
        """The plan, with the depth cut to what the generation can still use; nothing beside a slow grammar."""
        left = 0 if self.grammar is not None and self.grammar.slow else self.end - len(self.tokens) - 1
        plan = self.terms.plan
        return plan if plan.depth <= left else replace(plan, depth=max(0, left))

    @property
    def awaiting_depth(self) -> bool:
        """Whether the session's step waits for a deeper tree."""
        depth = self.ceilings.depth
        return self.terms.rounds and self.terms.committed_at > 0.0 and len([*islice(self.tree.levels(), depth)]) < depth

    def tree_value(self) -> float:
        """Return the expected tokens of a step that verifies the best nodes within the plan, less the cost."""
        plan, min_path_score = self.ceilings, self.terms.verified_min_path_score
        value = 1.0
        for score, _ in self.tree.best(plan.nodes, depth=plan.depth, width=plan.width):
            if score <= min_path_score:
                break
            value += score - min_path_score
        return value

    @property
    def free_nodes(self) -> int:
        """Nodes that the tree still has room for."""
        return TREE_CAPACITY - self.tree.size

    @property
    def max_drafters(self) -> int:
        """The most drafters that the session may have.

        A sampled tree has one: what two drafters have drawn together is a sample of neither's q.
        """
        return 1 if self.drawn else MAX_DRAFTERS

    def on_drafter_subscribed(self) -> None:
        """Has the arrival statistics take account of a drafter that reads first, unless another one drafts already."""
        if len(self.subscriptions) == 1:
            self.arrivals.start()

    def on_delta(
        self, subscription: Subscription, delta: Delta, added: Sequence[Node], now: float, *, passing: bool
    ) -> None:
        """Learns how much a delta is worth, and when it arrived."""
        if self.traced is not None:
            self.traced.on_delta(subscription.sender, delta, added)
        if added or delta.rescored:
            self.arrivals.arrived(now, self.tree_value(), passing=passing)

    @property
    def awaited(self) -> bool:
        """Whether drafters may still send nodes that a step could verify."""
        return self.drafting and not self.terms.resting and self.ceilings.depth > 0 and self.room > 1

    @property
    def proposes(self) -> bool:
        """Whether the verifier itself may propose nodes for the next step."""
        wanted = self.terms.plan.depth > 0 and (self.ngram_proposer is not None or self.heads is not None)
        return wanted or self.grammar is not None

    def propose_ngrams(self) -> None:
        """Feed the n-gram proposer new tokens and add its proposals to the tree, where the verifier has one."""
        if self.ngram_proposer is not None and self.terms.plan.depth and self.ngram_proposer.read(self.tokens):
            plan = self.ceilings
            self.ngram_proposer.grow(
                self.tree,
                nodes=plan.nodes,
                depth=plan.depth,
                width=plan.width,
                vocabulary=self.unpadded_vocabulary,
                min_path_score=self.terms.verified_min_path_score,
                grammar=self.grammar,
            )

    def propose_forced(self) -> None:
        """Add the tokens that the contract's grammar forces to the tree, as far as its plan goes."""
        grammar, plan = self.grammar, self.ceilings
        if grammar is None or grammar.pending or not plan.depth or self.drawn or self.scoring:
            return
        node = self.tree.root
        for token in grammar.forced()[: min(plan.depth, plan.nodes, self.room - 1)]:
            child = node.children.get(token)
            if child is None:
                if token >= self.unpadded_vocabulary or self.tree.size >= self.tree.capacity:
                    return
                child = self.tree.add(node, token, self._claims[FORCED].corrected(FORCED_EDGE))
                child.claim = FORCED, FORCED_EDGE
                self._forced_id += 1
                self.tree.ids.name(child, FORCED, self._forced_id)
            node = child

    def record_answer(self) -> None:
        """Give the finished answer to the n-gram proposer's store, for other sessions."""
        if self.ngram_proposer is not None:
            self.ngram_proposer.finish(self.tokens[self.answer_position :])

    def calibrate_verified(self, nodes: Sequence[Node], path: set[Node]) -> None:
        """Calibrates claimed scores of verified nodes whose parent is on the accepted path."""
        for node in nodes:
            if node.parent is self.tree.root or node.parent in path:
                self.calibrate((node,), node if node in path else None)

    def contributions(self, nodes: Sequence[Node], path: set[Node]) -> tuple[DrafterContribution, ...]:
        """Return what each drafter gave to a step that verified `nodes` and accepts `path`; empty for one drafter."""
        drafters = {stream.drafter_id: part.sender for stream, part in self.subscriptions.items()}
        drafters |= self.origins
        if len(drafters) < 2:
            return ()
        sent = Counter(sender for node in nodes for sender in self.tree.ids.origins(node))
        origins = [self.tree.ids.origins(node) for node in path]
        accepted = Counter(sender for senders in origins for sender in senders)
        alone = Counter(sender for senders in origins for sender in senders if len(senders) == 1)
        return tuple(
            DrafterContribution(drafter, sent[sender], accepted[sender], alone[sender])
            for drafter, sender in drafters.items()
        )

    def send_scores(self, scores: PromptScores) -> None:
        """Queue the log-probabilities of the prompt's next tokens for the router's stream."""
        self.scored += len(scores.ranks)
        self.commits.put_nowait(scores)

    def commit(
        self, choices: Sequence[Choice], report: StepReport, now: float, shares: tuple[DrafterContribution, ...] = ()
    ) -> StepCommit:
        """Append the chosen tokens, re-root the tree, and queue the commit for the router's stream."""
        tokens = [choice.token for choice in choices]
        self.tree.commit(tokens)
        position = len(self.tokens)
        self.tokens.extend(tokens)
        self.sampler.extend(tokens)
        self.terms.committed_at = now
        self.propose_ngrams()
        self.arrivals.restart(now, self.tree_value(), resting=self.terms.resting)
        self.finished = tokens[-1] in self.contract.stop_ids or len(self.tokens) >= self.end
        commit = StepCommit(position, list(choices), self.tree.digest, report, self.finished, shares)
        self.commits.put_nowait(commit)
        return commit


class PrefillSession(VerifierSession):
    """A text that is only prefilled, for a session elsewhere. It ends when all tokens but the last have KV."""

    @property
    def ready(self) -> bool:
        """Whether a step may serve this session now."""
        return not self.finished and self.unread > 0

    @property
    def unread(self) -> int:
        """Tokens whose KV the next steps have to write; the last token is left to the session that comes."""
        return super().unread - 1
