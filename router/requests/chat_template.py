"""Chat templates, a checkpoint's and those of requests, which turn a conversation into a prompt."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tokenizers import AddedToken

from outrider.core.answers.answer_reader import ModelForm
from outrider.core.answers.formats import FORMATS, format_of, short_id
from outrider.core.answers.reasoning import BEGIN, END, reasoning_of
from outrider.engine.checkpoints.gguf.header import read_gguf
from outrider.engine.checkpoints.gguf.tokenizer import gguf_chat_template
from outrider.errors import CheckpointError, InvalidRequest
from outrider.hub import is_gguf, tokenizer_folder
from router.requests.control_tokens import ControlTokens, new_divider
from router.requests.template_process import TemplateError, TemplateProcess

FILE = "chat_template.jinja"
CONFIG = "tokenizer_config.json"
TEMPLATE_FIELD = "chat_template"  # of a request

SECONDS = 0.2  # of the processor, for one conversation, unless the router's configuration has it otherwise
NO_VARIABLES: Mapping[str, Any] = {}
# Behind what templates write before an answer; at the end of the last message's content; behind the last message.
PromptEnd = Literal["answer", "continue", "bare"]


class TemplateMessage(NamedTuple):
    """One message of a conversation."""

    role: str
    content: str
    tool_calls: tuple[Any, ...] = ()  # calls that the assistant made, in OpenAI's form, with arguments as objects
    tool_call_id: str = ""  # of the call whose result it is
    reasoning_content: str = ""  # what the assistant wrote before its answer

    @property
    def for_template(self) -> dict[str, Any]:
        """The message without what is empty, which templates would take for something."""
        given = {name: value for name, value in self._asdict().items() if value}
        return {"role": self.role, "content": self.content} | given


class ChatTemplate:
    """Renders conversations by a checkpoint's template, if it has one, or by templates of requests: both in bounded
    child processes, one for each kind. `close` ends them.
    """

    def __init__(
        self,
        path: Path,
        source: str | None,
        variables: dict[str, str],
        seconds: float = SECONDS,
        tool_format: str = "",
        added: Iterable[AddedToken] = (),
    ) -> None:
        """`path`: the template's file; `source`: the checkpoint's template; `variables`: the special tokens, by the
        names that templates use; `seconds`: of the processor, for one conversation; `tool_format`: in which the model
        writes calls; empty: as the source shows; `added`: tokens of the tokenizer, see `ControlTokens`.
        """
        self._source = source or ""
        form = format_of(self._source, tool_format)
        self.form = ModelForm(form.name if form else "", reasoning_of(self._source))
        self.of_checkpoint = source is not None  # whether the checkpoint has one
        self._added = (*added,)
        self._control = ControlTokens(self._added, self._source)
        self._path = path
        setup = {"variables": variables, "seconds": seconds}
        self._own = TemplateProcess({"template": source, **setup}, "the chat template")
        self._callers = TemplateProcess({"template": None, **setup}, "their own chat templates")

    def check(self) -> None:
        """Raise CheckpointError for a template that does not compile."""
        if not self.of_checkpoint:
            return
        try:
            self._own.check()
        except TemplateError as error:
            raise CheckpointError(f"{self._path}: is not a valid chat template: {error}") from None

    async def render(
        self,
        messages: Sequence[TemplateMessage],
        tenant: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = NO_VARIABLES,
        end: PromptEnd = "answer",
        template: str = "",
    ) -> list[str]:
        """Return the prompt of a tenant's messages up to its `end`, control tokens included; `tools`: that the
        assistant may call, in OpenAI's form; `variables`: further inputs of the template, by name; `template`: the
        tenant's own; empty: the checkpoint's, which it must have. The prompt is divided within each control token that
        the tenant has sent in anything but a template: its parts are texts to be tokenized one by one.

        Raises InvalidRequest with the template's objection, Overloaded when too many of the tenant's messages wait.
        """
        process, field, whose, refuses = self._own, "messages", "the model's chat template ", "refuses them"
        if template:
            process, field, whose, refuses = self._callers, TEMPLATE_FIELD, "", "cannot be rendered"
        try:
            parts = await process.run(tenant, self._render_blocking, messages, tools, variables, end, template)
        except TemplateError as error:
            raise InvalidRequest(field, f"{whose}{refuses}: {error}") from None
        if not any(parts):
            raise InvalidRequest(field, f"{whose}renders an empty prompt")
        return parts

    def close(self) -> None:
        """End the processes, and wait for renderings that run."""
        self._own.close()
        self._callers.close()

    def _render_blocking(
        self,
        messages: Sequence[TemplateMessage],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        end: PromptEnd,
        template: str,
    ) -> list[str]:
        said = [self._with_ids(message).for_template for message in messages]
        divider = new_divider()
        control = ControlTokens(self._added, self._source + template) if template else self._control
        inputs = control.divide({**variables, "tools": [*tools] or None}, divider)
        inputs["add_generation_prompt"] = end == "answer"
        inputs["messages"] = divided = [
            control.divide(it, divider, allowed=(BEGIN, END) if it["role"] == "assistant" else ()) for it in said
        ]
        if end == "continue":
            return self._continued(inputs, template, divided[-1]).split(divider)
        return self._rendered(inputs, template).split(divider)

    def _continued(self, inputs: Mapping[str, Any], template: str, last: dict[str, Any]) -> str:
        """Return the rendering up to the end of the last message's content, which a mark shows. A template that strips
        contents strips this one, too. Raises TemplateError where the content is not in the rendering as it is.

        This is the rule of `apply_chat_template(continue_final_message=True)` of transformers.
        """
        content, mark = last["content"], new_divider()
        last["content"] = f"{content}{mark} "
        rendering, found, behind = self._rendered(inputs, template).rpartition(mark)
        if not found or content.strip() not in rendering:
            raise TemplateError("it does not write the last message's content as it is, so it cannot be continued")
        return rendering if behind.startswith(" ") else rendering.rstrip()

    def _rendered(self, inputs: Mapping[str, Any], template: str) -> str:
        """Return what a template, or the checkpoint's, makes of its inputs. Raises TemplateError."""
        if template:
            return self._callers.request({"inputs": inputs, "template": template})
        return self._own.request({"inputs": inputs})

    def _with_ids(self, message: TemplateMessage) -> TemplateMessage:
        """Return a message whose calls have ids that the template takes."""
        form = FORMATS.get(self.form.tool_format)
        if form is None or not form.short_ids:
            return message
        calls = tuple({**call, "id": short_id(str(call.get("id", "")))} for call in message.tool_calls)
        return message._replace(tool_calls=calls, tool_call_id=message.tool_call_id and short_id(message.tool_call_id))


def read_chat_template(
    folder: Path, seconds: float = SECONDS, tool_format: str = "", added: Iterable[AddedToken] = ()
) -> ChatTemplate:
    """Return the chat template of a checkpoint, checked. The rest as `ChatTemplate`.

    Raises CheckpointError naming the file.
    """
    place = tokenizer_folder(folder)
    path, source, variables = _gguf_source(place) if is_gguf(place) else _folder_source(place)
    template = ChatTemplate(path, source, variables, seconds, tool_format, added)
    try:
        template.check()
    except BaseException:
        template.close()
        raise
    return template


def _gguf_source(file: Path) -> tuple[Path, str | None, dict[str, str]]:
    """Return the file, its template and the special tokens that the template may name. Raises CheckpointError."""
    return file, *gguf_chat_template(read_gguf(file))


def _folder_source(folder: Path) -> tuple[Path, str | None, dict[str, str]]:
    """Return the file of a folder's template, the template, None if there is none, and the special tokens that it may
    name. Raises CheckpointError."""
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        config = {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}); download it again") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: must hold a JSON object; download it again")
    source = config.get("chat_template")
    if (folder / FILE).exists():
        path = folder / FILE
        try:
            source = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from None
    elif isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    if source is not None and not isinstance(source, str):
        raise CheckpointError(f"{path}: chat_template must be a string, or a list of templates with names")
    return path, source, _special_tokens(config)


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return bos_token and the like by name; each is a string, or an object whose content is one."""
    contents = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in config.items()
        if name.endswith("_token")
    }
    return {name: content for name, content in contents.items() if isinstance(content, str)}
