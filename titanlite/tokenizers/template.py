"""A chat template's program: compiled and rendered with the settings of transformers. Also tells which fields
of the messages it looks up, and which texts it looks for in them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
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


class Rendered(NamedTuple):
    """A template's output. `read`: roles, each with the name of a field that the template looked up in a
    message of this role; the name is ALL if it read a whole message, for example as JSON."""

    text: str
    read: set[tuple[str, str]]


class Compiled(NamedTuple):
    """A compiled template, whether it has a generation block, the texts that it looks for, and the variables
    that it uses."""

    template: jinja2.Template
    has_generation: bool
    sought: frozenset[str]
    variables: frozenset[str]


def compile_template(template: str) -> Compiled:
    """Compile a template with the same settings as transformers. Raises jinja2.TemplateError."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.filters["tojson"] = _to_json
    tree = environment.parse(template)
    has_generation, sought = hasattr(environment, "has_generation"), frozenset(_sought(tree))
    variables = frozenset(find_undeclared_variables(tree))
    return Compiled(environment.from_string(tree), has_generation, sought, variables)


def render(compiled: Compiled, messages: Sequence[Mapping[str, Any]], **variables: Any) -> Rendered:
    """Render messages. Raises the exceptions of the template."""
    read = set[tuple[str, str]]()
    text = compiled.template.render(messages=[_Message(message, read) for message in messages], **variables)
    return Rendered(text, read)


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
