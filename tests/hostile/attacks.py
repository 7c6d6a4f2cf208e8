"""What a hostile tenant, or a caller without a key, sends. Runs in a process of its own that yields to all others:

python -m tests.hostile.attacks  # a `Target` as JSON on stdin; on stdout a line when it begins, and an `Outcome`
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import shutil
import ssl
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from outrider.core.session.digest import tokenizer_digest
from outrider.v1 import drafter_pb2, types_pb2
from outrider.v1 import inference_pb2 as pb
from tests.hostile.lying_drafter import WANTED

MIB = 2**20
WRONG_KEY = "outrider_" + "x" * 43
SERVICE = "/outrider.v1.Inference"
HEALTH = "/grpc.health.v1.Health/Check"
DRAFT = "/outrider.v1.TreeSink/Draft"
NICE = 10  # a tenth of the share of a process with 0
CHANNELS = 10  # of one attack
CALL_S = 30.0  # deadline of a call
WATCHES = 10_240
CONNECTIONS = 1_000  # to the router, and to the gateway
LONG_PROMPT = 900  # tokens
CLAIM = "claim "  # with a number: an idempotency key of a request that is refused
DRAWN_RULE = "speculative-sampling"
MALLORY = {"ca": "ca.pem", "cert": "drafter-mallory.pem", "key": "drafter-mallory.key"}
EMPTY_MESSAGE = b"\x52\x00"  # an empty entry of GenerateRequest.messages
TO_THE_END = pb.Sampling(max_tokens=900, ignore_eos=True, logprobs=20)


@dataclass
class Target:
    """What is attacked, how and for how long."""

    attack: str
    seconds: float
    router: str
    other_router: str  # a router with another clock
    gateway: str
    verifier: str
    redis: str  # URL of a drafter's user
    certificates: str  # folder of the CA's certificate, and of the attacker's as a drafter
    key: str  # of the attacker's tenant
    sessions: list[str]  # of another tenant
    idempotency_key: str  # of another tenant
    adapter: str  # of another tenant
    adapters: str  # folder of the attacker's own adapters
    marks: list[str]  # texts of another tenant that would not be received by chance
    size: float = 1.0  # share of the callers


@dataclass
class Outcome:
    """What became of an attack's calls."""

    codes: dict[str, int] = field(default_factory=dict)  # calls by method and status
    begun: int = 0  # calls, those that did not end among them
    received: int = 0  # bytes
    leaks: list[str] = field(default_factory=list)  # what was received of another tenant
    processor_s: float = 0.0  # of the attacker's own process


class Attacker:
    """Makes calls, and looks for another tenant's texts in all that comes back."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.codes: Counter[str] = Counter()
        self.outcome = Outcome()
        self._marks = [mark.encode() for mark in target.marks]
        certificates = Path(target.certificates)
        self.ca = (certificates / "ca.pem").read_bytes()
        self.tls = ssl.create_default_context(cafile=certificates / "ca.pem")
        self._channels = [self.channel(target.router) for _ in range(CHANNELS)]
        self._others = [self.channel(target.other_router) for _ in range(CHANNELS)]
        self._turn = itertools.count()

    def channel(self, address: str, certificate: str | None = None) -> grpc.aio.Channel:
        """A connection of its own; with the name of a certificate, to a part of the cluster."""
        options: list[tuple[str, Any]] = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
        pair: tuple[bytes, ...] = ()
        if certificate is not None:
            folder = Path(self.target.certificates)
            pair = ((folder / f"{certificate}.key").read_bytes(), (folder / f"{certificate}.pem").read_bytes())
            options.append(("grpc.ssl_target_name_override", "verifier.outrider"))
        return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(self.ca, *pair), options)

    async def call(
        self,
        method: str,
        message: bytes,
        *,
        key: str | None = None,
        read: int | None = None,
        other: bool = False,
    ) -> list[bytes]:
        """Call a method of the router, or of the other one, and return its answers, or the first `read` of them."""
        path = method if method.startswith("/") else f"{SERVICE}/{method}"
        key = self.target.key if key is None else key
        channel = (self._others if other else self._channels)[next(self._turn) % CHANNELS]
        metadata = (("authorization", f"Bearer {key}"),)
        stream: Any = channel.unary_stream(path)(message, metadata=metadata, timeout=CALL_S)
        answers: list[bytes] = []
        self.outcome.begun += 1
        try:
            while read is None or len(answers) < read:
                answer = await stream.read()
                if answer is grpc.aio.EOF:
                    break
                self.receive(answer)
                answers.append(answer)
            self.codes[f"{method} OK"] += 1
        except grpc.aio.AioRpcError as error:
            self.receive((error.details() or "").encode())
            self.codes[f"{method} {error.code().name}"] += 1
        finally:
            stream.cancel()
        return answers

    async def stream(self, messages: Iterable[bytes], *, reads: bool, held_s: float) -> None:
        """Open a stream of answers, send the messages, and hold it; without reading, what is sent piles up here."""
        channel = self._channels[next(self._turn) % CHANNELS]
        metadata = (("authorization", f"Bearer {self.target.key}"),)
        stream: Any = channel.stream_stream(f"{SERVICE}/Answers")(metadata=metadata, timeout=CALL_S)
        self.outcome.begun += 1
        try:
            async with asyncio.timeout(held_s):
                for message in messages:
                    await stream.write(message)
                while reads and (answer := await stream.read()) is not grpc.aio.EOF:
                    self.receive(answer)
                await asyncio.sleep(held_s)
        except TimeoutError:
            self.codes["Answers held"] += 1
        except asyncio.InvalidStateError:  # it has ended, and there was more to send
            self.codes["Answers ended"] += 1
        except grpc.aio.AioRpcError as error:
            self.receive((error.details() or "").encode())
            self.codes[f"Answers {error.code().name}"] += 1
        finally:
            stream.cancel()

    async def post(
        self, body: bytes, *, key: str | None = None, pause_s: float = 0.0, path: str = "/v1/completions"
    ) -> None:
        """Post a completion to the gateway; with a pause, a byte at a time."""
        host, _, port = self.target.gateway.rpartition(":")
        key = self.target.key if key is None else key
        fields = ("host: x", f"authorization: Bearer {key}", "content-type: application/json", "connection: close")
        head = "\r\n".join((f"POST {path} HTTP/1.1", *fields, f"content-length: {len(body)}", "", ""))
        status = "broken off"
        self.outcome.begun += 1
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(host, int(port), ssl=self.tls)
            try:
                writer.write(head.encode())
                answer = asyncio.create_task(reader.read())
                try:
                    await self._send(writer, body, pause_s, answer)
                    async with asyncio.timeout(CALL_S):
                        received = await answer
                finally:
                    answer.cancel()
                self.receive(received)
                status = received[9:12].decode() or status
            except TimeoutError:
                status = "no answer"
            finally:
                writer.transport.abort()
        self.codes[f"POST {status}"] += 1

    async def _send(
        self, writer: asyncio.StreamWriter, body: bytes, pause_s: float, answer: asyncio.Task[bytes]
    ) -> None:
        """Send a body until the answer is there."""
        step = 1 if pause_s else 2**16
        with suppress(ConnectionError):
            for at in range(0, len(body), step):
                if answer.done():
                    return
                writer.write(body[at : at + step])
                await writer.drain()
                if pause_s:
                    await asyncio.wait([answer], timeout=pause_s)

    def receive(self, data: bytes) -> None:
        """Look at what came back."""
        self.outcome.received += len(data)
        self.outcome.leaks += [mark.decode() for mark in self._marks if mark in data]

    async def at_once(self, count: int, step: Callable[[int], Awaitable[object]]) -> None:
        """Repeat a step for ever, `count` of them at the same time. The step gets a number that is new each time."""
        numbers = itertools.count()

        async def repeat() -> None:
            while True:
                await step(next(numbers))
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as group:
            for _ in range(max(1, round(count * self.target.size))):
                group.create_task(repeat())
                await asyncio.sleep(0)  # the attack may end before all have begun


Attack = Callable[[Attacker], Awaitable[object]]


def request(text: str = "", **sampling: Any) -> bytes:
    """A GenerateRequest."""
    return pb.GenerateRequest(text=text, sampling=pb.Sampling(**sampling)).SerializeToString()


def nulls(size: int) -> bytes:
    """A body whose prompt is a list of nulls."""
    return b'{"model":"target","prompt":[' + b"null," * (size // 5) + b"null]}"


async def _gateway_without_key(attacker: Attacker) -> None:
    body = nulls(4 * MIB - 64)
    await asyncio.gather(
        attacker.at_once(40, lambda _: attacker.post(body, key=WRONG_KEY)),
        attacker.at_once(40, lambda number: attacker.post(body, key=f"outrider_{number}", pause_s=0.5)),
    )


async def _gateway_bodies(attacker: Attacker) -> None:
    bodies = nulls(4 * MIB - 64), nulls(MIB // 16 - 64)
    prompts = json.dumps({"model": "target", "prompt": ["x " * 500] * 64, "n": 128, "max_tokens": 900}).encode()
    copies = json.dumps({"model": "target", "prompt": "x " * 30_000, "n": 128, "max_tokens": 900}).encode()
    await asyncio.gather(
        attacker.at_once(40, lambda number: attacker.post(bodies[number % 2])),
        attacker.at_once(40, lambda _: attacker.post(bodies[1], pause_s=0.5)),
        attacker.at_once(20, lambda number: attacker.post((prompts, copies)[number % 2])),
    )


async def _gateway_json(attacker: Attacker) -> None:
    """Bodies of which a parser would make a hundred times their bytes, or none because its stack ends."""
    deep = '{"a":' * 150 + "1" + "}" * 150
    tool = f'{{"type":"function","function":{{"name":"f","parameters":{deep}}}}}'
    chat = '{"model":"target","messages":[{"role":"user","content":"x"}],'
    made = [
        chat + '"tools":[' + ",".join([tool] * (4 * MIB // len(tool) - 1)) + "]}",
        chat + '"metadata":{' + ",".join(['"":0'] * (MIB // 6)) + "}}",
        chat + '"guided_json":' + "[" * 20_000 + "]" * 20_000 + "}",
        chat + '"chat_template_kwargs":' + "[" * MIB,
        chat + '"tools":[' + ",".join(["{}"] * 4096) + "]}",
    ]
    bodies = [text[: 4 * MIB].encode() for text in made] + [text[: MIB // 16 - 64].encode() for text in made]
    await attacker.at_once(40, lambda number: attacker.post(bodies[number % len(bodies)], path="/v1/chat/completions"))


async def _gateway_answers(attacker: Attacker) -> None:
    """Many answers with all log-probabilities, complete and streamed."""
    asked = {"model": "target", "prompt": "x", "max_tokens": 900, "logprobs": 20}
    bodies = [json.dumps({**asked, "n": n, "stream": stream}).encode() for n in (8, 128) for stream in (False, True)]
    await attacker.at_once(20, lambda number: attacker.post(bodies[number % len(bodies)]))


async def _router_without_key(attacker: Attacker) -> None:
    message = EMPTY_MESSAGE * (8 * MIB)
    await asyncio.gather(
        attacker.at_once(40, lambda _: attacker.call("Generate", message, key=WRONG_KEY)),
        attacker.at_once(10, lambda number: attacker.call("CreateSession", b"", key=f"outrider_{number}")),
        attacker.at_once(10, lambda _: attacker.call(HEALTH, message[: 4 * MIB], key="")),
    )


async def _connections(attacker: Attacker) -> None:
    """Connections on which nothing is sent, half of them not even a handshake; those that are closed are opened
    anew."""

    async def connect(address: str, number: int) -> None:
        host, _, port = address.rpartition(":")
        attacker.outcome.begun += 1
        try:
            reader, writer = await asyncio.open_connection(
                host,
                int(port),
                ssl=attacker.tls if number % 2 else None,
                ssl_handshake_timeout=CALL_S if number % 2 else None,
            )
        except OSError:
            attacker.codes["connection refused"] += 1
            await asyncio.sleep(0.1)
            return
        attacker.codes["connection"] += 1
        try:
            while data := await reader.read(2**16):
                attacker.receive(data)
        except ConnectionError:
            pass
        finally:
            writer.transport.abort()

    await asyncio.gather(
        attacker.at_once(CONNECTIONS, lambda number: connect(attacker.target.router, number)),
        attacker.at_once(CONNECTIONS, lambda number: connect(attacker.target.gateway, number)),
    )


async def _handshakes(attacker: Attacker) -> None:
    """Connections that agree on TLS and close, to every server."""
    target = attacker.target
    context = ssl.create_default_context(cafile=Path(target.certificates) / "ca.pem")
    context.set_alpn_protocols(["h2"])
    servers = ((target.router, None), (target.gateway, None), (target.verifier, "verifier.outrider"))

    async def shake(number: int) -> None:
        address, name = servers[number % len(servers)]
        host, _, port = address.rpartition(":")
        attacker.outcome.begun += 1
        with suppress(OSError):
            _, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname=name or host)
            attacker.codes["handshake"] += 1
            writer.transport.abort()

    await attacker.at_once(80, shake)


async def _invalid_requests(attacker: Attacker) -> None:
    messages = (
        EMPTY_MESSAGE * (8 * MIB),
        EMPTY_MESSAGE * (MIB // 32),
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * (MIB // 16 - 64))).SerializeToString(),
        b"\xff" * (MIB // 16),
    )
    await attacker.at_once(40, lambda number: attacker.call("Generate", messages[number % len(messages)]))


async def _templates(attacker: Attacker) -> None:
    """Conversations on which the template of the test's model works for about as long as it may."""

    def conversation(number: int) -> bytes:
        messages = [pb.Message(role="user", content=str(300 * (1 + number % 10)))]
        return pb.GenerateRequest(messages=messages, sampling=pb.Sampling(max_tokens=1)).SerializeToString()

    await attacker.at_once(100, lambda number: attacker.call("Generate", conversation(number)))


async def _callers_templates(attacker: Attacker) -> None:
    """Templates of the caller's own that take all of their time or memory, nest, write much, or are long."""
    templates = (
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{{ 7 ** (7 ** 10) }}",
        "{% set ns = namespace(x='a') %}{% for _ in range(99) %}{% set ns.x = ns.x * 9 %}{% endfor %}",
        "{% for i in range(100000) %}{{ 'a' * 40 }}{% endfor %}",
        "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
        "{{ " + "[" * 30_000 + "]" * 30_000 + " }}",
        "{{ a }}" * 9000,
        "x" * (MIB // 16 - 64),
    )
    user = pb.Message(role="user", content="x")
    sampling = pb.Sampling(max_tokens=1)
    calls = [
        pb.GenerateRequest(messages=[user], chat_template=each, sampling=sampling).SerializeToString()
        for each in templates
    ]
    await attacker.at_once(100, lambda number: attacker.call("Generate", calls[number % len(calls)]))


async def _texts(attacker: Attacker) -> None:
    texts = [request("def f(x): return x\n" * (size // 20), max_tokens=1) for size in (4 * MIB, MIB // 16)]
    await attacker.at_once(40, lambda number: attacker.call("Generate", texts[number % 2]))


async def _rates(attacker: Attacker) -> None:
    one = request("x", max_tokens=1)
    await asyncio.gather(
        attacker.at_once(40, lambda _: attacker.call("ListModels", b"")),
        attacker.at_once(40, lambda _: attacker.call("CheckKey", b"")),
        attacker.at_once(40, lambda _: attacker.call("Generate", one)),
    )


async def _watches(attacker: Attacker) -> None:
    """Watches of one session of its own, which decodes."""
    session = await _own_session(attacker)
    watch = pb.WatchSessionRequest(session_id=session).SerializeToString()
    turn = pb.GenerateRequest(text="x", session_id=session, sampling=TO_THE_END).SerializeToString()
    await asyncio.gather(
        attacker.at_once(1, lambda _: attacker.call("Generate", turn)),
        attacker.at_once(WATCHES, lambda _: attacker.call("Watch", watch)),
    )


async def _spying(attacker: Attacker) -> None:
    """All that can be called with another tenant's session. A call that is answered is a leak."""
    target = attacker.target
    calls: list[tuple[str, Any]] = []
    for name in target.sessions:
        calls += [
            ("Watch", pb.WatchSessionRequest(session_id=name)),
            ("GetSession", pb.GetSessionRequest(session_id=name)),
            ("Resume", pb.ResumeRequest(session_id=name)),
            ("Generate", pb.GenerateRequest(text="x", session_id=name, sampling=pb.Sampling(max_tokens=1))),
            ("Cancel", pb.CancelRequest(session_id=name)),
            ("CloseSession", pb.CloseSessionRequest(session_id=name)),
        ]

    async def spy(number: int) -> None:
        method, message = calls[number % len(calls)]
        answers = await attacker.call(method, message.SerializeToString())
        if any(answers) or (answers and method not in ("Cancel", "CloseSession")):  # these answer with nothing
            attacker.outcome.leaks.append(f"{method} was answered")

    repeated = pb.GenerateRequest(
        text="x", idempotency_key=target.idempotency_key, sampling=pb.Sampling(max_tokens=1)
    ).SerializeToString()
    await asyncio.gather(attacker.at_once(20, spy), attacker.at_once(1, lambda _: attacker.call("Generate", repeated)))


async def _storage(attacker: Attacker) -> None:
    """Sessions, and answers that take much room in Redis."""
    long = pb.GenerateRequest(text="x", sampling=TO_THE_END).SerializeToString()
    await asyncio.gather(
        attacker.at_once(40, lambda _: attacker.call("CreateSession", b"")),
        attacker.at_once(20, lambda _: attacker.call("Generate", long)),
    )


async def _claims(attacker: Attacker) -> None:
    """Requests that are refused, each with an idempotency key of its own."""

    def refused(number: int) -> bytes:
        sampling = pb.Sampling(max_tokens=10**6) if number % 2 else pb.Sampling(max_tokens=1, banned_ids=[10**6])
        asked = pb.GenerateRequest(text="x", sampling=sampling, idempotency_key=f"{CLAIM}{number}")
        return asked.SerializeToString()

    await attacker.at_once(40, lambda number: attacker.call("Generate", refused(number)))


async def _resumes(attacker: Attacker) -> None:
    """A long answer, read again from its beginning."""
    session = await _own_session(attacker)
    turn = pb.GenerateRequest(text="x", session_id=session, sampling=TO_THE_END).SerializeToString()
    resume = pb.ResumeRequest(session_id=session).SerializeToString()
    await attacker.call("Generate", turn)
    await attacker.at_once(40, lambda _: attacker.call("Resume", resume))


async def _answers(attacker: Attacker) -> None:
    """Streams of answers: whose first message names none, that take what was never sent, and that nobody reads."""
    names = [bytes([number]) * 16 for number in range(256)]
    firsts = (
        b"",
        b"\xff" * 1000,
        b"x" * MIB,
        *(pb.AnswersRequest(stream=b"x" * size).SerializeToString() for size in (1, 17, MIB)),
    )
    taken = pb.AnswersRequest(handles=[*range(1, 5001)], taken=[2**64 - 1] * 5000).SerializeToString()
    uneven = pb.AnswersRequest(handles=[1, 2], taken=[0]).SerializeToString()

    async def garbage(number: int) -> None:
        await attacker.stream([firsts[number % len(firsts)]], reads=True, held_s=1.0)

    async def takes(number: int) -> None:
        name = pb.AnswersRequest(stream=names[number % 256]).SerializeToString()
        await attacker.stream([name, *[taken] * 20, uneven], reads=True, held_s=1.0)

    async def unread(number: int) -> None:
        name = random.randbytes(16)
        held = asyncio.create_task(
            attacker.stream([pb.AnswersRequest(stream=name).SerializeToString()], reads=False, held_s=10.0)
        )
        await asyncio.sleep(0.05)
        route = pb.AnswerRoute(stream=name, handle=1)
        long = pb.GenerateRequest(text="x", sampling=TO_THE_END, route=route).SerializeToString()
        await asyncio.gather(held, attacker.call("Generate", long))

    await asyncio.gather(attacker.at_once(40, garbage), attacker.at_once(40, takes), attacker.at_once(40, unread))


async def _long_prompts(attacker: Attacker) -> None:
    """Prompts that no verifier has read before."""

    def prompt(number: int) -> bytes:
        rng = random.Random(number)
        ids = pb.TokenIds(ids=[rng.randrange(1, 4000) for _ in range(LONG_PROMPT)])
        return pb.GenerateRequest(token_ids=ids, sampling=pb.Sampling(max_tokens=1)).SerializeToString()

    await attacker.at_once(20, lambda number: attacker.call("Generate", prompt(number)))


def grammar_bombs(number: int) -> list[tuple[str, str]]:
    """Grammars, by kind, that take any amount of time, memory or stack to compile or to follow: new ones for each
    number."""
    chain = {str(at): {"items": {"$ref": f"#/$defs/{at + 1}"}} for at in range(1030 + number % 50)}
    last = str(len(chain))
    rules = 2700 + number % 100
    return [
        ("json_schema", json.dumps({"$defs": {**chain, last: {"type": "string"}}, "$ref": "#/$defs/0"})),
        ("json_schema", json.dumps({"type": "integer", "multipleOf": 2_999_999 + 2 * number})),
        ("lark", "\n".join(("start: r0", *(f"r{at}: r{at + 1}" for at in range(rules)), f'r{rules}: "x"'))),
        ("lark", f'start: X{{3}}\nX: "the cat sat on a mat. "{{{10_000 - number % 1000}}}'),
        ("lark", f'start: "a" X{{2}}\nX: "the cat sat on a mat. "{{{1000 - number % 100}}}'),
        ("lark", f"start: X\nX: /(.*a.{{{30 + number % 5}}})/ & /(.*b.{{29}})/ & ~/(.*c.{{28}})/"),
        ("lark", f'start: (X "," )*\nX: /[a-z]{{1,{20 + number % 9}}}/ & ~/(.*ab.{{12}})/ & ~/(.*c.{{12}})/'),
        ("regex", f"((((a{{{100 - number % 20}}}){{100}}){{100}}){{100}})b"),
        ("regex", f"(a|b)*a(a|b){{{14 + number % 6}}}"),
    ]


async def _grammars(attacker: Attacker) -> None:
    """Grammars that take any amount of time, memory or stack, to the router and to the gateway."""

    async def send(number: int) -> None:
        bombs = grammar_bombs(number)
        kind, text = bombs[number % len(bombs)]
        await attacker.call("Generate", request("x", max_tokens=200, grammar=types_pb2.Grammar(kind=kind, text=text)))

    async def post(number: int) -> None:
        bombs = grammar_bombs(number)
        kind, text = bombs[number % len(bombs)]
        fields = {"json_schema": "guided_json", "regex": "guided_regex", "lark": "guided_grammar"}
        body = {"model": "target", "prompt": "x", "max_tokens": 200, fields[kind]: text}
        await attacker.post(json.dumps(body).encode())

    await asyncio.gather(attacker.at_once(40, send), attacker.at_once(20, post))


async def _adapters(attacker: Attacker) -> None:
    """Adapters whose files are none, without end, others' or changing while they are read; and another tenant's."""
    target, own = attacker.target, Path(attacker.target.adapters)
    configuration, weights = "adapter_config.json", "adapter_model.safetensors"
    (other,) = (own.parent / "good").iterdir()
    whole = (other / weights).read_bytes()
    shutil.rmtree(own, ignore_errors=True)  # of an earlier round
    for name in ("fifo", "zeros", "sparse", "deep", "index", "changing"):
        shutil.copytree(other, own / name)
        (own / name / (configuration if name in ("fifo", "deep") else weights)).unlink()
    os.mkfifo(own / "fifo" / configuration)
    (own / "zeros" / weights).symlink_to("/dev/zero")
    (own / "deep" / configuration).write_text("[" * 2**19, encoding="utf-8")
    index = {"weight_map": {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": f"../../good/{weights}"}}
    (own / "index" / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with (own / "sparse" / weights).open("wb") as sparse:
        sparse.truncate(2**40)
    (own / "linked").symlink_to(other)
    foreign = f"../good/{other.name}"
    folders = (
        "fifo",
        "zeros",
        "sparse",
        "deep",
        "index",
        "linked",
        foreign,
        other.name,
        "/etc",
        "changing",
        "changing",
    )

    async def load(number: int) -> None:
        folder = folders[number % len(folders)]
        asked = pb.LoadAdapterRequest(name=f"adapter-{number % 32}", folder=folder)
        if await attacker.call("LoadAdapter", asked.SerializeToString()) and folder != "changing":
            attacker.outcome.leaks.append(f"an adapter was loaded from {folder}")

    async def rewrite(number: int) -> None:
        (own / "changing" / weights).write_bytes(whole if number % 2 else whole[: len(whole) // 2])

    async def spy(number: int) -> None:
        method, message = (
            ("UnloadAdapter", pb.UnloadAdapterRequest(name=target.adapter)),
            ("Generate", pb.GenerateRequest(text="x", model=target.adapter, sampling=pb.Sampling(max_tokens=1))),
        )[number % 2]
        if await attacker.call(method, message.SerializeToString()):
            attacker.outcome.leaks.append(f"{method} of another tenant's adapter was answered")

    await asyncio.gather(
        attacker.at_once(10, load),
        attacker.at_once(1, rewrite),
        attacker.at_once(4, spy),
        attacker.at_once(1, lambda _: attacker.call("ListModels", b"")),
    )


async def _frames(attacker: Attacker) -> None:
    """Frames to the verifier that would take far more memory than they have bytes, as drafters' without a ticket."""
    digest = tokenizer_digest((Path(__file__).parents[2] / "models/target/tokenizer.json").read_bytes())
    greeting = drafter_pb2.Hello(drafter_id="mallory-00c0ffee", tokenizer_digest=digest)
    hello = drafter_pb2.DraftUp(hello=greeting).SerializeToString()
    listed, in_turn = bytes([6 << 3 | 2, 0]), bytes([2 << 3 | 2, 0, 3 << 3 | 2, 0])
    frames = (listed * (3 * MIB - 64), in_turn * (MIB - 64), listed * (8 * MIB), b"\xff" * MIB, listed * 30_000)

    async def draft(number: int) -> None:
        async with attacker.channel(attacker.target.verifier, "drafter-mallory") as channel:
            stream: Any = channel.stream_stream(DRAFT)(timeout=CALL_S)
            attacker.outcome.begun += 1
            try:
                if number % 2:
                    await stream.write(hello)
                await stream.write(frames[number // 2 % len(frames)])
                while (answer := await stream.read()) is not grpc.aio.EOF:
                    attacker.receive(answer)
                attacker.codes["Draft OK"] += 1
            except asyncio.InvalidStateError:  # it has ended before all was sent
                attacker.codes["Draft ended"] += 1
            except grpc.aio.AioRpcError as error:
                attacker.codes[f"Draft {error.code().name}"] += 1

    await attacker.at_once(40, draft)


async def _lying_drafter(attacker: Attacker) -> None:
    """Start a drafter of the attacker's, with a certificate and a user in Redis, that wants one token in every text."""
    target = attacker.target
    model = Path(__file__).parents[2] / "models/drafter"
    files = [f"--{kind}={target.certificates}/{name}" for kind, name in MALLORY.items()]
    drafting = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.hostile.lying_drafter", "drafter", "--model", str(model), *files),
        *("--listen", "127.0.0.1:0", "--dtype", "float32"),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "REDIS_URL": target.redis},
    )
    assert drafting.stdout is not None
    assert await drafting.stdout.readline(), "it does not listen"


async def _drafters(attacker: Attacker) -> None:
    """Generations under a rule that would let that drafter have its way."""

    async def ask(number: int) -> None:
        sampling = pb.Sampling(max_tokens=64, seed=number, temperature=1.0, ignore_eos=True)
        asked = pb.GenerateRequest(text="x", sampling=sampling, acceptance=pb.Acceptance(rule=DRAWN_RULE))
        tokens: list[int] = []
        for answer in await attacker.call("Generate", asked.SerializeToString()):
            tokens += pb.GenerateResponse.FromString(answer).chunk.token_ids
        if tokens.count(WANTED) > 1:
            attacker.outcome.leaks.append(f"a drafter has put a token {tokens.count(WANTED)} times into a text")

    await attacker.at_once(8, ask)


async def _clocks(attacker: Attacker) -> None:
    """Sessions, idempotency keys and resumes that go from one router to another of another time."""

    async def cross(number: int) -> None:
        here = bool(number % 2)
        if not (created := await attacker.call("CreateSession", b"", other=here)):
            return
        session = pb.Session.FromString(created[0]).session_id
        turn = pb.GenerateRequest(
            text="x", session_id=session, idempotency_key=f"turn {number}", sampling=pb.Sampling(max_tokens=8)
        ).SerializeToString()
        await attacker.call("Generate", turn, other=not here)
        await attacker.call("Generate", turn, other=here)
        resume = pb.ResumeRequest(session_id=session).SerializeToString()
        await asyncio.gather(
            attacker.call("Resume", resume, other=here), attacker.call("Resume", resume, other=not here)
        )

    await attacker.at_once(8, cross)


async def _nothing(attacker: Attacker) -> None:
    """Computes and sends nothing: what the attacker's own use of the processors costs the others."""
    while True:
        sum(range(10_000))
        await asyncio.sleep(0)


async def _own_session(attacker: Attacker) -> str:
    while True:
        if created := await attacker.call("CreateSession", b""):
            return pb.Session.FromString(created[0]).session_id
        await asyncio.sleep(0.1)


CONTROL = "nothing"
ATTACKS: dict[str, Attack] = {
    CONTROL: _nothing,
    "gateway-without-key": _gateway_without_key,
    "gateway-bodies": _gateway_bodies,
    "gateway-json": _gateway_json,
    "gateway-answers": _gateway_answers,
    "router-without-key": _router_without_key,
    "connections": _connections,
    "handshakes": _handshakes,
    "invalid-requests": _invalid_requests,
    "templates": _templates,
    "callers-templates": _callers_templates,
    "texts": _texts,
    "rates": _rates,
    "watches": _watches,
    "spying": _spying,
    "storage": _storage,
    "claims": _claims,
    "resumes": _resumes,
    "answers": _answers,
    "long-prompts": _long_prompts,
    "grammars": _grammars,
    "frames": _frames,
    "adapters": _adapters,
    "drafters": _drafters,
    "clocks": _clocks,
}


PREPARATIONS: dict[str, Attack] = {"drafters": _lying_drafter}  # what takes longer than a short attack


async def attack(target: Target) -> None:
    """Attack for as long as the target says, print the outcome, and end this process in the midst of its calls."""
    attacker = Attacker(target)
    if target.attack in PREPARATIONS:
        await PREPARATIONS[target.attack](attacker)
    print("attacking", flush=True)
    began = time.process_time()
    attacking = asyncio.create_task(ATTACKS[target.attack](attacker))
    await asyncio.wait([attacking], timeout=target.seconds)
    if attacking.done():
        attacking.result()
    outcome = attacker.outcome
    outcome.codes = dict(sorted(attacker.codes.items()))
    outcome.leaks = sorted(set(outcome.leaks))
    outcome.processor_s = time.process_time() - began
    print(json.dumps(asdict(outcome)), flush=True)
    os._exit(0)


def yield_processors() -> None:
    """Give this process, and its session, a small share of the processors."""
    os.nice(NICE)
    with suppress(OSError):  # where the kernel shares by sessions
        Path("/proc/self/autogroup").write_text(str(NICE), encoding="ascii")


if __name__ == "__main__":
    yield_processors()
    asyncio.run(attack(Target(**json.load(sys.stdin))))
