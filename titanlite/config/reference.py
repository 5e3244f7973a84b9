"""The reference of a schema: every key with its type, default and docstring, as `--help` text and as
Markdown.

A field's docstring is the string literal under it in the class body, read from the source with ast.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import typing
from collections.abc import Iterator
from typing import Any

import tomli_w

from titanlite.config.component import Component
from titanlite.config.toml import as_tree


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of the reference. `default` is TOML text, "" where the key is required."""

    name: str
    type: str
    default: str
    doc: str


@dataclasses.dataclass(frozen=True)
class Section:
    """One table: its dotted path, the choice it describes ("" for a plain section), docstring, keys."""

    path: str
    choice: str
    doc: str
    keys: list[Key]


def sections(schema: type) -> Iterator[Section]:
    """The schema's own keys, if it has some, and all its tables in the order of their fields; one Section for
    each choice of a kind."""
    if keys := list(_keys(schema)):
        yield Section("", "", inspect.getdoc(schema) or "", keys)
    for field, hint in _tables(schema):
        yield from _sections_of(hint, field.name)


def _sections_of(hint: Any, path: str) -> Iterator[Section]:
    if typing.get_origin(hint) is list:
        path, (hint,) = f"[{path}]", typing.get_args(hint)
    if issubclass(hint, Component) and hint.is_kind():
        for name, choice in sorted(hint.choices.items()):
            yield Section(path, name, inspect.getdoc(choice) or "", list(_keys(choice)))
        return
    yield Section(path, "", inspect.getdoc(hint) or "", list(_keys(hint)))
    for field, inner in _tables(hint):
        yield from _sections_of(inner, f"{path}.{field.name}")


def _tables(cls: type) -> Iterator[tuple[dataclasses.Field, Any]]:
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        inner = typing.get_args(hint)[0] if typing.get_origin(hint) is list else hint
        if dataclasses.is_dataclass(inner) or (isinstance(inner, type) and issubclass(inner, Component)):
            yield field, hint


def _keys(cls: type) -> Iterator[Key]:
    docs, hints = field_docs(cls), typing.get_type_hints(cls)
    tables = {f.name for f, _ in _tables(cls)}
    for field in dataclasses.fields(cls):
        if field.init and field.name not in tables:
            yield Key(field.name, _type_name(hints[field.name]), _default(field), docs.get(field.name, ""))


def field_docs(cls: type) -> dict[str, str]:
    """The docstring under each field of a dataclass, bases included."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:]):
            if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
                continue
            if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                docs[field.target.id] = inspect.cleandoc(str(text.value.value))
    return docs


def _type_name(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return " | ".join(f'"{a}"' if isinstance(a, str) else str(a) for a in typing.get_args(hint))
    if typing.get_origin(hint) is None:
        return getattr(hint, "__name__", str(hint))
    return str(hint).replace("typing.", "")


def _default(field: dataclasses.Field) -> str:
    if field.default is not dataclasses.MISSING:
        value = field.default
        if value is None:
            return "unset"
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        return ""
    return (
        tomli_w.dumps({"v": as_tree(value)}).partition("=")[2].strip()
        if value not in ({}, [])
        else str(value)
    )


def help_text(schema: type) -> str:
    """Plain text for a terminal: `--section.key=default`, then the docstring."""
    lines = []
    for section in sections(schema):
        choice = f'  (name = "{section.choice}")' if section.choice else ""
        title = f"[{section.path}]{choice}  " if section.path else ""
        lines.append(f"\n{title}{section.doc.splitlines()[0] if section.doc else ''}")
        dotted = section.path.replace("[", "").replace("]", ".0") + "." if section.path else ""
        for key in section.keys:
            lines.append(f"  --{dotted}{key.name}={key.default or '(required)'}   <{key.type}>")
            lines += textwrap.wrap(key.doc, 100, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines).lstrip()


def markdown(schema: type) -> str:
    """The same as Markdown: a heading a table, a row a key."""
    lines: list[str] = []
    for section in sections(schema):
        choice = f' name = "{section.choice}"' if section.choice else ""
        lines += ["", f"## `[{section.path}]`{choice}" if section.path else "", "", section.doc]
        if section.keys:
            lines += ["", "| key | type | default | meaning |", "| --- | --- | --- | --- |"]
        for key in section.keys:
            texts = (key.doc, key.type, key.default)
            doc, kind, default = (" ".join(text.split()).replace("|", "\\|") for text in texts)
            lines.append(f"| `{key.name}` | {kind} | {f'`{default}`' if default else 'required'} | {doc} |")
    return "\n".join(lines).strip() + "\n"
