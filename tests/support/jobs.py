"""Small jobs for tests: a two-block Llama on raw bytes of a generated corpus. A run takes seconds."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

from titanlite.job import Job, load_job

ROOT = Path(__file__).resolve().parents[2]

BASE = """
[model]
name = "llama3"
flavor = "debug"

[model.overrides]
dim = 32
n_layers = 2
n_heads = 4
n_kv_heads = 2
head_dim = 8
hidden_dim = 64
vocab_size = 258

[tokenizer]
name = "bytes"

[training]
seq_len = 32
local_batch_size = 4
global_batch_size = 8
steps = 8
deterministic = true

[optimizer]
name = "adamw"
lr = 3e-3

[lr_scheduler]
warmup_steps = 2
total_steps = 16

[checkpoint]
interval = 4

[metrics]
log_freq = 1
sinks = []

[data]
num_workers = 0
holdout_sequences = 10

[[data.sources]]
name = "text"
path = ["CORPUS/a.jsonl"]
weight = 3

[[data.sources]]
name = "text"
path = ["CORPUS/b.txt"]
"""


def write_corpus(folder: Path, seed: int = 0) -> Path:
    """Write a.jsonl and b.txt with made-up words. b.txt is so small that a run of 8 steps reads it more than
    once."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 7))) for _ in range(50)]

    def text(n: int) -> str:
        return " ".join(rng.choices(words, k=n))

    (folder / "a.jsonl").write_text(
        "".join(json.dumps({"text": text(rng.randint(5, 60))}) + "\n" for _ in range(60))
    )
    (folder / "b.txt").write_text(text(90))
    return folder


def write_toml(folder: Path, corpus: Path) -> Path:
    """The base job as a file; ranks may write it at the same time."""
    path = folder / "job.toml"
    mine = folder / f".job-{os.getpid()}"
    mine.write_text(BASE.replace("CORPUS", str(corpus)))
    os.replace(mine, path)
    return path


def make_job(folder: Path, corpus: Path, *overrides: str, world_size: int = 1, name: str = "run") -> Job:
    """The base job with its run folder under `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    where = [f"--job.dump_folder={folder / name}", f"--data.cache_dir={corpus / 'cache'}"]
    return load_job(write_toml(folder, corpus), [*where, *overrides], world_size, allow_imports=True)


def tiny_arguments(folder: Path, corpus: Path, name: str = "run") -> list[str]:
    """The base job as arguments of `train`: its file, its run folder and the cache of its data."""
    return [
        str(write_toml(folder, corpus)),
        f"--job.dump_folder={folder / name}",
        f"--data.cache_dir={corpus / 'cache'}",
    ]


def metrics_of(job: Job) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return metrics_in(job.folder)


def metrics_in(run_folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl in a run folder."""
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
