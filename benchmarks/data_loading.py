"""Tokens a second that one process reads from prepared shards, beside plain slices of a memory map.

    python benchmarks/data_loading.py [--tokens 200000000] [--output benchmarks/results/data_loading.json]

A dataset of random documents (log-normal lengths, median 600 tokens, uint16) is read as a training process
reads it: batches of int64 inputs and targets from shuffled rows, in this process or through worker processes.
"memmap" is the bare minimum beside it: the same number of tokens from random places of the file, sliced,
converted and stacked, without an order to follow, hashes, documents or exact resumption.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from environment import environment

from titanlite.data.loader import Data, MicroBatches, SequenceLoader
from titanlite.data.shards import token_dtype, write_description, write_shard
from titanlite.data.sources import Tokens
from titanlite.data.tokenizer import Tiktoken

ROOT = Path(__file__).resolve().parents[1]
SHAPES = ((2048, 8), (8192, 2))  # seq_len, rows of a micro-batch
SECONDS, REPEATS = 1.0, 5


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=200_000_000)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/data_loading.json")
    options = parser.parse_args()
    codec = Tiktoken(path=str(ROOT / "assets/tokenizer/stdlib.tiktoken")).build()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "dataset"
        write_dataset(path, codec, options.tokens)
        measured = []
        for seq_len, rows in SHAPES:
            measured.append({"reader": "memmap", **rate(memmap_reader(path, seq_len, rows), seq_len, rows)})
            report(measured[-1])
            for keys in (
                {"packing": "chunk"},
                {"packing": "chunk", "mask_documents": True},
                {"packing": "best_fit"},
                {"packing": "best_fit", "mask_documents": True},
            ):
                data = Data(sources=[Tokens(path=str(path))], cache_dir=f"{folder}/cache", **keys)
                made = data.build(codec, seq_len=seq_len, seed=0)
                for num_workers in (0, 1, 2):
                    order = MicroBatches(0, rows, rows, 0, 1)
                    batches = SequenceLoader(made, order, num_workers, pin_memory=False)
                    speed = rate(lambda batches=batches: next(batches), seq_len, rows)
                    measured.append({"reader": "titanlite", **keys, "num_workers": num_workers, **speed})
                    report(measured[-1])
    result = {
        "what": "tokens a second that one process reads",
        "tokens": options.tokens,
        "seconds": SECONDS,
        "repeats": REPEATS,
        "results": measured,
        "env": environment("titanlite", "torch", "numpy"),
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")


def write_dataset(path: Path, codec: Any, tokens: int) -> None:
    """Documents of random tokens in shards of 2^26."""
    rng, dtype, entries = np.random.default_rng(0), token_dtype(codec.vocab_size), []
    path.mkdir()
    while tokens > 0:
        size = min(tokens, 1 << 26)
        stream = rng.integers(0, codec.vocab_size, size, dtype=dtype)
        ends = np.cumsum(rng.lognormal(np.log(600), 1.0, size // 300).astype(np.int64) + 2)
        documents = np.split(stream, ends[ends < size])
        entries.append(write_shard(path, f"{len(entries):05}", documents, dtype))
        tokens -= size
    write_description(path, codec, entries, {})


def memmap_reader(path: Path, seq_len: int, rows: int) -> Callable[[], Any]:
    """Batches from random places of the first shard."""
    stream, rng = np.memmap(path / "00000.bin", "<u2", mode="r"), np.random.default_rng(0)

    def read() -> tuple[torch.Tensor, torch.Tensor]:
        starts = rng.integers(0, len(stream) - seq_len - 1, rows)
        taken = np.stack([stream[s : s + seq_len + 1].astype(np.int64) for s in starts])
        return torch.from_numpy(taken[:, :-1]), torch.from_numpy(taken[:, 1:])

    return read


def rate(read: Callable[[], Any], seq_len: int, rows: int) -> dict[str, Any]:
    """Tokens a second: best, median and worst of a few stretches of some seconds."""
    for _ in range(10):
        read()
    speeds = []
    for _ in range(REPEATS):
        began, batches = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - began) < SECONDS:
            read()
            batches += 1
        speeds.append(round(batches * seq_len * rows / elapsed))
    low, middle, high = sorted(speeds)[0], sorted(speeds)[REPEATS // 2], sorted(speeds)[-1]
    shape = {"seq_len": seq_len, "micro_batch": rows}
    return shape | {"tokens_per_second": middle, "worst": low, "best": high}


def report(line: dict[str, Any]) -> None:
    """Print one result."""
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
