"""A filter from outside the package, for `titanlite prepare`: it removes documents with long lines, such as
minified code. To use it, put this file into the current directory or install it, and write

    imports = ["length_filter"]

    [[filters]]
    name = "line_length"
    max_characters = 500
"""

from __future__ import annotations

from dataclasses import dataclass

from titanlite.config.component import ConfigError
from titanlite.corpus.filters import Filter, FilterFunction


@dataclass(frozen=True, kw_only=True)
class LineLength(Filter, name="line_length"):
    """Removes documents that have a line of too many characters."""

    max_characters: int = 1000
    """Characters in a line; a document with a longer line is removed."""

    def __post_init__(self) -> None:
        if self.max_characters < 1:
            raise ConfigError(f"{self.max_characters} is below 1", "max_characters")

    def build(self) -> FilterFunction:
        def reason_to_remove(text: str) -> str | None:
            longest = max(map(len, text.splitlines()), default=0)
            if longest <= self.max_characters:
                return None
            return f"a line of {longest} characters, more than {self.max_characters}"

        return reason_to_remove
