"""Compiles and renders chat templates with the settings of transformers, in a separate process, because
they are programs of whoever published a tokenizer. The process runs this file as a script, which imports
nothing of titanlite.

jinja2's sandbox keeps a template from files and from Python, but not from a loop without end or from a text
of 10 GB, and nothing within a process can interrupt one call of C such as `'x' * 10**10`. The operating
system can: a request may take CPU_S seconds of CPU, and the process MEMORY bytes. This is no protection
against a hole of the sandbox, since the process has the user's rights, nor against a template that takes a
little less than the limits for each of many conversations."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Noncharacters of Unicode, which mark the assistant's text in a template's output and are then removed.
BEGIN, END = "\ufdd0", "\ufdd1"
ALL = "*"
CPU_S = 10
MEMORY = 2 << 30
MAX_CHARACTERS = 4 << 20  # of a conversation, and of the output: about a million tokens


class TemplateError(Exception):
    """An error that a template raises. `line`: the template's line, for one that is not valid, or 0."""

    def __init__(self, message: str, line: int = 0):
        super().__init__(message)
        self.line = line


class TemplateLimitError(Exception):
    """A template that takes too much time or memory."""


class Rendered(NamedTuple):
    """A template's output. `read`: roles, each with the name of a field that the template looked up in a
    message of this role; the name is ALL if it read a whole message, for example as JSON."""

    text: str
    read: set[tuple[str, str]]


class Template:
    """A chat template. `has_generation`: whether it has a generation block. `sought`: the texts that it looks
    for. `variables`: those that it uses. Raises TemplateError and TemplateLimitError, as `render` does."""

    def __init__(self, text: str):
        self._text, self._process = text, _shared_process()
        about = self._process.ask({"template": text})
        self.has_generation: bool = about["has_generation"]
        self.sought, self.variables = frozenset[str](about["sought"]), frozenset[str](about["variables"])

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> Rendered:
        """Render messages and other values of JSON."""
        self._process = _shared_process()  # another one after a fork
        request = {"template": self._text, "messages": messages, "variables": variables}
        answer = self._process.ask(request)
        return Rendered(answer["text"], set(map(tuple, answer["read"])))


class _Process:
    """The process that renders. It ends with this object."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._start()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and return the answer to it."""
        line = json.dumps({**request, "cpu_s": CPU_S}).encode() + b"\n"
        with self._lock:
            if self._popen.poll() is not None:
                self._start()
            assert self._popen.stdin
            assert self._popen.stdout
            try:
                with suppress(BrokenPipeError):
                    self._popen.stdin.write(line)
                    self._popen.stdin.flush()
                answer = json.loads(self._popen.stdout.readline() or "null")
            except BaseException:  # after Ctrl-C, the next request would get this one's answer
                self._end()
                raise
        if answer is None:
            code = self._popen.wait()
            timed_out = code == -signal.SIGPROF
            reason = f"more than {CPU_S} s of CPU" if timed_out else f"too much (exit code {code})"
            raise TemplateLimitError(f"takes {reason}")
        if "limit" in answer:
            raise TemplateLimitError(answer["limit"])
        if "error" in answer:
            raise TemplateError(answer["error"], answer["line"])
        return answer

    def _start(self) -> None:
        pipe = subprocess.PIPE
        command = [sys.executable, __file__]
        self._popen = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        self._end = weakref.finalize(self, _end, self._popen, os.getpid())


def _end(process: subprocess.Popen[bytes], parent: int) -> None:
    if os.getpid() == parent:  # not in a fork
        process.kill()
        with process:  # waits, and closes the pipes
            pass


_processes = weakref.WeakValueDictionary[int, _Process]()


def _shared_process() -> _Process:
    process = _processes.get(os.getpid())
    if process is None:
        process = _processes[os.getpid()] = _Process()
    return process


# ---- in the process that renders


def main() -> None:
    """Answer the requests in standard input, one per line, until its end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # a signal to the whole job is for the process that asks
    with suppress(ValueError, OSError):  # the limit is lower already, or the system has none
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for line in sys.stdin.buffer:
        answer = _answer(line)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(answer + b"\n")
        sys.stdout.buffer.flush()


def _answer(line: bytes) -> bytes:
    try:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])  # ends the process
        template, about = _compile(request["template"])
        if "messages" not in request:
            return json.dumps(about).encode()
        text, read = _render(template, request["messages"], request["variables"])
        return json.dumps({"text": text, "read": sorted(read)}).encode()
    except MemoryError:
        return json.dumps({"limit": f"takes more than {MEMORY >> 30} GiB of memory"}).encode()
    except Exception as e:
        kind = "" if isinstance(e, jinja2.TemplateError) else f"{type(e).__name__}: "
        message = " ".join(str(e)[:500].split())
        return json.dumps({"error": f"{kind}{message}", "line": getattr(e, "lineno", 0)}).encode()


@lru_cache(maxsize=8)
def _compile(template: str) -> tuple[jinja2.Template, dict[str, Any]]:
    """Return a compiled template, and the attributes of `Template`."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.filters["tojson"] = _to_json
    tree = environment.parse(template)
    about = {"has_generation": hasattr(environment, "has_generation"), "sought": sorted(set(_sought(tree)))}
    about["variables"] = sorted(find_undeclared_variables(tree))
    return environment.from_string(tree), about


def _render(template: jinja2.Template, messages: Sequence[Any], variables: Mapping[str, Any]) -> Rendered:
    read, texts, length = set[tuple[str, str]](), list[str](), 0
    for text in template.generate(messages=[_Message(message, read) for message in messages], **variables):
        texts.append(text)
        length += len(text)
        if length > MAX_CHARACTERS:
            raise jinja2.TemplateError(f"it writes more than {MAX_CHARACTERS:,} characters")
    return Rendered("".join(texts), read)


class _Message(dict[str, Any]):
    """A message that adds its role and the names of the fields that are looked up to `read`."""

    def __init__(self, message: Mapping[str, Any], read: set[tuple[str, str]]):
        super().__init__(message)
        self._read, self._role = read, str(message.get("role", ""))

    def __getitem__(self, key: str) -> Any:
        self._read.add((self._role, str(key)))
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._read.add((self._role, str(key)))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add((self._role, str(key)))
        return super().get(key, default)

    def __iter__(self) -> Iterator[str]:
        self._read.add((self._role, ALL))
        return super().__iter__()

    def __repr__(self) -> str:
        return f"{dict(self.items())}"

    def items(self) -> Any:
        self._read.add((self._role, ALL))
        return super().items()

    def values(self) -> Any:
        return dict(self.items()).values()

    def copy(self) -> Any:
        return dict(self.items())


class _Generation(Extension):
    """The block `{% generation %} ... {% endgeneration %}`: puts BEGIN and END around its output."""

    tags = {"generation"}  # noqa: RUF012 -- jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        self.environment.extend(has_generation=True)
        begin, end = (nodes.Output([nodes.TemplateData(mark)]).set_lineno(line) for mark in (BEGIN, END))
        return nodes.Scope([begin, *body, end]).set_lineno(line)


def _sought(tree: nodes.Template) -> Iterator[str]:
    """Yield the texts in comparisons, tests, and arguments of filters and of methods, such as `split`."""
    roots = list[nodes.Node](tree.find_all(nodes.Compare))
    for kind in (nodes.Test, nodes.Filter):
        roots += [argument for node in tree.find_all(kind) for argument in node.args]
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr):  # a method; no macro or function
            roots += call.args
    for root in roots:
        constants = [root] if isinstance(root, nodes.Const) else root.find_all(nodes.Const)
        yield from (constant.value for constant in constants if isinstance(constant.value, str))


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson` without jinja2's escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


if __name__ == "__main__":
    main()
