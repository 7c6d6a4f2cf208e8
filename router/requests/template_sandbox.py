"""Renders chat templates in a process of its own: python -m router.requests.template_sandbox

A template comes with a checkpoint or with a request, so it is an untrusted program. Jinja's sandbox restricts it to
text: no files, no imports, no attributes that begin with an underscore, no change of its inputs, no range of more than
100,000. The sandbox bounds neither time nor memory: loops nest, and one multiplication makes a string of any length.
This process bounds both: it has a limit of memory, and for each answer a limit of CPU seconds, and ends when it exceeds
one.

On stdin, JSON lines: first the template with its variables and the seconds for an answer, then the inputs of
conversations: messages, tools and further ones. On stdout one JSON line for each, {"text": ...} or {"error": ...}. The
process ends at the end of its input.

Where the first line has no template, each conversation has its own, and is rendered in a forked process that ends with
it: what one caller's template does, nobody else sees, and where Jinja's sandbox has a hole, it can compute and nothing
else (`router.requests.system_calls`).
"""

from __future__ import annotations

import json
import os
import pprint  # noqa: F401 - Jinja imports it, and the next two, when a template needs them
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial
from traceback import walk_tb
from typing import Any

import jinja2
import jinja2.constants
import jinja2.debug
import jinja2.ext
import jinja2.nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from outrider.rpc.core_dumps import forbid_core_dumps
from router.requests.system_calls import only_compute

MOST_CHARACTERS = 4 << 20  # characters of a rendered conversation
MOST_BYTES = 256 << 20  # memory of this process
MOST_ANSWER = 64 << 20  # bytes of an answer: JSON has up to twelve for a character
USUAL = "{{ 'a' }}{{ strftime_now('%Z') }}"  # needs a codec and the time zone
MOST_SECONDS = 4  # CPU seconds to compile a checkpoint's template, and more than any answer may take
TOO_LONG, TOO_LARGE, TOO_DEEP = "it takes too long (template_s)", "it takes too much memory", "it nests too deeply"


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
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    setup = json.loads(sys.stdin.readline())
    if setup["template"] is None:
        _serve_callers(setup["variables"], setup["seconds"])
    else:
        _serve_checkpoint(**setup)


def _serve_checkpoint(template: str, variables: Mapping[str, str], seconds: float) -> None:
    compiled = list[jinja2.Template]()

    def compile_it() -> str:
        compiled.append(compile_template(template))
        return ""

    def rendered(line: str) -> str:
        return render(compiled[0], json.loads(line)["inputs"], variables)

    _send(_bounded(compile_it, MOST_SECONDS))
    for line in sys.stdin:
        _send(_bounded(partial(rendered, line), seconds))


def _serve_callers(variables: Mapping[str, str], seconds: float) -> None:
    render(compile_template(USUAL), {}, variables)  # reads the files that a process that only computes cannot read

    def rendered(line: str) -> str:
        only_compute()
        asked = json.loads(line)
        return render(compile_template(asked["template"]), asked["inputs"], variables)

    _send('{"text": ""}')
    for line in sys.stdin:
        _send(_apart(partial(rendered, line), seconds))


def _apart(work: Callable[[], str], seconds: float) -> str:
    """Return the answer of work in a forked process, or the error that ended it."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.closerange(0, writing)
            signal.setitimer(signal.ITIMER_PROF, seconds)
            answer = memoryview(_answer(work).encode())
            while answer:
                answer = answer[os.write(writing, answer) :]
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        received = pipe.read(MOST_ANSWER)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return json.dumps({"error": TOO_LONG if os.WTERMSIG(status) == signal.SIGPROF else TOO_DEEP})
    return received.decode().partition("\n")[0] or json.dumps({"error": TOO_LARGE})


def _bounded(work: Callable[[], str], seconds: float) -> str:
    """Return the answer of work. The signal of a timer ends this process after these CPU seconds."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    answer = _answer(work)
    signal.setitimer(signal.ITIMER_PROF, 0)
    return answer


def _answer(work: Callable[[], str]) -> str:
    """Return the answer that has the text of work, or its error."""
    try:
        return json.dumps({"text": work()})
    except MemoryError:
        error = TOO_LARGE
    except RecursionError:
        error = TOO_DEEP
    except Exception as raised:  # a template's mistakes have no common base
        error = (str(raised) or type(raised).__name__)[:1000] + _line_of(raised)
    return json.dumps({"error": error})


def _line_of(error: Exception) -> str:
    """Return where in the template an error is, for messages; empty if that is not known."""
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f" (line {error.lineno})"
    lines = [line for frame, line in walk_tb(error.__traceback__) if frame.f_code.co_filename == "<template>"]
    return f" (line {lines[-1]})" if lines else ""


def _send(answer: str) -> None:
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
