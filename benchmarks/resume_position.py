"""Time from opening the data to the first batch, and the size of the loader's state, for starts at sequence 0
to 10^12.

    python benchmarks/resume_position.py [--output benchmarks/results/resume_position.json]

There are two sources of random text, one of a few sequences (10^12 sequences are billions of its epochs), one
of some thousands. Every start opens the sources again and shares only the operating system's file cache with
the previous start. The text is tokenised once, which is not measured."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.environment import environment  # noqa: E402
from titanlite.data import order  # noqa: E402
from titanlite.data.dataset import Data  # noqa: E402
from titanlite.data.loader import MicroBatches, SequenceLoader  # noqa: E402
from titanlite.data.step_sizes import StepSizes  # noqa: E402
from titanlite.data.text_sources import Text  # noqa: E402
from titanlite.tokenizers.bytes import Bytes  # noqa: E402

POSITIONS = (0, 10**6, 10**9, 10**12)
SEQ_LEN, MICRO_BATCH, REPEATS = 1024, 8, 9


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/resume_position.json")
    output = parser.parse_args().output
    with tempfile.TemporaryDirectory() as folder:
        data = make_data(Path(folder))
        measured = [measure(data, number, num_workers) for num_workers in (0, 2) for number in POSITIONS]
    result = {
        "what": "seconds from opening prepared sources to the first micro-batch",
        "seq_len": SEQ_LEN,
        "micro_batch": MICRO_BATCH,
        "repeats": REPEATS,
        "results": measured,
        "env": environment("titanlite", "torch", "numpy"),
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n")
    for line in measured:
        print(json.dumps(line))


def make_data(folder: Path) -> Data:
    """Return two tokenised sources: a few sequences, and some thousands of sequences."""
    rng, paths = random.Random(0), []
    for size in (10_000, 8_000_000):
        paths.append(folder / f"{size}.txt")
        paths[-1].write_text("".join(rng.choices("abcdefghijklmnop ", k=size)))
    data = Data(sources=[Text(path=[str(p)]) for p in paths], cache_dir=str(folder / "cache"))
    data.build(Bytes().build(), seq_len=SEQ_LEN, seed=0)
    return data


def measure(data: Data, number: int, num_workers: int) -> dict[str, Any]:
    """Return the median and the range over REPEATS starts at a sequence, after one that is not counted."""
    times = [start_s(data, number, num_workers) for _ in range(REPEATS + 1)][1:]
    return {
        "sequence": number,
        "num_workers": num_workers,
        "first_batch_s": statistics.median(times),
        "min_s": min(times),
        "max_s": max(times),
        "state_bytes": len(json.dumps(number)),  # the loader's whole state: the number of sequences consumed
    }


def start_s(data: Data, number: int, num_workers: int) -> float:
    """Return the seconds of one start."""
    order._table.cache_clear()
    order._round_keys.cache_clear()
    began = time.perf_counter()
    sequences = data.build(Bytes().build(), seq_len=SEQ_LEN, seed=0)
    start = MicroBatches(
        first_sequence=number,
        step_sizes=StepSizes.constant(MICRO_BATCH),
        micro_batch_size=MICRO_BATCH,
        rank=0,
        num_ranks=1,
    )
    next(SequenceLoader(sequences, start, num_workers, pin_memory=False))
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
