"""Renders chat templates in a process of its own: python -m router.requests.template_sandbox

A template comes with a checkpoint, so it is an untrusted program. Jinja's sandbox restricts it to text: no files, no
imports, no attributes that begin with an underscore, no change of its inputs, no range of more than 100,000. The
sandbox bounds neither time nor memory: loops nest, and one multiplication makes a string of any length. This process
bounds both: it has a limit of memory, and for each answer a limit of CPU seconds, and ends when it exceeds one.

On stdin, JSON lines: first a template with its variables and the seconds for an answer, then the inputs of
conversations: messages, tools and further ones. On stdout one JSON line for each, {"text": ...} or {"error": ...}. The
process ends at the end of its input.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from outrider.rpc.core_dumps import forbid_core_dumps

MOST_CHARACTERS = 4 << 20  # characters of a rendered conversation
MOST_BYTES = 1 << 30  # memory of this process
MOST_SECONDS = 4  # CPU seconds to compile a template, and more than any answer may take


class GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's part for training; here the block renders its body."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        """Return the body alone, in a scope as any block has it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [jinja2.nodes.Scope(body, lineno=line)]


class PlainDict:
    """`dict` for templates: callable, without attributes that lead elsewhere."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """Return what `dict.fromkeys` returns."""
        return dict.fromkeys(*args)


class PublicNamespace(Namespace):
    """`namespace` for templates: no name in it may begin with an underscore."""

    def __init__(*args: Any, **values: Any) -> None:  # a template may use any name, `self` too
        self, *inputs = args
        Namespace.__init__(self, *inputs, **values)
        for name in dict(*inputs, **values):
            _check_public(name)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}; rename it")


def compile_template(source: str) -> jinja2.Template:
    """Return a chat template with all extensions that `transformers` provides. Raises jinja2.TemplateError."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": PlainDict(),
        "namespace": PublicNamespace,
    }
    return environment.from_string(source)


def render(template: jinja2.Template, inputs: Mapping[str, Any], variables: Mapping[str, str]) -> str:
    """Return the prompt of a conversation. `inputs`: messages, tools, `add_generation_prompt`, and what else the
    request has for the template; `variables`: the special tokens.

    Raises jinja2.TemplateError, ValueError when the prompt is too long, and whatever a template's mistake raises.
    """
    pieces, characters = [], 0
    for piece in template.generate({"documents": None, **inputs, **variables}):
        characters += len(piece)
        if characters > MOST_CHARACTERS:
            raise ValueError(f"more than {MOST_CHARACTERS} characters come of it")
        pieces.append(piece)
    text = "".join(pieces)
    text.encode()  # raises for text that is not valid Unicode
    return text


def main() -> None:
    """Answer requests until the input ends."""
    forbid_core_dumps()
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, resource.RLIM_INFINITY))
    template: jinja2.Template | None = None
    variables: dict[str, str] = {}
    seconds: float = MOST_SECONDS
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
        try:
            asked = json.loads(line)
            if template is None:
                template, variables, text = compile_template(asked["template"]), asked["variables"], ""
                seconds = asked["seconds"]
            else:
                text = render(template, asked["inputs"], variables)
            answer = json.dumps({"text": text})
        except MemoryError:
            answer = json.dumps({"error": "it takes too much memory"})
        except Exception as error:  # a template's mistakes have no common base
            where = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            answer = json.dumps({"error": f"{str(error) or type(error).__name__}{where}"[:1000]})
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(answer, flush=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter would escape characters for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


if __name__ == "__main__":
    main()
