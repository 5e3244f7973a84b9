"""A stream from outside the package: a torch IterableDataset that keeps its state. To train on it, put this
file into the current directory or install it, and write

    [job]
    imports = ["line_stream"]

    [[data.sources]]
    name = "stream"
    stream = { name = "lines", path = "lines.txt" }

into the TOML file. In the TOML file of `titanlite prepare`, write

    imports = ["line_stream"]
    output = "data/lines"

    [from_stream]
    name = "lines"
    path = "lines.txt"

The stream would work without `state_dict` and `load_state_dict`, too, but a resumed run or preparation would
read it again from the beginning.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.utils.data import IterableDataset

from titanlite.data.stream_source import DocumentStream


class Lines(IterableDataset[str]):
    """The lines of a file."""

    def __init__(self, path: str):
        self.path, self.offset = path, 0

    def __iter__(self) -> Iterator[str]:
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            while line := file.readline():
                self.offset = file.tell()
                yield line.decode().rstrip()

    def state_dict(self) -> dict[str, int]:
        return {"offset": self.offset}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.offset = state["offset"]


@dataclass(frozen=True, kw_only=True)
class LineStream(DocumentStream, name="lines"):
    """One document per line of a file."""

    path: str
    """The file."""

    def build(self) -> Lines:
        return Lines(self.path)
