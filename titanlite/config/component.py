"""Components: whatever a TOML `name = "..."` (or the key that a kind names) can select.

A kind (`class Optimizer(Component)`) owns a registry; a choice (`class AdamW(Optimizer, name="adamw")`) is a
frozen dataclass whose fields are its TOML keys, whose field docstrings are the reference, and whose `build()`
makes the thing. Declaring the class is registering it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, ClassVar


class ConfigError(ValueError):
    """A mistake in what the user gave us. The message says where it is, what is wrong and what would be
    right.

    `key` is the dotted TOML path at fault, where there is one; loading a file turns it into file and line.
    `errors`: the single errors of a report of several, whose message has a line for each.
    """

    exit_code = 2

    def __init__(self, message: str, key: str | None = None, errors: Sequence[ConfigError] = ()):
        super().__init__(message, key)  # both: errors travel between ranks
        self.key, self.errors = key, errors or (self,)

    def __str__(self) -> str:
        return self.args[0]


def suggest(word: str, known: Iterable[object], elsewhere: Sequence[str] = ()) -> str:
    """`'; did you mean 'x'? (known: x, y)'` for an unknown word: the nearest valid one and the valid set.
    `elsewhere`: what it may mean if none is near."""
    names = sorted(str(k) for k in known)
    close = get_close_matches(word, names, n=1) or (elsewhere if len(elsewhere) <= 3 else ())
    meant = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
    return f"{meant} (known: {', '.join(names)})"


class Component:
    """Base of every kind. Subclass Component without `name` to open a kind, and the kind with `name` to add a
    choice to it. A subclass of a kind without `name` is a base class for choices. `kind`:
    what messages call a kind, if not by its class's name. `key`: the TOML key that selects the choice."""

    choices: ClassVar[dict[str, type[Component]]]
    kind: ClassVar[str]
    key: ClassVar[str] = "name"
    name: ClassVar[str]

    def __init_subclass__(
        cls, *, name: str | None = None, kind: str | None = None, key: str = "name", **kwargs: Any
    ):
        super().__init_subclass__(**kwargs)
        if name is None and Component not in cls.__bases__:
            return
        if name is None:
            cls.choices, cls.kind, cls.key = {}, kind or cls.__name__.lower(), key
        elif name in cls.choices and not _same_class(cls, cls.choices[name]):
            raise TypeError(f"{name!r} already names {cls.choices[name]}")
        else:
            cls.choices[name], cls.name = cls, name

    @property
    def label(self) -> str:
        """The component for messages: its name, and the path that it reads if it reads one."""
        return label(self.name, getattr(self, "path", ""))

    @classmethod
    def is_kind(cls) -> bool:
        """True for a kind, False for a choice."""
        return "choices" in cls.__dict__


def label(name: str, path: str | Sequence[str]) -> str:
    """`text data/a.jsonl, data/b.jsonl`: a component's name and what it reads, for messages."""
    paths = [path] if isinstance(path, str) else [*path[:3], *["..."] * (len(path) > 3)]
    return f"{name} {', '.join(paths)}".strip()


def _same_class(a: type, b: type) -> bool:
    # A module imported anew defines its classes anew.
    return (a.__module__, a.__qualname__) == (b.__module__, b.__qualname__)
