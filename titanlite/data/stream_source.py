"""The source `stream`, which trains on documents while they are read, and the contract of streams of
documents, which `stream = { name = "..." }` selects.

A stream has no shards: its documents can only be read in their order. So its sequences depend on the numbers
of ranks and loader workers that share the documents, and much that needs numbered sequences is refused
(stream_sequences.py)."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from titanlite.config import toml
from titanlite.config.component import Component, ConfigError, check_at_least, keys_in
from titanlite.data.sharded_tokens import ShardedTokens
from titanlite.data.sources import Source
from titanlite.tokenizers.base import Tokenizer

REVISION = "revision"  # the key of a stream that names the version of its documents, if it has one

Document = str | Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class DocumentStream(Component, kind="stream", makes=(Iterable,)):
    """Base of streams: `[from_stream] name = "..."` of a preparation, and `stream = { name = "..." }` of a
    source, select a subclass by its name. A subclass implements `build`."""

    max_documents: int = 0
    """Documents after which the stream is left, or begins again as a source of training; 0: all."""

    def __post_init__(self) -> None:
        check_at_least(self, 0, "max_documents")

    @abstractmethod
    def build(self) -> Iterable[Document]:
        """Return the documents from the first one on: texts, or mappings that have their text under `field`.
        Every call must give the same documents in the same order.

        If the iterable has the methods `state_dict()`, which returns JSON, and `load_state_dict(state)`, it
        continues at once after an interruption. Any other iterable is read again from the beginning.

        If it has `num_shards` and `shard(num_shards, index)`, as a Hugging Face dataset has, ranks and loader
        workers that train on the stream read only their own shards. Raises ConfigError for missing or
        unreadable input."""

    def pinned(self) -> DocumentStream:
        """Return a stream that reads today's documents at any later time, such as one that names the newest
        commit; by default, this stream. A preparation that was interrupted continues with its result, and so
        does a run, if the key that changes is `revision`, which is empty for the newest documents."""
        return self

    def fingerprint(self) -> str:
        """Return a text that changes whenever the documents change: by default, the stream's keys."""
        return repr(toml.as_tree(self))


@dataclass(frozen=True, kw_only=True)
class Stream(Source, name="stream"):
    """Documents tokenised while the run trains on them, in their order: `stream = { name = "huggingface",
    path = "allenai/c4", config = "en" }`. The only source of training. A resume needs as many data-parallel
    ranks and loader workers."""

    stream: DocumentStream
    """The stream of documents."""
    field: str = "text"
    """Field or column with the text; in a WebDataset, the suffix of the members with the text, such as
    `txt`."""
    bad_documents: Literal["stop", "skip"] = "stop"
    """At a document without text (null, missing, another type, not Unicode), `stop` the run, or `skip` it and
    log the number. It may change on resume."""
    only = "sources"  # not validation_sources

    @property
    def uses_cache(self) -> bool:
        return False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_epochs:
            raise ConfigError("the epochs of a stream are not counted; limit training.steps", "max_epochs")

    def build(self, tokenizer: Tokenizer, cache_dir: Path) -> ShardedTokens:
        raise ConfigError("a stream can only be trained on, as the only one of data.sources", "name")

    @property
    def path(self) -> str:
        """The path or name of the stream, for messages."""
        return str(getattr(self.stream, "path", "") or self.stream.name)

    @property
    def label(self) -> str:
        revision = getattr(self.stream, REVISION, "")
        return f"{super().label} at {revision}" if revision else super().label

    def pinned(self, recorded: Mapping[str, Any]) -> Stream:
        """Return a source that reads today's documents at any later time, such as one that names the newest
        commit. `recorded`: the keys of the pinned source of the run that is resumed, whose documents it reads
        if its keys allow; {} for a new run."""
        before, now = recorded.get("stream", {}), toml.as_tree(self.stream)
        others = (key for key in now if key != REVISION)
        if now.get(REVISION) == "" and before.get(REVISION) and all(before.get(k) == now[k] for k in others):
            return replace(self, stream=replace(self.stream, **{REVISION: before[REVISION]}))
        with keys_in("stream"):
            return replace(self, stream=self.stream.pinned())

    def documents(self) -> Iterable[Document]:
        """Return the documents from the first one on. Raises ConfigError for missing or unreadable input."""
        with keys_in("stream"):
            return self.stream.build()

    def text(self, document: Document, place: str) -> str:
        """Return the text of a document, which `place` names in messages. Raises ConfigError if it has
        none."""
        return text_of(document, self.field, place)

    def fingerprint(self) -> str:
        """Return a short hash that changes whenever the documents change."""
        with keys_in("stream"):
            key = repr((self.stream.fingerprint(), self.field, self.stream.max_documents))
        return hashlib.sha256(f"stream {key}".encode()).hexdigest()[:16]


def text_of(document: Document, field: str, place: str, is_strict: bool = True) -> Any:
    """Return the text of a document. `place`: names the document in messages. Raises ConfigError for anything
    else; for a null, or text that is not Unicode, only if `is_strict`."""
    if isinstance(document, Mapping) and field not in document:
        raise ConfigError(f"{place} has no {field!r} (it has: {', '.join(document)})", "field")
    text = document[field] if isinstance(document, Mapping) else document
    where = f" under {field!r}" if isinstance(document, Mapping) else ""
    if not isinstance(text, str) and (is_strict or text is not None):
        kind = "null" if text is None else type(text).__name__
        raise ConfigError(f"{place} holds {kind}{where}, not text", "field")
    if is_strict and isinstance(text, str):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"{place} holds a lone surrogate{where}, which is not text", "field") from None
    return text
