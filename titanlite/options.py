"""Options of the command line: argparse with titanlite's errors, and the values that several verbs take.

Does not import torch, so that help and errors in a command appear in a fraction of a second.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from titanlite.config.component import ConfigError, suggest
from titanlite.config.imports import ALLOW_IMPORTS
from titanlite.config.overrides import Bare, split_overrides
from titanlite.config.paths import check_local, expand_home

LIMIT = 1e30  # of numbers on the command line; products of larger ones may overflow


class Options(argparse.ArgumentParser):
    """A parser of options. `-` and `_` in names are equal, names cannot be abbreviated, and errors are raised
    as ConfigError."""

    def __init__(self, **kwargs: Any):
        self._known: dict[str, str] = {}
        super().__init__(allow_abbrev=False, **kwargs)

    def add(self, *names: str, **kwargs: Any) -> None:
        """Add an argument as `add_argument` does. For a Path, a leading `~` is expanded. A function that is
        the type of an argument may raise ConfigError."""
        if kwargs.get("type") is Path:
            kwargs["type"] = _path
        if inspect.isfunction(kwargs.get("type")):
            kwargs["type"] = _told(kwargs["type"])
        self._known |= {name.replace("-", "_"): name for name in names if name.startswith("--")}
        self.add_argument(*names, **kwargs)

    def read_known(self, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Return the options, and the words that are not options. Raises ConfigError."""
        return self.parse_known_args([self._spelled(word) for word in argv])

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Return the options. Raises ConfigError, also for a word that is not an option."""
        options, rest = self.read_known(argv)
        if rest:
            word = rest[0].partition("=")[0]
            known = suggest(word, self.known) if word.startswith("-") else ""
            self.error(f"unknown {'option' if known else 'argument'} {word!r}{known}")
        return options

    @property
    def known(self) -> list[str]:
        """The names of the options, such as --top-k."""
        return list(self._known.values())

    def error(self, message: str) -> Any:
        """Raise ConfigError. argparse would print the usage and exit."""
        raise ConfigError(f"{message}; see `{self.prog} --help`")

    def _spelled(self, word: str) -> str:
        name, equals, value = word.partition("=")
        return self._known.get(name.replace("-", "_"), name) + equals + value


def _path(text: str) -> Path:
    path = expand_home(text)
    check_local(path)
    return Path(path)


def _told(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return `read` with errors that argparse reports as they are."""

    @functools.wraps(read)
    def told(text: str) -> Any:
        try:
            return read(text)
        except ConfigError as e:
            raise argparse.ArgumentTypeError(str(e)) from None

    return told


def add_allow_imports(options: Options) -> None:
    options.add(ALLOW_IMPORTS, action="store_true", help="run the modules that the job imports")


def take_flag(argv: Sequence[str], flag: str) -> tuple[bool, list[str]]:
    """Return whether a command line has `flag`, and the command line without it."""
    rest = [word for word in argv if word.replace("_", "-") != flag]
    return len(rest) < len(argv), rest


def take_numbers(
    overrides: Sequence[str], names: Sequence[str], least: int = 0
) -> tuple[dict[str, int], list[str]]:
    """Return the options of these names, which take integers from `least`, and the overrides without them.
    Raises ConfigError."""
    own, others = dict[str, int](), list[str]()
    for key, value in split_overrides(overrides):
        if key not in names:
            others.append(f"--{key}" if isinstance(value, Bare) else f"--{key}={value}")
        elif not value.isdecimal() or int(value) < least:
            option = key.replace("_", "-")
            raise ConfigError(f"command line, --{option}: {value!r} is not an integer from {least}")
        else:
            own[key] = int(value)
    return own, others


def number_of(noun: str, may_be_zero: bool = False) -> Callable[[str], float]:
    """Return the type of an option that is a number above 0, or 0 with `may_be_zero`, and at most LIMIT.
    `noun`: for messages, with an example."""

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not (0 < number <= LIMIT or (may_be_zero and number == 0)):
            hint = f"; the largest is {LIMIT:g}" if number > LIMIT else ""
            raise argparse.ArgumentTypeError(f"{text!r} is not a {noun}{hint}")
        return number

    return parse
