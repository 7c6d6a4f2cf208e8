"""A model that the router serves: its tokenizer, its chat template and its end-of-text tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

from tokenizers import Tokenizer

from outrider.core.answers.answer_reader import ModelForm
from outrider.core.answers.formats import FORMATS, Tools, calls_grammar
from outrider.core.answers.reasoning import BEGIN, END, reasoning_behind
from outrider.core.session.contract import MAX_STOP_IDS, Adapter, Grammar
from outrider.engine.checkpoints.checkpoint import read_eos_ids, read_tokenizer, tokenizer_source
from outrider.engine.checkpoints.gguf.header import kept_header
from outrider.errors import CheckpointError, InvalidRequest, TooLong
from outrider.grammar.compiler import GrammarCompiler
from outrider.hub import checkpoint_folder, is_gguf
from outrider.limits.fair_turns import FairTurns
from outrider.offload import LONG
from outrider.wire.types import check_tokens
from router.requests.chat_template import (
    NO_VARIABLES,
    SECONDS,
    ChatTemplate,
    PromptEnd,
    TemplateMessage,
    read_chat_template,
)
from router.text.detokenizer import REPLACEMENT

_LONG_TEXT = 4096  # characters; a longer text is tokenized in a thread, so that other sessions do not wait
TOKENIZERS = 2  # long texts that are tokenized at the same time
_PIECE = 2**16  # characters that are tokenized at a time to find out whether a text fits
_USUAL = 8  # characters of a token; few texts have more, and only those are counted before they are tokenized
_MARK_TOKENS = 16  # most tokens of a mark and the lines around it
_SLACK = 2  # splitting a text may add tokens, but less than this factor
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
P = ParamSpec("P")
ResultT = TypeVar("ResultT")

_ANCHOR = "a"  # decoded before each token: some decoders treat a text's first token differently


class RequestedModel(NamedTuple):
    """What a request names as its model."""

    name: str  # of the model; empty: the only one
    adapter: Adapter | None = None


class TokenText:
    """Maps a token id to its bytes in UTF-8, for log-probabilities; empty for an id outside the vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._anchor = tokenizer.encode(_ANCHOR, add_special_tokens=False).ids
        self._before = len(self._decode([]))
        self._known: dict[int, bytes] = {}

    def __call__(self, token: int) -> bytes:
        """Return the token's bytes."""
        if token not in self._known:
            self._known[token] = self._bytes_of(token)
        return self._known[token]

    def _bytes_of(self, token: int) -> bytes:
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return b""
        text = self._decode([token])[self._before :]
        if REPLACEMENT not in text:
            return text.encode()
        if byte := _BYTE.fullmatch(name):
            return bytes([int(byte[1], 16)])
        if all(character in _BYTES for character in name):
            return bytes(_BYTES[character] for character in name)
        return text.encode()

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode([*self._anchor, *tokens], skip_special_tokens=False)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that this router takes requests for."""

    name: str
    tokenizer: Tokenizer
    digest: bytes  # of the tokenizer
    eos_ids: tuple[int, ...]
    chat: ChatTemplate
    grammars: GrammarCompiler | None = None  # None: grammars are checked by verifiers alone
    turns: FairTurns = field(default_factory=lambda: FairTurns(TOKENIZERS, "the tokenizer"))  # of long texts
    token_text: TokenText = field(init=False)  # maps a token to its bytes
    marks: frozenset[int] = field(
        init=False
    )  # tokens that have text although they are special, because calls and reasoning begin with them

    @property
    def form(self) -> ModelForm:
        """How the model writes calls of tools and reasoning."""
        return self.chat.form

    def form_behind(self, prompt: Sequence[int], *, within_reasoning: bool = False) -> ModelForm:
        """Return how the model writes behind a prompt, of which the last tokens suffice: it may end with the mark of
        reasoning, or behind it. `within_reasoning`: reasoning has begun further up."""
        if not self.form.reasoning:
            return self.form
        if within_reasoning:
            return self.form._replace(reasoning="opened")
        text = self.tokenizer.decode(prompt[-_MARK_TOKENS:], skip_special_tokens=False)
        return self.form._replace(reasoning=reasoning_behind(text))

    def calls_grammar(self, tools: Tools, schema: Mapping[str, Any] | None = None) -> Grammar:
        """Return the grammar of an answer that calls tools, which the model knows, or is JSON of a `schema`."""
        return calls_grammar(FORMATS[self.form.tool_format], tools, self._added_id, schema)

    def _added_id(self, text: str) -> int | None:
        """Return the id of an added token. Grammars let no text stand for one, be it special or not."""
        added = self.tokenizer.get_added_tokens_decoder()
        return next((id_ for id_, token in added.items() if token.content == text), None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_text", TokenText(self.tokenizer))
        written = (BEGIN, END) if self.form.reasoning else ()
        if (tool_format := FORMATS.get(self.form.tool_format)) is not None:
            written = (*written, *tool_format.written)
        found = (self._added_id(text) for text in written)
        object.__setattr__(self, "marks", frozenset(id_ for id_ in found if id_ is not None))

    async def encode(
        self, text: str, tenant: str = "", *, special: bool = True, context: int = 0, truncated_to: int = 0
    ) -> tuple[int, ...]:
        """Return the token ids of a tenant's text; `special`: with the tokens that the tokenizer itself puts around a
        prompt; `truncated_to`: the last ones alone, at most this many, those around them included; 0: all.

        Raises TooLong for a text that is far too long for the `context`, if that is known (not 0): the tokenizer
        takes hundreds of bytes for each token. Raises Overloaded when too many long texts of the tenant wait.
        """
        return await self._encode_parts([text], tenant, special, context, truncated_to)

    async def _encode_parts(
        self, parts: Sequence[str], tenant: str, special: bool, context: int, truncated_to: int = 0
    ) -> tuple[int, ...]:
        if sum(map(len, parts)) > _LONG_TEXT:
            return await self.turns.run(None, tenant, self._encode, parts, special, context, truncated_to)
        return self._encode(parts, special, context, truncated_to)

    async def encode_chat(
        self,
        messages: Sequence[TemplateMessage],
        tenant: str = "",
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = NO_VARIABLES,
        context: int = 0,
        end: PromptEnd = "answer",
        template: str = "",
    ) -> tuple[int, ...]:
        """Return the token ids of the prompt of a tenant's messages, by the tenant's own `template` or the
        checkpoint's. Only the template writes control tokens: what else the tenant has sent is text, whatever it
        spells.

        Raises InvalidRequest if there is no template or it refuses the messages, Overloaded when too many of the
        tenant's messages wait, and as `encode`.
        """
        if not (template or self.chat.of_checkpoint):
            problem = f"model {self.name!r} has no chat template; send a prompt, or a chat_template"
            raise InvalidRequest("messages", problem)
        parts = await self.chat.render(messages, tenant, tools, variables, end, template)
        return await self._encode_parts(parts, tenant, False, context)

    async def decode(self, tokens: Sequence[int], tenant: str = "") -> str:
        """Return the text of a tenant's tokens, special ones included. Raises InvalidRequest for an id outside the
        vocabulary, Overloaded as `encode`."""
        check_tokens(tokens, self.tokenizer.get_vocab_size(), "tokens")
        return await self._run_if_long(tokens, tenant, self.tokenizer.decode, [*tokens], skip_special_tokens=False)

    async def token_names(self, tokens: Sequence[int], tenant: str = "") -> list[str]:
        """Return the names of tokens in the tokenizer's vocabulary. Raises Overloaded as `encode`."""
        name = self.tokenizer.id_to_token
        return await self._run_if_long(tokens, tenant, lambda: [name(token) or "" for token in tokens])

    async def _run_if_long(
        self, tokens: Sequence[int], tenant: str, work: Callable[P, ResultT], *args: P.args, **options: P.kwargs
    ) -> ResultT:
        """Return the result of `work`, in a turn of the tenant where its tokens are many."""
        if len(tokens) > LONG:
            return await self.turns.run(None, tenant, work, *args, **options)
        return work(*args, **options)

    async def check_grammar(self, grammar: Grammar, tenant: str = "") -> None:
        """Raise InvalidRequest for a tenant's grammar that cannot be followed, and as `GrammarCompiler.check`."""
        if self.grammars is not None:
            await self.grammars.check(grammar, tenant)

    def close(self) -> None:
        """End the model's child processes."""
        self.chat.close()
        if self.grammars is not None:
            self.grammars.close()

    def _encode(self, parts: Sequence[str], special: bool, context: int, truncated_to: int) -> tuple[int, ...]:
        if context and sum(map(len, parts)) > _USUAL * context:
            counted = 0
            for part in parts:
                for start in range(0, len(part), _PIECE):
                    counted += len(self.tokenizer.encode(part[start : start + _PIECE], add_special_tokens=False).ids)
                    if counted > _SLACK * context:
                        raise TooLong(
                            "prompt",
                            f"has over {counted} tokens, must have at most {context - 1}: the context has {context}",
                        )
        if truncated_to and special:  # those around the text stay, as in transformers
            encoded = self.tokenizer.encode(parts[0], add_special_tokens=False)
            around = self.tokenizer.num_special_tokens_to_add(False)
            encoded.truncate(max(1, truncated_to - around), direction="left")
            return tuple(self.tokenizer.post_process(encoded, add_special_tokens=True).ids)
        return tuple(id_ for part in parts for id_ in self.tokenizer.encode(part, add_special_tokens=special).ids)


def load_model(name: str, checkpoint: Path, template_s: float = SECONDS, tool_format: str = "") -> ServedModel:
    """Read tokenizer.json and, if present, generation_config.json, config.json and the chat template, which may take
    `template_s` seconds of the processor for a conversation. `tool_format`: how the model writes calls of tools; empty:
    as its template shows.

    Raises CheckpointError naming the file that is missing or broken.
    """
    folder = checkpoint_folder(checkpoint, weights=False)
    path = folder / "tokenizer.json"
    if not is_gguf(folder) and not path.exists():
        raise CheckpointError(f"{path}: no such file; models.{name} must be a folder that holds tokenizer.json")
    with kept_header(folder):
        tokenizer, digest = read_tokenizer(folder)
        eos_ids = tuple(_eos_ids(folder))
        grammars = GrammarCompiler(tokenizer_source(folder), tokenizer.get_vocab_size(), eos_ids)
        chat = read_chat_template(folder, template_s, tool_format, tokenizer.get_added_tokens_decoder().values())
    return ServedModel(name, tokenizer, digest, eos_ids, chat, grammars)


def _eos_ids(folder: Path) -> Iterable[int]:
    if is_gguf(folder):
        return read_eos_ids(folder)[:MAX_STOP_IDS]
    for file in ("generation_config.json", "config.json"):
        path = folder / file
        blob = _read(path)
        if blob is None:
            continue
        try:
            values: Any = json.loads(blob)
            found = values.get("eos_token_id")
        except (ValueError, AttributeError):
            raise CheckpointError(f"{path}: not a JSON object") from None
        if found is None:
            continue
        ids = found if isinstance(found, list) else [found]
        if len(ids) > MAX_STOP_IDS or not all(type(token) is int and token >= 0 for token in ids):
            raise CheckpointError(f"{path}: eos_token_id must be a token id or a list of up to {MAX_STOP_IDS}")
        return ids
    return ()


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None


def _byte_alphabet() -> dict[str, int]:
    """Return the bytes behind the characters of byte-level vocabularies (Radford et al. 2019, GPT-2's encoder):
    printable bytes stand for themselves, the others for the characters from U+0100 on in their order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_alphabet()
