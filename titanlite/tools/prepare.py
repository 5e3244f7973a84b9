"""`titanlite prepare INPUT... --output DIR`: tokenise text files into shards for the source `tokens`.

A .jsonl file has one document a line; any other file is one document. Text must be UTF-8. The directory
appears whole or not at all.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from titanlite.config import toml
from titanlite.config.component import ConfigError
from titanlite.data.text import documents, find_files, write_shards
from titanlite.data.tokenizer import Tiktoken, Tokenizer


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """What the command line's `--tokenizer.*` is read as."""

    tokenizer: Tokenizer = field(default_factory=Tiktoken)


def main(argv: Sequence[str]) -> int:
    """Print what was made of the input."""
    parser = argparse.ArgumentParser(
        prog="titanlite prepare", description=__doc__, allow_abbrev=False,
        epilog="--tokenizer.name, --tokenizer.path, ... choose the tokenizer, as [tokenizer] in TOML",
    )  # fmt: skip
    parser.add_argument("input", nargs="+", help="files, directories and globs")
    parser.add_argument("--output", type=Path, required=True, help="the directory to make")
    parser.add_argument("--field", default="text", help="the field of a .jsonl line that holds the text")
    options, overrides = parser.parse_known_args(argv)
    if options.output.exists():
        raise ConfigError(f"{options.output} exists; choose another --output, or delete it")
    codec = toml.build(Prepare, *toml.read(None, overrides)).tokenizer.build()
    files = find_files(options.input, "input")
    total = sum(f.stat().st_size for f in files)
    shards = write_shards(options.output, documents(files, options.field), codec, total)
    print(
        f"{options.output}: {shards.num_documents:,} documents, {shards.num_tokens:,} tokens "
        f"({total / shards.num_tokens:.2f} bytes a token)"
    )
    return 0
