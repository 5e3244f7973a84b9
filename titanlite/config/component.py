"""Components: classes that a TOML key, usually `name = "..."`, selects.

A kind (`class Optimizer(Component)`) owns a registry of choices. A choice (`class AdamW(Optimizer,
name="adamw")`) is a frozen dataclass: its fields are its TOML keys, its field docstrings are the reference,
and its `build()` makes the object. Declaring the class registers it.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import wraps
from typing import Any, ClassVar

Types = tuple[type, ...]


class ConfigError(ValueError):
    """An error in a configuration, a command line or another input. The message gives its place, the problem
    and the remedy.

    `key`: the dotted TOML key at fault, if there is one; Locator adds file and line. `errors`: the single
    errors, if this error reports several, one per line.
    """

    exit_code = 2

    def __init__(self, message: str, key: str | None = None, errors: Sequence[ConfigError] = ()):
        super().__init__(message, key)  # both are needed to unpickle the error on another rank
        self.key, self.errors = key, errors or (self,)

    def __str__(self) -> str:
        return self.args[0]


class Unreadable(ConfigError):
    """An input that cannot be read now, and perhaps later, such as a dataset on the hub."""


@contextmanager
def keys_in(section: str) -> Iterator[None]:
    """Put `SECTION.` in front of the key of a ConfigError of the body, whose key is relative to a section. An
    error without a key gets the section's.
    The keys of a job's tokenizer and of its cache, which sources use, remain as they are."""
    try:
        yield
    except ConfigError as e:
        if e.key and e.key.startswith(("tokenizer.", "data.cache_dir")):
            raise
        kind = Unreadable if isinstance(e, Unreadable) else ConfigError
        raise kind(str(e), f"{section}.{e.key}" if e.key else section) from None


def suggest(
    word: str, known: Iterable[object], elsewhere: Sequence[str] = (), prefers_elsewhere: bool = False
) -> str:
    """Return `; did you mean 'x'? (known: x, y)` for an unknown word: the nearest valid word and all valid
    words. A word that begins with the unknown one is near, too. `elsewhere`: suggestions if none is near; if
    `prefers_elsewhere`, in any case."""
    names = sorted(str(k) for k in known)
    begun = [name for name in names if name.startswith(f"{word}_")][:1]
    near, others = get_close_matches(word, names, n=1) or begun, elsewhere if len(elsewhere) <= 3 else ()
    close = (others or near) if prefers_elsewhere else (near or others)
    meant = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
    return f"{meant}{known_list(names)}"


def known_list(known: Iterable[object]) -> str:
    """Return ` (known: x, y)` with the words sorted; nothing if there are none."""
    names = ", ".join(sorted(map(str, known)))
    return f" (known: {names})" if names else ""


def check_at_least(section: object, least: int, *keys: str) -> None:
    """Raise ConfigError if the value of one of the keys of a section is below `least`."""
    for key in keys:
        if (value := getattr(section, key)) < least:
            raise ConfigError(f"{value} is below {least}", key)


class Component(ABC):
    """Base of every kind. A subclass of Component is a kind; a subclass of a kind with `name` is a choice; a
    subclass of a kind without `name` is a base class for choices.

    `kind`: the name of the kind in messages, by default its class's name in lower case. `key`: the TOML key
    that selects the choice. `makes`: the types that `build` may return. `only`: the last part of the only key
    under which the reference lists a choice, for one that all other keys refuse."""

    makes: ClassVar[Types]
    choices: ClassVar[dict[str, type[Component]]]
    kind: ClassVar[str]
    key: ClassVar[str] = "name"
    name: ClassVar[str]
    only: ClassVar[str] = ""

    def __init_subclass__(cls, name: str = "", kind: str = "", key: str = "name", makes: Types = (object,)):
        super().__init_subclass__()
        if build := cls.__dict__.get("build"):
            setattr(cls, "build", _checked(build))  # noqa: B010 -- kinds have different arguments of build()
        if not name and Component in cls.__bases__:
            cls.choices, cls.kind, cls.key, cls.makes = {}, kind or cls.__name__.lower(), key, makes
        elif name in cls.choices and full_name(cls) != full_name(cls.choices[name]):
            # A module that is imported again defines its classes again, under the same full name.
            raise TypeError(f"{name!r} already names {full_name(cls.choices[name])}; choose another name")
        elif name:
            cls.choices[name], cls.name = cls, name

    def __post_init__(self) -> None:  # noqa: B027 -- a kind need not override it
        """Raise ConfigError for wrong values. For a job, the check of a kind runs even if a choice's own does
        not call it."""

    def resolved(self) -> Component:
        """The component that a job uses and records: normally `self`. A component that only names a file
        returns the one that the file describes."""
        return self

    @property
    def label(self) -> str:
        """The component's name for messages, with the path that it reads, if any."""
        return label(self.name, getattr(self, "path", ""))

    @classmethod
    def is_kind(cls) -> bool:
        """Return True for a kind, False for a choice."""
        return "choices" in cls.__dict__


def label(name: str, path: str | Sequence[str]) -> str:
    """Return a component's name and paths for messages: `text data/a.jsonl, data/b.jsonl`."""
    paths = [path] if isinstance(path, str) else [*path[:3], *["..."] * (len(path) > 3)]
    return f"{name} {', '.join(paths)}".strip()


def _checked(build: Callable[..., Any]) -> Callable[..., Any]:
    """A component's `build` that raises ConfigError if it returns something of the wrong type."""

    @wraps(build)
    def checked(self: Component, *args: Any, **kwargs: Any) -> Any:
        made = build(self, *args, **kwargs)
        if isinstance(made, self.makes):
            return made
        expected = " or ".join(cls.__name__ for cls in self.makes)
        returned = "None" if made is None else f"an object of type {type(made).__name__}"
        raise ConfigError(f"{full_name(type(self))}.build returned {returned}; expected {expected}")

    return checked


def full_name(cls: type) -> str:
    """Return `package.module.Class`, for messages."""
    return f"{cls.__module__}.{cls.__qualname__}"
