"""Megabytes of text per second of `titanlite prepare`, compared with the tokenizer library's batch encoding.

    python benchmarks/prepare.py [--megabytes 400] [--output benchmarks/results/prepare.json]

The text is the standard library's source in one JSON Lines file, one source file per line, repeated (with a
number in front of each copy) up to the requested size. "tiktoken" measures only `encode_ordinary_batch` of
documents in memory, with one thread per core. "titanlite" measures the complete work from the file to the
dataset: starting processes, reading, parsing, tokenising, shuffling, writing, hashing, syncing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.environment import environment  # noqa: E402
from titanlite.corpus.filters import ExactDuplicates, Filter, Length, NearDuplicates  # noqa: E402
from titanlite.corpus.pipeline import prepare  # noqa: E402
from titanlite.corpus.stages import PrepareOptions  # noqa: E402
from titanlite.data.text_sources import stdlib_files  # noqa: E402
from titanlite.data.worker_pool import num_cores  # noqa: E402
from titanlite.tokenizers.tiktoken import Tiktoken  # noqa: E402

REPEATS = 3


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/prepare.json")
    parser.add_argument("--filters", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    tokenizer = Tiktoken(path=str(ROOT / "assets/tokenizer/stdlib.tiktoken")).build()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "corpus.jsonl"
        texts = write_corpus(file, options.megabytes * 10**6)
        size = sum(len(text.encode()) for text in texts)

        def titanlite(*filters: Filter) -> Callable[[int], None]:
            def run(number: int) -> None:
                name = f"{'-'.join(f.name for f in filters)}{number}"
                prepare([file], Path(folder) / f"out-{name}", tokenizer, PrepareOptions(filters=filters))

            return run

        library = tokenizer._encoding  # type: ignore[attr-defined]

        def tiktoken(number: int) -> None:
            for begin in range(0, len(texts), 4096):  # in batches, so that the lists fit in memory
                library.encode_ordinary_batch(texts[begin : begin + 4096], num_threads=num_cores())

        runs = {"tiktoken encode_ordinary_batch": tiktoken, "titanlite": titanlite()}
        for f in (Length(), ExactDuplicates(), NearDuplicates()) if options.filters else ():
            runs[f"titanlite, filter {f.name}"] = titanlite(f)
        measured = [{"what": name, **rate(run, size)} for name, run in runs.items()]
    for line in measured:
        line["of_tiktoken"] = round(line["megabytes_per_second"] / measured[0]["megabytes_per_second"], 3)
    result = {
        "what": "megabytes of UTF-8 text per second",
        "megabytes": size / 1e6,
        "documents": len(texts),
        "cores": num_cores(),
        "repeats": REPEATS,
        "results": measured,
        "env": environment("titanlite", "tiktoken", "numpy", "datasketch"),
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    for line in measured:
        print(json.dumps(line))


def write_corpus(file: Path, size: int) -> list[str]:
    """Write `size` characters of documents as lines of `file`. Returns the documents."""
    sources, texts, number = [f.read_text(encoding="utf-8") for f in stdlib_files()], list[str](), 0
    sources = [text for text in sources if text]
    while size > 0:
        text = f"# {number}\n{sources[number % len(sources)]}"
        texts.append(text)
        size -= len(text)
        number += 1
    with open(file, "w", encoding="utf-8") as f:
        f.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    return texts


def rate(run: Callable[[int], None], size: int) -> dict[str, Any]:
    """Return the median and the range over REPEATS runs."""
    speeds = []
    for number in range(REPEATS):
        began = time.perf_counter()
        run(number)
        speeds.append(size / 1e6 / (time.perf_counter() - began))
    middle = statistics.median(speeds)
    return {"megabytes_per_second": round(middle, 2), "range": [round(min(speeds), 2), round(max(speeds), 2)]}


if __name__ == "__main__":
    main()
