"""Documents out of text files, and the one path from documents to shards.

A .txt (or any other) file is one document; a .jsonl file has one document a line, under a field. Text must be
UTF-8: a file that is not is an error naming file and byte, never skipped or patched. Both `titanlite prepare`
and sources of raw text go through `write_shards`, so they give the same shards.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from tqdm import tqdm

from titanlite.config.component import ConfigError
from titanlite.data.shards import ShardWriter, TokenShards
from titanlite.data.tokenizer import TextCodec

BATCH_DOCUMENTS = 256  # handed to the tokenizer's threads at once


def find_files(patterns: Iterable[str], key: str) -> list[Path]:
    """Files named by paths, directories (all .txt and .jsonl below) and globs, sorted by path, each once."""
    files: dict[Path, Path] = {}  # by what they resolve to: one file under two names is read once
    for pattern in patterns:
        literal = Path(pattern)  # a name may hold a glob's characters
        found = [literal] if literal.exists() else [Path(p) for p in glob.glob(pattern, recursive=True)]
        if not found:
            raise ConfigError(f"no such file: {pattern!r} (relative paths start at {Path.cwd()})", key)
        for path in found:
            below = path.rglob("*") if path.is_dir() else [path]
            wanted = (p for p in below if p.is_file() and (p == path or p.suffix in (".txt", ".jsonl")))
            files |= {p.resolve(): p for p in wanted}
    return sorted(files.values())


def is_jsonl(file: Path) -> bool:
    """Whether the file has a document a line."""
    return file.suffix == ".jsonl"


def content_sha256(files: Iterable[Path]) -> str:
    """One hash over the content of all files, in order."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(hashlib.sha256(_read(file)).digest())
    return digest.hexdigest()


def documents(files: Iterable[Path], field: str) -> Iterator[tuple[str, int]]:
    """Each document's text and how many bytes of input it stands for; empty documents are left out."""
    for file in files:
        if is_jsonl(file):
            yield from _jsonl_documents(file, field)
        elif text := _decode(data := _read(file), file):
            yield text, len(data)


def _jsonl_documents(file: Path, field: str) -> Iterator[tuple[str, int]]:
    for number, line in enumerate(_lines(file), 1):
        if not line.strip():
            continue
        try:
            text = json.loads(_decode(line, file, number))[field]
            if not isinstance(text, str):
                raise ConfigError(f"{file}:{number}: field {field!r} is not a string")
            text.encode()  # JSON can spell half a character, a lone surrogate
        except ConfigError:
            raise
        except (KeyError, TypeError):
            raise ConfigError(f"{file}:{number}: no field {field!r} in this line") from None
        except UnicodeEncodeError:
            raise ConfigError(
                f"{file}:{number}: field {field!r} holds a lone surrogate, which is no text"
            ) from None
        except (ValueError, RecursionError) as e:
            raise ConfigError(f"{file}:{number}: not valid JSON: {e}") from None
        if text:
            yield text, len(line)


def _lines(file: Path) -> Iterator[bytes]:
    try:
        with open(file, "rb") as lines:
            yield from lines
    except OSError as e:
        raise ConfigError(f"{file}: {e.strerror}") from None


def write_shards(
    path: Path, docs: Iterable[tuple[str, int]], codec: TextCodec, total_bytes: int
) -> TokenShards:
    """Tokenise `docs` on all cores into shards at `path`, with a progress bar; all or nothing."""
    docs, threads = iter(docs), os.cpu_count() or 1
    path.parent.mkdir(parents=True, exist_ok=True)
    bar = tqdm(total=total_bytes, unit="B", unit_scale=True, desc=f"tokenising into {path}", mininterval=0.5)
    with bar, ShardWriter(path, codec) as writer:
        while batch := list(islice(docs, BATCH_DOCUMENTS)):
            for ids in codec.encode_documents([text for text, _ in batch], threads):
                writer.add(ids)
            bar.update(sum(size for _, size in batch))
            bar.set_postfix(documents=writer.num_documents, tokens=writer.num_tokens, refresh=False)
        if not writer.num_documents:
            raise ConfigError("the corpus is empty: no text in its files")
    return TokenShards(path)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as e:
        raise ConfigError(f"{file}: {e.strerror}") from None


def _decode(data: bytes, file: Path, line: int | None = None) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as e:
        place = f"{file}:{line}" if line else str(file)
        raise ConfigError(
            f"{place}: not UTF-8 at byte {e.start}: convert it first, nothing is guessed"
        ) from None
