"""titanlite data verify DIR ...                 re-hash datasets made by `titanlite prepare`
titanlite data show DIR --row=N [--packing=chunk] [--seq_len=2048] [--tokenizer.path=...]
titanlite data show CONFIG.toml --row=N [--section.key=value ...] [--allow-imports]

`show` prints rows as text, document by document: row N of a dataset, or training row N of a run (row N is in
step N // global_batch_size + 1). --rows=K prints K rows from there. --allow-imports runs the modules that the
configuration imports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from titanlite.commands import ALLOW_IMPORTS, take_flag, take_numbers
from titanlite.config import toml
from titanlite.config.component import ConfigError, suggest
from titanlite.data.packing import PACKINGS, PackedRows
from titanlite.data.shards import TokenShards
from titanlite.job import load_job
from titanlite.log import for_terminal
from titanlite.tokenizers.base import TextCodec, Tokenizer
from titanlite.tokenizers.tiktoken import Tiktoken


@dataclass(frozen=True, kw_only=True)
class Show:
    """What `show` reads of the command line, for a dataset."""

    seq_len: int = 2048
    packing: Literal["chunk", "best_fit"] = "chunk"
    cache_dir: str = "outputs/cache"
    tokenizer: Tokenizer = field(default_factory=Tiktoken)


def main(argv: Sequence[str]) -> int:
    """Run an action; the first dataset that is not what was written ends with exit code 2."""
    action, *rest = argv
    if action == "verify":
        return _verify([Path(p) for p in rest])
    if action == "show":
        return _show(rest)
    raise ConfigError(f"unknown action {action!r}{suggest(action, ['show', 'verify'])}")


def _verify(paths: Sequence[Path]) -> int:
    if not paths:
        raise ConfigError("name at least one directory with a dataset.json")
    for path in paths:
        shards = TokenShards(path)
        shards.verify()
        print(
            f"{path}: {shards.num_documents:,} documents, {shards.num_tokens:,} tokens, every byte as written"
        )
    return 0


def _show(argv: Sequence[str]) -> int:
    allow, argv = take_flag(argv, ALLOW_IMPORTS)
    if not argv or argv[0].startswith("--"):
        raise ConfigError("name a dataset directory or a configuration to show rows of")
    path, overrides = argv[0], argv[1:]
    own, others = take_numbers(overrides, ["row", "rows"])
    first, count = own.get("row", 0), own.get("rows", 1)
    if path.endswith(".toml"):
        job = load_job(path, others, None, allow)
        codec = job.tokenizer.build()
        rows = job.data.build(codec, seq_len=job.training.seq_len, seed=job.training.seed)
        for number in range(first, first + count):
            packed, row = rows.origin(number)
            print(f"==== training row {number:,}: row {row:,} of {packed.shards.path}")
            _print_row(packed, row, codec)
        return 0
    packed, codec = _open(path, others)
    for row in range(first, first + count):
        if row >= len(packed):
            raise ConfigError(f"{path} has {len(packed):,} rows of {packed.seq_len} tokens, from 0", "row")
        print(f"==== row {row:,} of {len(packed):,}")
        _print_row(packed, row, codec)
    return 0


def _open(path: str, overrides: Sequence[str]) -> tuple[PackedRows, TextCodec]:
    shards = TokenShards(path)
    tree, locator = toml.read(None, overrides)
    tree.setdefault("tokenizer", shards.prepared.get("tokenizer", {}))
    show = toml.build(Show, tree, locator)
    codec = show.tokenizer.build()
    if codec.fingerprint != shards.tokenizer:
        raise ConfigError(
            f"{path} was made with tokenizer {shards.tokenizer}, this one is {codec.fingerprint}: give the "
            "right one with --tokenizer.name, --tokenizer.path, ..."
        )
    return PACKINGS[show.packing](shards, show.seq_len, Path(show.cache_dir), True), codec


def _print_row(packed: PackedRows, row: int, codec: TextCodec) -> None:
    starts, lengths = packed.pieces(row)
    for start, length in zip(starts.tolist(), lengths.tolist()):
        document, offset = packed.shards.locate(start)
        print(f"---- document {document:,}, its tokens {offset:,} to {offset + length - 1:,}")
        print(for_terminal(codec.decode(packed.shards.read(start, length).tolist())))
    if padding := packed.seq_len + 1 - int(lengths.sum()):
        print(f"---- {padding:,} tokens of padding")
