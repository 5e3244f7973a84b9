"""write_shards: makes token shards from any iterable of documents, such as a generator or a Hugging Face
dataset."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.config import toml
from titanlite.config.component import ConfigError
from titanlite.data.shards import TokenShards, token_dtype, write_description, write_shard
from titanlite.data.tokenize_files import batches
from titanlite.files import new_folder
from titanlite.progress import Progress
from titanlite.tokenizers.base import Tokenizer

SHARD_TOKENS = 1 << 26  # 128 MiB of uint16

Document = str | Mapping[str, Any] | np.ndarray


def write_shards(
    documents: Iterable[Document],
    output: str | Path,
    tokenizer: Tokenizer,
    *,
    field: str = "text",
    shard_tokens: int = SHARD_TOKENS,
) -> TokenShards:
    """Tokenise `documents` into the dataset directory `output`, which `[[data.sources]] name = "tokens"`
    reads.

    A document is a text (str), a mapping that has its text under `field`, or an integer array [tokens] of
    token ids that is stored unchanged, special tokens included. Texts are framed by BOS and EOS. Empty
    documents are left out. Documents keep their order. Training shuffles sequences, not documents, so shuffle
    documents first if neighbours in `documents` should not share a sequence.

    The iterable is read once, in this process, and must end: limit an endless stream, for example with
    `itertools.islice`. Memory does not grow with the number of documents. A shard holds at least
    `shard_tokens` tokens, except for the last shard. `output` appears when it is complete; an error leaves
    nothing on the disk. For many gigabytes of text in files `titanlite prepare` is faster: it uses all cores,
    resumes, and filters.

    Raises ConfigError if `output` exists, if there are no documents, or for a document of another type, with
    its number, counted from 0."""
    output = Path(output)
    if os.path.lexists(output):
        raise ConfigError(f"{output} exists; choose another directory, or delete it")
    shards: list[dict[str, Any]] = []
    with (
        new_folder(output) as folder,
        Progress(desc=f"tokenising into {output.name}", unit="doc", unit_scale=True, delay=1) as bar,
    ):
        arrays = _token_ids(documents, tokenizer, field, bar)
        for first in arrays:
            shard = _until(shard_tokens, first, arrays)
            name = f"{len(shards):05}"
            shards.append(write_shard(folder, name, shard, token_dtype(tokenizer.vocab_size)))
        if not shards:
            raise ConfigError(f"{output}: there are no documents to write, or all are empty")
        origin = {"tokenizer": toml.as_tree(tokenizer.config)} if tokenizer.config else {}
        write_description(folder, tokenizer, shards, origin)
    return TokenShards(output)


def _until(shard_tokens: int, first: np.ndarray, rest: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield `first`, then arrays of `rest` until all together have `shard_tokens` tokens."""
    yield first
    num_tokens = len(first)
    while num_tokens < shard_tokens and (ids := next(rest, None)) is not None:
        yield ids
        num_tokens += len(ids)


def _token_ids(
    documents: Iterable[Document], tokenizer: Tokenizer, field: str, bar: Progress
) -> Iterator[np.ndarray]:
    """Yield the token ids of each document that is not empty. Raises ConfigError for ids outside the
    vocabulary."""
    contents = ((number, _content(number, document, field)) for number, document in enumerate(documents))
    for batch in batches((item for item in contents if len(item[1])), lambda item: len(item[1])):
        encoded = iter(tokenizer.encode_documents([text for _, text in batch if isinstance(text, str)]))
        for number, content in batch:
            ids = next(encoded) if isinstance(content, str) else content
            if ids.min() < 0 or ids.max() >= tokenizer.vocab_size:
                raise ConfigError(
                    f"document {number} has token ids from {ids.min()} to {ids.max()}; the tokenizer's are "
                    f"0 to {tokenizer.vocab_size - 1}"
                )
            yield ids
        bar.update(len(batch))


def _content(number: int, document: Document, field: str) -> str | np.ndarray:
    """Return a document's text or token ids. Raises ConfigError."""
    if isinstance(document, Mapping):
        if field not in document:
            raise ConfigError(f"document {number} has no field {field!r} (fields: {', '.join(document)})")
        document = document[field]
    if isinstance(document, str):
        try:
            document.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"document {number} holds a lone surrogate, which is not text") from None
        return document
    if isinstance(document, np.ndarray) and document.ndim == 1 and document.dtype.kind in "iu":
        return document
    raise ConfigError(
        f"document {number} is {type(document).__name__}; expected str, a mapping with a str under "
        f"{field!r}, or a numpy array [tokens] of integers"
    )
