"""A data source from outside the package: documents that a Python generator yields. To use it, put this file
into the current directory or install it, and write

    [job]
    imports = ["iterable_source"]

    [[data.sources]]
    name = "sums"
    count = 100_000

The first run tokenises the documents into data.cache_dir. Any generator will do: replace `documents` by one
that reads your files or your database, and `fingerprint` by a text that identifies their content.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from titanlite.config.component import ConfigError
from titanlite.corpus.document_source import DocumentSource

VERSION = 1  # raise it when `documents` yields something else for the same keys


@dataclass(frozen=True, kw_only=True)
class Sums(DocumentSource, name="sums"):
    """Additions, such as "27 + 45 = 72"."""

    count: int = 10_000
    """Number of documents."""
    max_term: int = 99
    """Largest term."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"{self.count} is below 1", "count")

    def fingerprint(self) -> str:
        return f"{VERSION} {self.count} {self.max_term}"

    def documents(self) -> Iterator[str]:
        rng = random.Random(0)
        for _ in range(self.count):
            a, b = rng.randint(0, self.max_term), rng.randint(0, self.max_term)
            yield f"{a} + {b} = {a + b}"
