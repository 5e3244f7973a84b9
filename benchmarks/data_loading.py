"""Tokens per second that one process reads from prepared shards, compared with slices of a memory map.

    python benchmarks/data_loading.py [--tokens 200000000] [--output benchmarks/results/data_loading.json]

A dataset of random documents (log-normal lengths, median 600 tokens, uint16) is read as by a training
process: batches of int64 inputs and targets from shuffled sequences, in this process or through worker
processes. "memmap" is a lower bound for the work: the same number of tokens from random positions of the
file, sliced, converted and stacked, without a data order, hashes, documents or exact resumption. First, or
with --compare only, the loader and torch's DataLoader read the same sequences in turns."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.environment import environment  # noqa: E402
from titanlite.data.dataset import Data, SequenceDataset  # noqa: E402
from titanlite.data.loader import MicroBatches, SequenceLoader  # noqa: E402
from titanlite.data.shards import token_dtype, write_description, write_shard  # noqa: E402
from titanlite.data.sources import Tokens  # noqa: E402
from titanlite.data.step_sizes import StepSizes  # noqa: E402
from titanlite.tokenizers.tiktoken import Tiktoken  # noqa: E402

SHAPES = ((2048, 8), (8192, 2))  # seq_len, sequences of a micro-batch
SECONDS, REPEATS = 1.0, 5
TURNS, BATCHES = 60, 250


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=200_000_000)
    parser.add_argument(
        "--compare", action="store_true", help="only compare the loader with torch's DataLoader"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/data_loading.json")
    options = parser.parse_args()
    tokenizer = Tiktoken(path=str(ROOT / "assets/tokenizer/stdlib.tiktoken")).build()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "dataset"
        write_dataset(path, tokenizer, options.tokens)
        compared = [
            line
            for seq_len, sequences in SHAPES
            for line in compare(Data(sources=[Tokens(path=str(path))]), tokenizer, seq_len, sequences)
        ]
        measured = []
        for seq_len, sequences in () if options.compare else SHAPES:
            measured.append(
                {"reader": "memmap", **rate(memmap_reader(path, seq_len, sequences), seq_len, sequences)}
            )
            report(measured[-1])
            for keys in (
                {"packing": "chunk"},
                {"packing": "chunk", "mask_documents": True},
                {"packing": "best_fit"},
                {"packing": "best_fit", "mask_documents": True},
            ):
                data = Data(sources=[Tokens(path=str(path))], cache_dir=f"{folder}/cache", **keys)
                made = data.build(tokenizer, seq_len=seq_len, seed=0)
                for num_workers in (0, 1, 2):
                    order = MicroBatches(0, StepSizes.constant(sequences), sequences, 0, 1)
                    batches = SequenceLoader(made, order, num_workers, pin_memory=False)
                    speed = rate(lambda batches=batches: next(batches), seq_len, sequences)
                    measured.append({"reader": "titanlite", **keys, "num_workers": num_workers, **speed})
                    report(measured[-1])
    result = {
        "what": "tokens per second that one process reads",
        "tokens": options.tokens,
        "seconds": SECONDS,
        "repeats": REPEATS,
        "results": measured,
        "beside_torchs_data_loader": compared,
        "load_average": os.getloadavg(),
        "env": environment("titanlite", "torch", "numpy"),
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")


def compare(data: Data, tokenizer: Any, seq_len: int, sequences: int) -> list[dict[str, Any]]:
    """Measure the loader and torch's DataLoader on the same sequences, in turns, so that the load of the
    machine affects both equally. Also measure the CPU time of the training process and its workers, which
    hardly depends on that load."""
    made, order, lines = (
        data.build(tokenizer, seq_len=seq_len, seed=0),
        MicroBatches(0, StepSizes.constant(sequences), sequences, 0, 1),
        [],
    )
    for num_workers in (0, 2):
        readers = {
            "torch": Reader(data_loader(made, order, num_workers)),
            "titanlite": Reader(SequenceLoader(made, order, num_workers, pin_memory=False)),
        }
        for turn in range(TURNS):
            for reader in list(readers.values())[
                :: 1 if turn % 2 else -1
            ]:  # the second reader of a turn has warm caches
                reader.turn()
        shape = {"seq_len": seq_len, "micro_batch": sequences, "num_workers": num_workers}
        for name, reader in readers.items():
            speed = round(BATCHES * seq_len * sequences / sorted(reader.seconds)[TURNS // 2])
            line = {"reader": name, **shape, "tokens_per_second": speed, "cpu_us_per_batch": reader.cpu_us()}
            report(line)
            lines.append(line | {"seconds_of_turns": [round(s, 5) for s in reader.seconds]})
        torchs, ours = readers.values()
        turns = sorted(a / b for a, b in zip(torchs.seconds, ours.seconds))
        ratios = {
            "median_speed": round(turns[TURNS // 2], 3),
            "best_speed": round(min(torchs.seconds) / min(ours.seconds), 3),
            "cpu": round(ours.cpu_us() / torchs.cpu_us(), 3),
        }
        lines.append({"reader": "titanlite / torch", **shape, **ratios})
        report(lines[-1])
    return lines


class Reader:
    """Reads batches from a loader and measures wall time and CPU time."""

    def __init__(self, loader: Iterable[Any]):
        before = set(multiprocessing.active_children())
        self._batches, self.seconds = iter(loader), list[float]()
        self._own = 0.0  # CPU seconds of this process
        next(self._batches)
        self._workers = [child.pid for child in set(multiprocessing.active_children()) - before]
        self._began = sum(cpu_s(pid) for pid in self._workers)

    def turn(self) -> None:
        """Read BATCHES batches after a few that are not measured."""
        for _ in range(10):
            next(self._batches)
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(BATCHES):
            next(self._batches)
        self.seconds.append(time.perf_counter() - began)
        self._own += time.process_time() - cpu

    def cpu_us(self) -> int:
        """Return the CPU time per batch in microseconds, in this process and its workers."""
        workers = (sum(cpu_s(pid) for pid in self._workers) - self._began) / (BATCHES + 10)
        return round((self._own / BATCHES + workers) / len(self.seconds) * 1e6)


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def data_loader(made: SequenceDataset, order: MicroBatches, num_workers: int) -> DataLoader:
    """Return torch's DataLoader with the settings of titanlite's loader."""
    return DataLoader(
        made,
        batch_sampler=order,
        num_workers=num_workers,
        collate_fn=lambda batch: batch,
        prefetch_factor=4 if num_workers else None,
    )


def write_dataset(path: Path, tokenizer: Any, tokens: int) -> None:
    """Write documents of random tokens in shards of 2^26 tokens."""
    rng, dtype, entries = np.random.default_rng(0), token_dtype(tokenizer.vocab_size), []
    path.mkdir()
    while tokens > 0:
        size = min(tokens, 1 << 26)
        stream = rng.integers(0, tokenizer.vocab_size, size, dtype=dtype)
        ends = np.cumsum(rng.lognormal(np.log(600), 1.0, size // 300).astype(np.int64) + 2)
        documents = np.split(stream, ends[ends < size])
        entries.append(write_shard(path, f"{len(entries):05}", documents, dtype))
        tokens -= size
    write_description(path, tokenizer, entries, {})


def memmap_reader(path: Path, seq_len: int, sequences: int) -> Callable[[], Any]:
    """Return a function that reads batches from random positions of the first shard."""
    stream, rng = np.memmap(path / "00000.bin", "<u2", mode="r"), np.random.default_rng(0)

    def read() -> tuple[torch.Tensor, torch.Tensor]:
        starts = rng.integers(0, len(stream) - seq_len - 1, sequences)
        taken = np.stack([stream[s : s + seq_len + 1].astype(np.int64) for s in starts])
        return torch.from_numpy(taken[:, :-1]), torch.from_numpy(taken[:, 1:])

    return read


def rate(read: Callable[[], Any], seq_len: int, sequences: int) -> dict[str, Any]:
    """Return tokens per second: the best, median and worst of REPEATS measurements of SECONDS each."""
    for _ in range(10):
        read()
    speeds = []
    for _ in range(REPEATS):
        began, batches = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - began) < SECONDS:
            read()
            batches += 1
        speeds.append(round(batches * seq_len * sequences / elapsed))
    low, middle, high = sorted(speeds)[0], sorted(speeds)[REPEATS // 2], sorted(speeds)[-1]
    shape = {"seq_len": seq_len, "micro_batch": sequences}
    return shape | {"tokens_per_second": middle, "worst": low, "best": high}


def report(line: dict[str, Any]) -> None:
    """Print one result."""
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
