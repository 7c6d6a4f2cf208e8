"""Strategies for frames: broken in every field, yet close enough to the truth to get past the first check."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from outrider.v1 import drafter_pb2, inference_pb2, types_pb2, verifier_pb2
from tests.hostile.rig import PROMPT, VOCABULARY

small = st.integers(0, 6)
unsigned = st.one_of(small, st.integers(0, 2**32 - 1))
huge = st.one_of(small, st.integers(0, 2**64 - 1))
names = st.one_of(st.sampled_from(["s", "t", ""]), st.text(max_size=8))
tokens = st.one_of(st.integers(0, VOCABULARY - 1), st.integers(0, 2**32 - 1))
floats = st.floats(width=32)


def messages(kind: Any, /, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Messages of a kind with any of its fields absent."""
    return st.fixed_dictionaries({}, optional=fields).map(lambda chosen: kind(**chosen))


plans = messages(
    types_pb2.Plan,
    version=huge,
    depth=unsigned,
    width=unsigned,
    nodes=unsigned,
    wait_us=unsigned,
    overlap=st.integers(-1, 4),
)
contracts = messages(
    types_pb2.Contract,
    seed=huge,
    choice=unsigned,
    temperature=st.floats(),
    top_k=unsigned,
    top_p=st.floats(),
    rule=st.sampled_from(["shared-noise", "recursive-rejection", "block-verification", "typical-acceptance", "", "x"]),
    lenience=st.floats(),
    typical_epsilon=st.floats(),
    typical_delta=st.floats(),
    max_tokens=unsigned,
    min_p=st.floats(),
    repetition_penalty=st.floats(),
    presence_penalty=st.floats(),
    frequency_penalty=st.floats(),
    logit_bias=st.dictionaries(tokens, st.floats(), max_size=3),
    allowed_ids=st.lists(tokens, max_size=3),
    banned_ids=st.lists(tokens, max_size=3),
    min_tokens=unsigned,
    stop_ids=st.lists(tokens, max_size=3),
    logprobs=unsigned,
)
heartbeats = messages(types_pb2.Heartbeat, steps=huge, running_ms=st.one_of(small, st.just(0)))


drawn_rows = messages(
    drafter_pb2.DrawnFrom, tokens=st.lists(small, max_size=4), weights=st.lists(st.integers(0, 70000), max_size=4)
)


@st.composite
def deltas(draw: st.DrawFn) -> drafter_pb2.TreeDelta:
    count = draw(st.integers(0, 12))
    honest = draw(st.booleans())
    several = st.lists(unsigned, min_size=count, max_size=count)
    return drafter_pb2.TreeDelta(
        attachment=draw(small),
        epoch=draw(st.one_of(st.just(1), huge)),
        root_position=draw(st.one_of(st.integers(0, 12), huge)),
        root_digest=draw(st.one_of(st.sampled_from(TRUE_DIGESTS), huge)),
        first_id=draw(st.one_of(st.integers(0, 60), huge)),
        parents=draw(st.lists(small, min_size=count, max_size=count) if honest else several),
        tokens=draw(st.lists(st.integers(0, VOCABULARY - 1) if honest else tokens, min_size=count, max_size=count)),
        edges=draw(st.binary(min_size=count, max_size=count) if honest else st.binary(max_size=15)),
        plan_version=draw(huge),
        exhausted=draw(st.booleans()),
        drawn=draw(st.lists(drawn_rows, max_size=3)),
        origin=draw(names),
        rescored=(rescored := draw(st.lists(st.one_of(small, huge), max_size=6))),
        rescored_edges=draw(st.binary(max_size=6)) if not honest else bytes(len(rescored)),
        rescore_version=draw(st.one_of(small, huge)),
    )


TRUE_DIGESTS = [0]  # the test puts those of the session's tokens here


def draft_frames(tickets: st.SearchStrategy[bytes]) -> st.SearchStrategy[drafter_pb2.DraftUp]:
    """What a drafter may send. `small` attachments make replays and unknown ones frequent."""
    subscribes = messages(
        drafter_pb2.Subscribe,
        session_id=names,
        epoch=st.one_of(st.just(1), huge),
        attachment=small,
        ticket=tickets,
        features=st.binary(max_size=20),
    )
    return st.one_of(
        deltas().map(lambda delta: drafter_pb2.DraftUp(delta=delta)),
        st.lists(deltas(), max_size=3).map(lambda several: drafter_pb2.DraftUp(deltas=several)),
        subscribes.map(lambda subscribe: drafter_pb2.DraftUp(subscribe=subscribe)),
        messages(drafter_pb2.Unsubscribe, attachment=small).map(lambda frame: drafter_pb2.DraftUp(unsubscribe=frame)),
        heartbeats.map(lambda heartbeat: drafter_pb2.DraftUp(heartbeat=heartbeat)),
    )


handles = st.one_of(st.just(1), st.just(1), small)
decode_commands = st.one_of(
    messages(
        verifier_pb2.DecodeRequest,
        plans=st.lists(messages(verifier_pb2.PlanChange, handle=handles, plan=plans), max_size=2),
        acknowledged=st.lists(handles, max_size=2),
        durable=st.lists(st.one_of(huge, st.integers(0, 8)), max_size=2),
        cancelled=st.lists(handles, max_size=2),
    ),
    st.one_of(huge, st.integers(0, 8)).map(
        lambda position: verifier_pb2.DecodeRequest(acknowledged=[1], durable=[position])
    ),
    st.just(verifier_pb2.DecodeRequest()),
)


def upstream_frames(attachment: int, width: int) -> st.SearchStrategy[drafter_pb2.DraftDown]:
    """What an upstream may send to a drafter that subscribed as `attachment`, for features of that width if any."""
    features = st.one_of(st.just(b""), st.integers(0, 10).map(lambda rows: bytes(2 * width * rows)), st.binary())
    which = st.one_of(st.just(attachment), small)
    epochs = st.one_of(st.just(1), huge)
    positions = st.one_of(st.integers(0, 12), huge)
    committed = st.lists(st.one_of(st.integers(0, VOCABULARY - 1), tokens), max_size=10)
    snapshots = messages(
        drafter_pb2.Snapshot,
        attachment=which,
        epoch=epochs,
        position=positions,
        tokens=committed,
        last=st.booleans(),
        digest=st.one_of(st.sampled_from(TRUE_DIGESTS), huge),
        contract=contracts,
        plan=plans,
        credit=huge,
        min_path_score=floats,
        answer_position=positions,
        features=features,
    )
    commits = messages(
        drafter_pb2.Commit,
        attachment=which,
        epoch=epochs,
        position=positions,
        tokens=committed,
        digest=st.one_of(st.sampled_from(TRUE_DIGESTS), huge),
        plan=plans,
        min_path_score=floats,
        credit=huge,
        dropped=st.lists(huge, max_size=5),
        features=features,
    )
    hints = messages(
        drafter_pb2.Hints,
        attachment=which,
        epoch=epochs,
        root_position=positions,
        parents=st.lists(st.one_of(st.integers(0, 3), huge.map(lambda number: number % 2**32)), max_size=6),
        tokens=committed,
        edges=st.binary(max_size=6),
    )
    return st.one_of(
        hints.map(lambda frame: drafter_pb2.DraftDown(hints=frame)),
        snapshots.map(lambda frame: drafter_pb2.DraftDown(snapshot=frame)),
        commits.map(lambda frame: drafter_pb2.DraftDown(commit=frame)),
        st.lists(commits, max_size=3).map(lambda frames: drafter_pb2.DraftDown(commits=frames)),
        messages(drafter_pb2.Closed, attachment=small, reason=names).map(
            lambda frame: drafter_pb2.DraftDown(closed=frame)
        ),
        heartbeats.map(lambda heartbeat: drafter_pb2.DraftDown(heartbeat=heartbeat)),
        st.just(drafter_pb2.DraftDown()),
    )


samplings = messages(
    inference_pb2.Sampling,
    seed=huge,
    choice=unsigned,
    temperature=st.floats(),
    top_k=unsigned,
    top_p=st.floats(),
    max_tokens=st.one_of(small, unsigned),
    stop=st.lists(st.text(max_size=4), max_size=3),
    ignore_eos=st.booleans(),
    logprobs=unsigned,
)
generate_requests = st.one_of(
    messages(
        inference_pb2.GenerateRequest,
        model=names,
        text=st.text(max_size=20),
        sampling=samplings,
        speculation=messages(inference_pb2.Speculation, policy=names, depth=unsigned),
        session_id=st.one_of(st.just(""), names),
        whole_history=st.booleans(),
        idempotency_key=st.one_of(st.just(""), st.text(max_size=200)),
    ),
    messages(
        inference_pb2.GenerateRequest,
        token_ids=messages(
            inference_pb2.TokenIds, ids=st.lists(tokens, max_size=6), tokenizer_digest=st.binary(max_size=3)
        ),
        sampling=samplings,
    ),
)
resume_requests = messages(
    inference_pb2.ResumeRequest, session_id=names, generation=unsigned, next_position=huge, text_offset=huge
)

answers_requests = st.one_of(small, small).flatmap(
    lambda count: messages(
        inference_pb2.AnswersRequest,
        stream=st.one_of(st.just(b""), st.binary(max_size=20)),
        handles=st.lists(small, min_size=count, max_size=count),
        taken=st.lists(huge, max_size=6) if count == 6 else st.lists(huge, min_size=count, max_size=count),
    )
)

reports = messages(
    types_pb2.StepReport,
    verified=unsigned,
    accepted=unsigned,
    verified_depth=unsigned,
    forward_us=unsigned,
    elapsed_us=unsigned,
    plan_version=huge,
    ranks=st.binary(max_size=4),
)
decode_commits = st.one_of(st.integers(0, 3), st.just(0)).flatmap(
    lambda count: messages(
        verifier_pb2.DecodeCommit,
        handle=handles,
        epoch=st.one_of(st.just(1), st.just(1), huge),
        position=st.one_of(small, huge),
        tokens=st.lists(tokens, min_size=count, max_size=count),
        gaps=st.lists(floats, min_size=count, max_size=count),
        logprobs=st.binary(max_size=8),
        digest=huge,
        report=reports,
    )
)
reasons = st.sampled_from(types_pb2.FinishReason.values())
decode_errors = messages(
    types_pb2.Error,
    kind=st.one_of(st.sampled_from(["Moved", "Overloaded", "Unavailable", "InvalidRequest", "NotFound"]), names),
    details=names,
    field=names,
    retry_after_ms=unsigned,
)
decode_ends = st.one_of(
    messages(verifier_pb2.DecodeEnded, handle=handles, reason=reasons),
    messages(verifier_pb2.DecodeEnded, handle=handles, error=decode_errors),
    messages(verifier_pb2.DecodeEnded, handle=handles),
)
decode_responses = messages(
    verifier_pb2.DecodeResponse,
    heartbeat=heartbeats,
    started=st.lists(messages(verifier_pb2.DecodeStarted, handle=handles, cached=huge), max_size=2),
    commits=st.lists(decode_commits, max_size=3),
    ended=st.lists(decode_ends, max_size=2),
)

token_logprobs = messages(
    inference_pb2.TokenLogprobs,
    logprob=floats,
    top_ids=st.lists(tokens, max_size=3),
    top_logprobs=st.lists(floats, max_size=3),
)
chunks = messages(
    inference_pb2.Chunk,
    text=st.text(max_size=4),
    token_ids=st.lists(tokens, max_size=4),
    gaps=st.lists(floats, max_size=4),
    next_position=huge,
    text_offset=huge,
    logprobs=st.lists(token_logprobs, max_size=4),
)
generate_responses = st.one_of(
    messages(
        inference_pb2.Started, session_id=names, model=names, seed=huge, prompt_tokens=unsigned, generation=unsigned
    ).map(lambda started: inference_pb2.GenerateResponse(started=started)),
    chunks.map(lambda chunk: inference_pb2.GenerateResponse(chunk=chunk)),
    messages(
        inference_pb2.Finished, reason=reasons, usage=messages(inference_pb2.Usage, steps=unsigned, total_us=huge)
    ).map(lambda finished: inference_pb2.GenerateResponse(finished=finished)),
    st.just(inference_pb2.GenerateResponse()),
)

assert len(PROMPT) < 12  # so that positions drawn from 0 to 12 are often right
