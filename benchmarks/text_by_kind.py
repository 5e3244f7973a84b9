"""Three datasets of different kinds, and two tasks, from text that needs no download: the files of the
standard library and of all installed packages. train_configs/qwen3_30m.toml trains on them.

    python benchmarks/text_by_kind.py [--folder outputs/text_by_kind] [--every 1]

code   Python modules without their docstrings
c      C, C++ and CUDA sources and headers
prose  the docstrings of Python modules, one document per module; Markdown, reStructuredText, package
       metadata and licences

Every passage is in one kind only. Documents that equal or resemble an earlier one (`near_duplicates` of
`titanlite prepare`, over all kinds) are removed. One file in 33, chosen by the hash of its text, is held out
with all that is made of it: `held_out/` has the datasets for validation, `tasks/` the questions
(text_tasks.py). A tokenizer with 16,384 ids is trained on an eighth of the training documents. `--every 20`
reads only one file in twenty, to try it out.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import inspect
import json
import re
import shutil
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.package_text import MIN_BYTES, file_text, package_files, package_versions  # noqa: E402
from benchmarks.text_tasks import write_tasks  # noqa: E402
from titanlite.corpus.dedup import first_of_each  # noqa: E402
from titanlite.corpus.filters import ExactDuplicates, NearDuplicates  # noqa: E402
from titanlite.data.shards import TokenShards  # noqa: E402
from titanlite.data.worker_pool import num_cores, worker_pool  # noqa: E402

FOLDER = Path("outputs/text_by_kind")
KINDS = ("code", "c", "prose")
C_SUFFIXES = {".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp"}
PROSE_SUFFIXES, PROSE_NAMES = {".md", ".rst"}, {"METADATA", "LICENSE", "COPYING"}
SUFFIXES = {".py"} | C_SUFFIXES | PROSE_SUFFIXES
HELD_OUT_SHARE = 33  # one file in so many
VOCAB_SIZE, TOKENIZER_SHARE = 16_384, 8
FILES_PER_CALL = 64


class Document(NamedTuple):
    """A text of one kind. `bands`: uint64 values; documents that share the value of a band are duplicates."""

    digest: str
    kind: str
    package: str
    held_out: bool
    text: str
    bands: np.ndarray


def main() -> None:
    """Make everything and print what is in it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--every", type=int, default=1, help="read one file in so many")
    options = parser.parse_args()
    shutil.rmtree(options.folder, ignore_errors=True)
    about = make(options.folder, options.every)
    (options.folder / "summary.json").write_text(json.dumps(about, indent=1) + "\n")
    print(json.dumps({key: value for key, value in about.items() if key != "packages"}, indent=1))


def make(folder: Path, every: int) -> dict[str, Any]:
    """Make datasets, tokenizer and tasks in `folder`. Returns their numbers."""
    began = time.perf_counter()
    documents = sorted(read_documents(every), key=lambda document: (document.digest, document.kind))
    counts = Counter(document.kind for document in documents)
    documents = without_duplicates(documents)
    tokenizer = folder / "tokenizer.tiktoken"
    train_tokenizer([d.text for d in documents if not d.held_out][::TOKENIZER_SHARE], tokenizer)
    kinds: dict[str, dict[str, Any]] = {}
    held_out = {}
    for kind in KINDS:
        train, held_out[kind] = (
            [d.text for d in documents if d.kind == kind and d.held_out == of_held_out]
            for of_held_out in (False, True)
        )
        kinds[kind] = {
            "documents_found": counts[kind],
            "train": tokenise(train, folder / kind, tokenizer),
            "held_out": tokenise(held_out[kind], folder / "held_out" / kind, tokenizer),
        }
    return {
        "kinds": kinds,
        "tasks": write_tasks(folder / "tasks", held_out),
        "sha256": hashlib.sha256("".join(d.digest + d.kind for d in documents).encode()).hexdigest(),
        "seconds": round(time.perf_counter() - began, 1),
        "packages": package_versions(bytes_by_package(documents)),
    }


def train_tokenizer(texts: Sequence[str], output: Path) -> None:
    """Train a tokenizer with VOCAB_SIZE ids."""
    sample = write_lines(output.with_name("sample.jsonl"), texts)
    titanlite("tokenizer", "train", sample, "--vocab-size", VOCAB_SIZE - 2, "--output", output)
    sample.unlink()


def tokenise(texts: Sequence[str], output: Path, tokenizer: Path) -> dict[str, int]:
    """Make a dataset. Returns its documents, bytes and tokens."""
    file = write_lines(output.with_suffix(".jsonl"), texts)
    titanlite("prepare", file, f"--output={output}", f"--tokenizer.path={tokenizer}")
    file.unlink()
    size = sum(len(text.encode()) for text in texts)
    return {"documents": len(texts), "bytes": size, "tokens": TokenShards(output).num_tokens}


def bytes_by_package(documents: Sequence[Document]) -> Counter[str]:
    """The bytes of text of each package."""
    packages = Counter[str]()
    for document in documents:
        packages[document.package] += len(document.text.encode())
    return packages


def read_documents(every: int) -> Iterator[Document]:
    """The documents of all files, on all cores."""
    files = list(package_files(SUFFIXES, PROSE_NAMES))[::every]
    calls = [files[i : i + FILES_PER_CALL] for i in range(0, len(files), FILES_PER_CALL)]
    with worker_pool(num_cores(), _begin, None) as pool:
        for documents in pool.map(_documents, calls):
            yield from documents


def _begin(_: None) -> None:
    warnings.simplefilter("ignore", SyntaxWarning)  # of escapes in the sources that are parsed


def _documents(files: Sequence[tuple[str, Path]]) -> list[Document]:
    signatures = [section.build() for section in (ExactDuplicates(), NearDuplicates())]
    documents = []
    for package, path in files:
        text = file_text(path)
        if text is None:
            continue
        digest = hashlib.sha256(text.encode()).hexdigest()
        held_out = int(digest, 16) % HELD_OUT_SHARE == 0
        for kind, part in by_kind(path, text):
            if len(part.encode()) >= MIN_BYTES:
                bands = np.concatenate([signature.compute(part) for signature in signatures])  # type: ignore[union-attr]
                documents.append(Document(digest, kind, package, held_out, part, bands))
    return documents


def by_kind(path: Path, text: str) -> Iterator[tuple[str, str]]:
    """The parts of a file with their kinds."""
    if path.suffix == ".py":
        try:
            code, docstrings = taken_apart(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return  # written for another Python
        yield "code", code
        yield "prose", "\n\n".join(docstrings)
    else:
        yield "c" if path.suffix in C_SUFFIXES else "prose", text


def taken_apart(source: str) -> tuple[str, list[str]]:
    """A Python module without its docstrings, and the docstrings, in their order. Docstrings that share a
    line with code stay in the code."""
    source = "\n".join(re.split(r"\r\n?|\n", source))  # as ast counts lines
    lines = source.split("\n")
    docstrings: list[tuple[int, int, str]] = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        text = ast.get_docstring(node, clean=False)
        if text is None:
            continue
        place = node.body[0]
        begin, end = place.lineno - 1, place.end_lineno or place.lineno
        before = lines[begin].encode()[: place.col_offset]
        after = lines[end - 1].encode()[place.end_col_offset :]
        if not before.strip() and not after.strip():
            docstrings.append((begin, end, inspect.cleandoc(text)))
    docstrings.sort()
    for begin, end, _ in reversed(docstrings):
        del lines[begin:end]
    return "\n".join(lines), [text for _, _, text in docstrings if text]


def without_duplicates(documents: Sequence[Document]) -> list[Document]:
    """The documents that neither equal nor resemble an earlier one."""
    bands = np.stack([document.bands for document in documents])
    first = first_of_each(len(documents), (np.ascontiguousarray(column) for column in bands.T))
    return [document for i, document in enumerate(documents) if first[i] == i]


def write_lines(file: Path, texts: Sequence[str]) -> Path:
    """Write texts as JSON Lines. Returns the file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8") as f:
        f.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    return file


def titanlite(*words: object) -> None:
    """Run a titanlite command."""
    subprocess.run([sys.executable, "-m", "titanlite.cli", *map(str, words)], check=True)


if __name__ == "__main__":
    main()
