"""The schema of a configuration as plain data: the type, the default and the docstring of every key.

`describe` makes a schema from classes. The file schema.json holds the schema of titanlite's own
classes, so that keys can be explained and checked before torch is imported; a test keeps that file current.
`convert` checks a configuration against a schema.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import math
import textwrap
import types
import typing
from collections.abc import Collection, Iterator
from difflib import get_close_matches
from functools import cache, lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, Union

import tomli_w

from titanlite.config.amount import FORM, Amount, step_count
from titanlite.config.component import Component, ConfigError, full_name, known_list, suggest
from titanlite.config.locator import Locator
from titanlite.config.overrides import Bare, Word, as_list, plain_value
from titanlite.config.paths import IS_PATH, TAKES_URL, check_local, expand_home

FILE = Path(__file__).with_name("schema.json")
IMPORTS = ("job", "imports")  # section and key that name modules to import; top-level key for `prepare`
FIELD_TYPES = (
    "bool, int, float, str, Any, Literal, dataclasses, list[X], dict[str, X], tuple[X, ...], X | None"
)
SCALARS = {int: "int", float: "float", str: "str", bool: "bool", Any: "any"}
EXPECTED = {"int": "an integer", "float": "a number", "str": "a string", "bool": "true or false"}


class Node(TypedDict, total=False):
    """The schema of a value. `type` is int, float, str, bool, any, literal, list, tuple, dict, table (fixed
    keys) or choice (one of several tables, selected by a key)."""

    type: str
    doc: str
    required: bool
    default: str  # as TOML; for a choice: the name of the default choice
    optional: bool  # may be None, which TOML cannot express
    amount: bool  # for an int or float: may be an amount of training
    path: bool  # for a str: names a file or folder, and a leading `~` is expanded
    url: bool  # for a path: may be the URL of a storage
    values: list[Any]  # for a literal
    items: Node  # for a list, tuple or dict
    length: int  # for a tuple of fixed length
    keys: dict[str, Node]  # for a table
    kind: str  # for a choice: the name of the kind in messages
    key: str  # for a choice: the key that selects it, if not `name`
    choices: dict[str, Node]  # for a choice
    only: str  # for the table of a choice: the last part of the only key under which it is documented


@cache
def table(name: str) -> Node:
    """Return titanlite's schema `job` or `prepare`."""
    return json.loads(FILE.read_text(encoding="utf-8"))[name]


# ---- from classes


def describe(cls: type, docs: bool = False) -> Node:
    """Return the schema of a dataclass, with the choices registered now: not to be changed, because the next
    call returns it again. `docs`: include docstrings, which are read from the source files."""
    return _described(cls, docs, tuple(tuple(kind.choices.values()) for kind in Component.__subclasses__()))


@lru_cache(maxsize=16)
def _described(cls: type, docs: bool, registered: tuple[tuple[type, ...], ...]) -> Node:
    """Return the schema while these classes are registered. Cached: it takes 8 ms for a job."""
    return _describe(cls, docs)


def _describe(cls: type, docs: bool) -> Node:
    hints, texts = type_hints(cls), field_docs(cls) if docs else {}
    keys: dict[str, Node] = {}
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        try:
            node = _node(hints[field.name], docs)
        except TypeError as e:
            raise ConfigError(f"{full_name(cls)}.{field.name}: {e}") from None
        if docs and node["type"] != "table":
            node["doc"] = texts.get(field.name, "")
        if field.default is field.default_factory is dataclasses.MISSING:
            node["required"] = True
        elif (default := _default(field)) is not None and node["type"] != "table":
            node["default"] = default
        keys[field.name] = node
    return {"type": "table", "doc": inspect.getdoc(cls) or "" if docs else "", "keys": keys}


@cache
def type_hints(cls: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields. Cached: this took 3 of the 4 ms of loading a TOML file."""
    return typing.get_type_hints(cls, include_extras=True)


def _node(hint: Any, docs: bool) -> Node:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        node: Node = _node(args[0], docs)
        if step_count(hint):
            node["amount"] = True
        if IS_PATH in args:
            node["path"] = True
        if TAKES_URL in args:
            node["url"] = True
        return node
    if origin in (Union, types.UnionType) and len(set(args) - {type(None)}) == 1:
        (inner,) = set(args) - {type(None)}
        return {**_node(inner, docs), "optional": True}
    if isinstance(hint, type) and issubclass(hint, Component) and hint.is_kind():
        choices = {name: _describe(choice, docs) for name, choice in sorted(hint.choices.items())}
        for name, choice in hint.choices.items():
            if choice.only:
                choices[name] = {**choices[name], "only": choice.only}
        node = {"type": "choice", "kind": hint.kind, "choices": choices}
        return node if hint.key == "name" else {**node, "key": hint.key}
    if dataclasses.is_dataclass(hint):
        return _describe(typing.cast(type, hint), docs)
    if origin is Literal:
        return {"type": "literal", "values": list(args)}
    items = set(args[1:] if origin is dict else args) - {...}
    if origin in (list, tuple, dict) and len(items) == 1:
        node = {"type": origin.__name__, "items": _node(items.pop(), docs)}
        return {**node, "length": len(args)} if origin is tuple and ... not in args else node
    if hint not in SCALARS:
        name = hint.__name__ if isinstance(hint, type) else hint
        raise TypeError(f"fields of type {name} are not supported (supported: {FIELD_TYPES})")
    return {"type": SCALARS[hint]}


def _default(field: dataclasses.Field) -> str | None:
    """Return the default as TOML, or as the name of a choice or of several; None if the default is None."""
    factory = field.default_factory
    value = field.default if factory is dataclasses.MISSING else factory()
    if value is None:
        return None
    if isinstance(value, Component):
        return value.name
    if isinstance(value, list) and value and isinstance(value[0], Component):
        return str([component.name for component in value])
    if value in ({}, []):
        return str(value)
    return "" if dataclasses.is_dataclass(value) else tomli_w.dumps({"v": value}).partition("=")[2].strip()


@cache
def field_docs(cls: type) -> dict[str, str]:
    """Return the docstring under each field of a dataclass and its bases."""
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


# ---- checking


def convert(
    node: Node, tree: Any, choices_follow: bool = False, locator: Locator | None = None
) -> tuple[Any, list[ConfigError]]:
    """Return a tree with its values converted to the schema's types, and all errors in it.

    `choices_follow`: modules that are imported later may add choices, so tables of choices are not checked.
    `locator`: says which values are the file's; those that are left out are added to its `left_out`.
    """
    conversion = _Conversion(node, choices_follow, locator or Locator("", ""))
    return conversion.value(node, tree, ""), conversion.errors


def imports_of(tree: dict[str, Any]) -> tuple[str, Any]:
    """Return the key under which a tree names modules to import, and its value."""
    section, key = IMPORTS
    table = tree.get(section)
    return (f"{section}.{key}", table.get(key)) if isinstance(table, dict) else (key, tree.get(key))


class ChoiceError(ConfigError):
    """An error that may go away, or get a better hint, when more components are registered."""


class _Conversion:
    def __init__(self, root: Node, choices_follow: bool, locator: Locator):
        self.errors: list[ConfigError] = []
        self._root, self._choices_follow, self._locator = root, choices_follow, locator

    def value(self, node: Node, value: Any, key: str) -> Any:
        """Return the converted value; after an error any value."""
        kind = node["type"]
        if kind in ("table", "choice"):
            return self._table(node, plain_value(value) if isinstance(value, Word) else value, key)
        if isinstance(value, Bare) and kind not in ("bool", "any"):
            return self._complain(f"needs a value: {_expected(node) or _example(node)}", key)
        if kind == "any":
            return plain_value(value)
        word = isinstance(value, Word)
        if word:
            value = str(value) if kind == "str" else _whole(value) if kind == "int" else plain_value(value)
        if kind == "literal":
            allowed = node["values"]
            if value not in allowed or type(value) not in {type(a) for a in allowed}:
                self._complain(f"{value!r} is not allowed{suggest(str(value), allowed)}", key)
            return value
        if kind in ("list", "tuple"):
            return self._list(node, as_list(value), word, key)
        if kind == "dict":
            if not isinstance(value, dict):
                return self._complain(f"expected a table, got {value!r}", key)
            return {k: self.value(node["items"], v, f"{key}.{k}") for k, v in value.items()}
        if node.get("amount") and isinstance(value, str):
            value = self._amount(node, value, key)
            if isinstance(value, Amount):
                return value
        if kind == "float" and type(value) is int:
            return float(value)
        if SCALARS.get(type(value)) != kind:  # bool is not int, "8" is not 8
            self._complain(f"expected {_expected(node)}, got {value!r}", key)
        elif node.get("path"):
            try:
                path = expand_home(value)
                if not node.get("url"):
                    check_local(path)
                return path
            except ConfigError as e:
                self._complain(str(e), key)
        elif isinstance(value, float) and not math.isfinite(value):
            self._complain(f"expected a finite number, got {value!r}", key)
        return value

    def _amount(self, node: Node, text: str, key: str) -> Amount | int:
        """Return the amount of a text, or the number of an amount in steps; after an error any number."""
        try:
            amount = Amount.parse(text)
        except ConfigError as e:
            is_near = text[:1].isdigit()
            self._complain(str(e) if is_near else f"expected {_expected(node)}, got {text!r}", key)
            return 1
        return int(amount.value) if amount.unit == "steps" else amount

    def _list(self, node: Node, value: Any, word: bool, key: str) -> Any:
        is_nested = node["items"]["type"] in ("list", "tuple")
        entries = value if isinstance(value, list) else []
        is_flat = is_nested and entries and not any(isinstance(v, (list, dict, Word)) for v in entries)
        if isinstance(value, list) and not is_flat:  # flat: [5, 3] instead of [[5, 3]]
            if len(value) != node.get("length", len(value)):
                self._complain(f"expected {node['length']} values, got {len(value)}", key)
            return [self.value(node["items"], v, f"{key}.{i}") for i, v in enumerate(value)]
        if node["items"]["type"] in ("table", "choice"):
            how = f"[[{key}]] in a file, --{key}.0.KEY=... on the command line"
            return self._complain(f"expected a list of tables: {how}", key)
        example = _example(node, None if isinstance(value, dict) else str(value))
        how = f"--{key}='{example}'" if word else example
        kind = "list of lists" if is_nested else "list"
        return self._complain(f"expected a {kind}, got {value!r}; write {how}", key)

    def _table(self, node: Node, tree: Any, key: str) -> Any:
        if not isinstance(tree, dict):
            how = f"; write [{key}], with one bracket" if isinstance(tree, list) and tree else ""
            choices = node.get("choices", {})
            if isinstance(tree, str) and tree in choices:
                how = f"; write {key}.{node.get('key', 'name')}={tree}"
            elif isinstance(tree, str) and any("path" in choice["keys"] for choice in choices.values()):
                how = f"; write {key}.path={tree}"
            return self._complain(f"expected a table, got {tree!r}{how}", key)
        table, made = node, dict[str, Any]()
        if node["type"] == "choice":
            if self._choices_follow:
                return tree
            picked_by = node.get("key", "name")
            name = tree.get(picked_by, node.get("default"))
            name = str(name) if isinstance(name, Word) else name
            if name is None:
                return self._complain(f"missing `{picked_by}`{known_list(node['choices'])}", key, ChoiceError)
            if not isinstance(name, str) or name not in node["choices"]:
                known = suggest(str(name), node["choices"])
                own = "" if "did you mean" in known else "; one of your own needs its module in job.imports"
                text = f"unknown {node['kind']} {name!r}{known}{own}"
                return self._complain(text, f"{key}.{picked_by}", ChoiceError)
            table, made = node["choices"][name], {picked_by: name}
            tree = {k: v for k, v in tree.items() if k != picked_by}
        keys = table["keys"]
        for k, v in tree.items():
            where = f"{key}.{k}" if key else k
            if k in keys:
                made[k] = self.value(keys[k], v, where)
            elif self._belongs_to_replaced(node, key, k):
                text = f"left out: {node['kind']} {name!r}, chosen on the command line, has no such key"
                self._locator.left_out.append(str(self._locator.located(ConfigError(text, where))))
            else:
                kind = ChoiceError if node["type"] == "choice" else ConfigError
                self._complain(f"unknown key {k!r}{self._hint(k, where, node, keys)}", where, kind)
        for k, inner in keys.items():
            if k not in tree and inner.get("required"):
                self._complain(f"missing required key {k!r}", key)
        return made

    def _belongs_to_replaced(self, node: Node, key: str, unknown: str) -> bool:
        """Whether the file gives the unknown key to a component that the command line replaced by another. A
        key that the replaced component does not have either is a typing error."""
        overrides, picked_by = self._locator.overrides, node.get("key", "name")
        if node["type"] != "choice" or not overrides(f"{key}.{picked_by}") or overrides(f"{key}.{unknown}"):
            return False
        table = self._locator.table_in_file(key)
        replaced = node["choices"].get(str(table.get(picked_by, node.get("default"))))
        return unknown in table and (replaced is None or unknown in replaced["keys"])

    def _hint(self, unknown: str, where: str, node: Node, keys: Collection[str]) -> str:
        """Suggest a key in place of an unknown key of a table, or of a choice with `keys`."""
        owners = [repr(name) for name, choice in node.get("choices", {}).items() if unknown in choice["keys"]]
        if owners:
            *others, last = owners
            names = f"{', '.join(others)} and {last} have" if others else f"{last} has"
            return f"; {node['kind']} {names} it{known_list(keys)}"
        places = dict[str, set[str]]()  # last part of a key -> the keys
        for path in _paths(self._root):
            places.setdefault(path.rpartition(".")[2], set()).add(path)
        # At the top a key without its section is as likely as a misspelled section.
        near = get_close_matches(unknown, [*keys, *places], n=1) if where == unknown else [unknown]
        elsewhere = sorted(places.get(near[0], ())) if near and near[0] not in keys else []
        return suggest(unknown, keys, elsewhere, prefers_elsewhere=where == unknown)

    def _complain(self, message: str, key: str, kind: type[ConfigError] = ConfigError) -> None:
        self.errors.append(kind(message, key))


def _whole(word: Word) -> Any:
    """Parse a command-line word for an integer, which may have an exponent: `1e3` is 1000."""
    value = plain_value(word)
    if isinstance(value, float) and "e" in word.lower() and value.is_integer() and abs(value) < 1 << 53:
        return int(value)
    return value


def _paths(node: Node, path: str = "") -> Iterator[str]:
    """Yield the dotted keys, except those in lists."""
    for table in (node, *node.get("choices", {}).values()):
        for key, inner in table.get("keys", {}).items():
            where = f"{path}.{key}" if path else key
            yield where
            yield from _paths(inner, where)


def _expected(node: Node) -> str | None:
    """The values that a scalar takes, for a message; None for other nodes."""
    values = EXPECTED.get(node["type"])
    return f"{values} or {FORM}" if node.get("amount") else values


def _example(node: Node, text: str | None = None) -> str:
    """Return an example for a message: a list of the elements of `text`, or the values of a literal."""
    if node["type"] == "literal":
        return f"one of {', '.join(map(str, node['values']))}"
    if node.get("items", {}).get("type") in ("list", "tuple"):
        return f"[{_example(node['items'], text)}]"
    words = [word.strip() for word in (text or "x").strip("[]").split(",")]
    item = node.get("items", {"type": "any"})["type"]
    return f"[{', '.join(words if item in ('int', 'float', 'bool') else map(json.dumps, words))}]"
