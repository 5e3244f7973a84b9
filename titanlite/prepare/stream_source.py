"""The source `stream`: trains on the documents of a stream while they are read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from titanlite.config import toml
from titanlite.config.component import keys_in
from titanlite.data.sources import StreamedSource
from titanlite.prepare.streams import Document, DocumentStream, text_of

REVISION = "revision"  # the key of a stream that names the version of its documents, if it has one


@dataclass(frozen=True, kw_only=True)
class Stream(StreamedSource, name="stream"):
    """Documents that are tokenised while the run trains on them: `stream = { name = "huggingface", path =
    "allenai/c4", config = "en" }` is a Hugging Face dataset in streaming mode. A stream is the only source of
    training, is read in its order, without shuffling, and begins again at its end, for each loader worker at
    the end of its own share. A run resumes exactly, but only on as many data-parallel ranks and loader
    workers."""

    stream: DocumentStream
    """The stream of documents."""
    field: str = "text"
    """The field or column of the stream's documents that holds the text. In a WebDataset, the suffix of the
    members with the text, such as `txt`."""
    bad_documents: Literal["stop", "skip"] = "stop"
    """What to do with a document without text: a null, a missing field, another type, or characters that are
    not Unicode. `stop` ends the run; `skip` leaves it out, and logs the number. It may change on resume."""

    @property
    def path(self) -> str:
        """What the stream reads, for messages."""
        return str(getattr(self.stream, "path", "") or self.stream.name)

    @property
    def max_documents(self) -> int:
        return self.stream.max_documents

    @property
    def label(self) -> str:
        revision = getattr(self.stream, REVISION, "")
        return f"{super().label} at {revision}" if revision else super().label

    def pinned(self, recorded: Mapping[str, Any]) -> Stream:
        before, now = recorded.get("stream", {}), toml.as_tree(self.stream)
        others = (key for key in now if key != REVISION)
        if now.get(REVISION) == "" and before.get(REVISION) and all(before.get(k) == now[k] for k in others):
            return replace(self, stream=replace(self.stream, **{REVISION: before[REVISION]}))
        with keys_in("stream"):
            return replace(self, stream=self.stream.pinned())

    @property
    def skips_bad_documents(self) -> bool:
        return self.bad_documents == "skip"

    def documents(self) -> Iterable[Document]:
        with keys_in("stream"):
            return self.stream.build()

    def text(self, document: Document, place: str) -> str:
        return text_of(document, self.field, place)

    def fingerprint(self) -> str:
        with keys_in("stream"):
            key = repr((self.stream.fingerprint(), self.field, self.max_documents))
        return hashlib.sha256(f"stream {key}".encode()).hexdigest()[:16]
