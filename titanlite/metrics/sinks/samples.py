"""The sink samples.txt: the generated texts, and questions of tasks with their scores. At a resume after step
s and a rewind to it, the texts of later steps move to samples.superseded.txt."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath

from titanlite.metrics.records import append, cut
from titanlite.metrics.sinks.base import Event, Values, Writer


class Samples(Writer):
    """Each text under a line with its step."""

    def __init__(self, path: PurePath, from_step: int):
        self._path = path
        cut(path, split_samples, step_of_sample, from_step)

    def sample(self, step: int, text: str) -> None:
        append(self._path, f"--- step {step}\n{text}\n".encode(errors="replace"))

    def event(self, step: int, event: Event, about: Values) -> None:
        if event == "rewound":
            cut(self._path, split_samples, step_of_sample, step)


def split_samples(content: bytes) -> Sequence[bytes]:
    """The samples of a file, each with its header."""
    return [s for s in re.split(rb"^(?=--- step \d+$)", content, flags=re.MULTILINE) if s]


def step_of_sample(sample: bytes) -> int:
    """The step of a sample; 0 for text before the first header. Raises ValueError for a damaged sample."""
    sample.decode()
    header = re.match(rb"--- step (\d+)$", sample, flags=re.MULTILINE)
    if header is None and b"\0" in sample:
        raise ValueError("a file system shows NULs where data was not written before a power loss")
    return int(header[1]) if header else 0  # text before the first sample stays
