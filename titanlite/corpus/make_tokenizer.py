"""titanlite tokenizer train [FILE ...] --output FILE [--vocab-size N] [--field NAME] [--max-document-mib N]
titanlite tokenizer show [CONFIG.toml] [TEXT] [--tokenizer.name=... --tokenizer.path=...] [--allow-imports]

`train` learns byte-level BPE with Hugging Face's `tokenizers` and writes tiktoken's file format. It reads the
files, or by default the standard library's source; the same text gives the same file. --vocab-size: number of
tokens without special tokens (8190). --field: field of a .jsonl line that holds the text (text).
--max-document-mib: size of the largest document to read (64). An existing output is not overwritten. The
tokenizer in assets/ was made by `titanlite tokenizer train --vocab-size 8190 --output stdlib.tiktoken` with
the CPython named in assets/tokenizer/README.md. `show` tokenises a text, or standard input, and prints one
token per line, and as hexadecimal bytes if these are only some of a character's.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

from titanlite.config import toml
from titanlite.config.component import ConfigError, suggest
from titanlite.config.imports import ALLOW_IMPORTS
from titanlite.config.overrides import split_words
from titanlite.config.paths import check_new
from titanlite.data.text_files import Limits, documents
from titanlite.data.text_formats import find_files
from titanlite.data.text_sources import stdlib_files
from titanlite.files import write_atomically
from titanlite.job import load_job
from titanlite.options import Options, take_flag
from titanlite.tokenizers.base import Tokenizer, TokenizerConfig
from titanlite.tokenizers.tiktoken import LLAMA3_PATTERN, Tiktoken
from titanlite.tokenizers.tokenizer_json import byte_alphabet

REPLACED = "\ufffd"  # stands for bytes that are not UTF-8


def main(argv: Sequence[str]) -> int:
    """Run the action `train` or `show`."""
    action, *rest = argv
    if action == "train":
        return _train(rest)
    if action == "show":
        return _show(rest)
    raise ConfigError(f"unknown action {action!r}{suggest(action, ['train', 'show'])}")


def _train(argv: Sequence[str]) -> int:
    parser = Options(prog="titanlite tokenizer train")
    parser.add("input", nargs="*")
    parser.add("--field", default="text")
    parser.add("--vocab-size", type=int, default=8190)
    parser.add("--max-document-mib", type=int, default=Limits.max_document_mib)
    parser.add("--output", type=Path, required=True)
    options = parser.read(argv)
    if options.vocab_size < 256:
        raise ConfigError("--vocab-size is below 256, the number of bytes")
    check_new(options.output, "--output")
    files = find_files(options.input, "input", is_told=True) if options.input else stdlib_files()
    limits = Limits(max_document_mib=options.max_document_mib)
    texts = (document.text for document in documents(files, options.field, limits=limits))
    tokens = train_bpe(texts, options.vocab_size)
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(options.output, b"".join(lines))
    source = f"{len(files):,} files" if len(files) > 1 else f"{files[0]}"
    print(f"{options.output}: {len(tokens):,} tokens (256 bytes, {len(tokens) - 256:,} merges) from {source}")
    return 0


@dataclass(frozen=True, kw_only=True)
class Show:
    """The keys of `titanlite tokenizer show` on the command line."""

    tokenizer: TokenizerConfig = field(default_factory=Tiktoken)


def _show(argv: Sequence[str]) -> int:
    allow, argv = take_flag(argv, ALLOW_IMPORTS)
    words, overrides = split_words(argv)
    config = words.pop(0) if words and words[0].endswith(".toml") else None
    if config:
        selected = load_job(config, overrides, None, allow).tokenizer
    else:
        tree, locator = toml.read(None, overrides)
        selected = toml.build(Show, tree, locator).tokenizer
    tokenizer = selected.build()
    print(f"{selected.name}: {tokenizer.vocab_size:,} ids, fingerprint {tokenizer.fingerprint}")
    for name, i in (("BOS", tokenizer.bos), ("EOS", tokenizer.eos)):
        print(f"{name} {i} {tokenizer.decode([i])!r}")
    text = " ".join(words) if words else "" if sys.stdin.isatty() else _decode(sys.stdin.buffer.read())
    ids = tokenizer.encode(text)
    for i, data in zip(ids, _token_bytes(tokenizer, text, ids)):
        shown = tokenizer.decode_continuation([i])
        print(f"{i:>7}  {data.hex(' ').upper() if data and REPLACED in shown else repr(shown)}")
    if ids:
        print(f"{len(ids):,} tokens, {len(text):,} characters ({len(text) / len(ids):.2f} per token)")
    return 0


def _token_bytes(tokenizer: Tokenizer, text: str, ids: Sequence[int]) -> list[bytes]:
    """Return the bytes of the text that each id stands for; empty if the tokenizer changes the text."""
    table = tokenizer.bytes_per_token()
    sizes = [0] * len(ids) if table is None else table[ids].tolist()
    data = text.encode("utf-8", "replace")
    data = b" " * (sum(sizes) - len(data)) + data  # some tokenizers put a space in front
    if sum(sizes) != len(data):
        return [b""] * len(ids)
    ends = accumulate(sizes)
    return [data[end - size : end] for end, size in zip(ends, sizes)]


def _decode(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise ConfigError(f"standard input: not UTF-8 at byte {e.start}") from None


def train_bpe(texts: Iterable[str], vocab_size: int) -> list[bytes]:
    """Learn byte-level BPE. Returns the tokens in the order of their ranks: the 256 bytes, then one per
    merge."""
    try:
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
    except ImportError:
        raise ConfigError("training needs tokenizers: pip install 'titanlite[tokenizer]'") from None
    bpe = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(LLAMA3_PATTERN), behavior="isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    # The library's progress bar would print blank lines on standard output.
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(texts, trainer)
    to_byte = byte_alphabet()
    ranks = sorted(bpe.get_vocab().items(), key=lambda entry: entry[1])
    tokens = [bytes(to_byte[c] for c in token) for token, _ in ranks]
    # In tiktoken a merge has the rank of its token. Single bytes may have any rank, so they come first.
    return [bytes([b]) for b in range(256)] + [t for t in tokens if len(t) > 1]
