"""Golden runs: eight steps each of small fixed jobs, whose losses, data order and initial weights are pinned.

    python -m tests.support.golden             compare with tests/golden/losses.json
    python -m tests.support.golden --update    write that file

The runs are fp32, uncompiled and on one thread, and their text is generated here, so that it is the same on
every machine and Python version. CONTRIBUTING.md says when the file may be updated.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import platform
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.jobs import ROOT, make_job, metrics_of, write_corpus
from titanlite.checkpoint.lock import FolderLock
from titanlite.job import Job, load_job
from titanlite.runtime.runtime import runtime
from titanlite.train import build, train

FILE = ROOT / "tests" / "golden" / "losses.json"
TOKENIZER = ROOT / "assets" / "tokenizer" / "stdlib.tiktoken"
UPDATE = "python -m tests.support.golden --update"
STEPS = 8
TOLERANCE = 1e-5  # relative; other instruction sets and two threads give differences of 1e-6 at most
# Adam's first steps of weights that begin at zero have the sign of their gradients alone: rounding counts
# more, 1.4e-5 between two kinds of CPU.
TOLERANCES = {"gpt": 1e-4}
NUMBERS = ("train/loss", "train/grad_norm", "eval/loss")

DEBUG = "debug"
# Larger than the tests' smallest model: attention has to matter for the loss, or RoPE would not.
SHAPE = {"dim": 128, "n_heads": 4, "n_kv_heads": 2, "head_dim": 32, "hidden_dim": 256}
COMMON = [
    *(f"--model.overrides.{key}={value}" for key, value in SHAPE.items()),
    "--training.seq_len=128",
    "--validation.enable=true",
]
ACCUMULATED = "--training.local_batch_size=2"  # of a global batch of 8
EXPERTS = [
    f"--model.overrides.{key}={value}"
    for key, value in {"n_experts": 8, "n_experts_per_token": 2, "moe_hidden_dim": 64}.items()
]
LATENT = [
    f"--model.overrides.{key}={value}"
    for key, value in {"n_kv_heads": 4, "head_dim": 48, "rope_head_dim": 16, "v_head_dim": 32}.items()
]
DELTA = [
    f"--model.overrides.{key}={value}"
    for key, value in {
        "layer_pattern": "DLD", "delta_n_k_heads": 2, "delta_n_v_heads": 4, "delta_k_head_dim": 8,
        "delta_v_head_dim": 12,
    }.items()
]  # fmt: skip
TINY = {  # name: overrides of the job in tests/support/jobs.py
    "llama3": ["--training.local_batch_size=8"],
    "qwen3": ["--training.local_batch_size=8", "--model.name=qwen3"],
    "qwen2": ["--training.local_batch_size=8", "--model.name=qwen2"],
    "mistral": [
        *("--training.local_batch_size=8", "--model.name=mistral", "--model.overrides.sliding_window=24"),
        *("--model.overrides.rope_type=yarn", "--model.overrides.rope_factor=4.0"),
        "--model.overrides.rope_original_max_position=32",
    ],
    "gemma3": [
        *("--training.local_batch_size=8", "--model.name=gemma3", "--model.overrides.sliding_window=24"),
        *("--model.overrides.query_pre_attn_scalar=48", "--model.overrides.layer_pattern=SL"),
        *("--model.overrides.rope_type=linear", "--model.overrides.rope_factor=4.0"),
    ],
    "olmo3": [
        *("--training.local_batch_size=8", "--model.name=olmo3", "--model.overrides.sliding_window=24"),
        *("--model.overrides.layer_pattern=SL", "--model.overrides.rope_type=yarn"),
        *("--model.overrides.rope_factor=4.0", "--model.overrides.rope_original_max_position=32"),
    ],
    "gpt": [
        *("--training.local_batch_size=8", "--model.name=gpt", "--model.overrides.sliding_window=24"),
        *("--model.overrides.n_kv_heads=2", "--model.overrides.layer_pattern=SL"),
    ],
    "qwen3_5": [
        *("--training.local_batch_size=8", "--model.name=qwen3_5", "--model.overrides.n_layers=3", *DELTA)
    ],
    "qwen3_5_moe": [
        *("--training.local_batch_size=8", "--model.name=qwen3_5_moe", "--model.overrides.hidden_dim=0"),
        *("--model.overrides.shared_hidden_dim=40", *EXPERTS, *DELTA),
    ],
    "qwen3_moe": ["--training.local_batch_size=8", "--model.name=qwen3_moe", *EXPERTS],
    "olmoe": [
        *("--training.local_batch_size=8", "--model.name=olmoe", "--model.overrides.hidden_dim=0", *EXPERTS)
    ],
    "gpt_oss": [
        *(
            "--training.local_batch_size=8",
            "--model.name=gpt_oss",
            "--model.overrides.hidden_dim=0",
            *EXPERTS,
        ),
        *("--model.overrides.sliding_window=24", "--model.overrides.rope_original_max_position=32"),
    ],
    "deepseek_v3": [
        *("--training.local_batch_size=8", "--model.name=deepseek_v3", *EXPERTS, *LATENT),
        *("--model.overrides.rope_type=yarn", "--model.overrides.rope_factor=4.0"),
        *("--model.overrides.rope_original_max_position=32", "--model.overrides.rope_attention_factor=1.0"),
        "--model.overrides.rope_mscale_all_dim=1.0",
    ],
    "packed": [ACCUMULATED, "--data.packing=best_fit", "--data.mask_documents=true"],
}
RUNS = (DEBUG, *TINY)


def make(name: str, folder: Path, *overrides: str, run: str = "run") -> Job:
    """The job of a golden run with overrides. `folder`: place of its text, its tokens and its run folder."""
    if name not in TINY:
        return _debug(folder, [f"--job.dump_folder={folder / run}", *overrides])
    corpus = folder / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    return make_job(folder, write_corpus(corpus), *COMMON, *TINY[name], *overrides, name=run)


def _debug(folder: Path, overrides: list[str]) -> Job:
    """The job of train_configs/debug.toml: model, batch, optimizer, and the schedule of its 160 steps. Only
    the text is another, because that of the file is the standard library of the running Python."""
    folder.mkdir(parents=True, exist_ok=True)
    text = write_words(folder / "words.txt")
    config = ROOT / "train_configs" / "debug.toml"
    mine = [
        f'--data.sources=[{{name = "text", path = ["{text}"]}}]',
        f"--tokenizer.path={TOKENIZER}",  # the file names it relative to the current directory
        f"--data.cache_dir={folder / 'cache'}",
        f"--training.steps={STEPS}",
        f"--lr_scheduler.total_steps={load_job(config, world_size=1).training.steps}",
        "--metrics.log_freq=1",
        "--metrics.sinks=[]",
        "--generation.prompts=[]",
    ]
    return load_job(config, [*mine, *overrides], world_size=1)


def write_words(file: Path) -> Path:
    """Write lines of words from the shipped tokenizer's vocabulary, with frequencies as in real text: about
    50,000 tokens."""
    vocabulary = [base64.b64decode(line.split()[0]).strip() for line in TOKENIZER.read_bytes().splitlines()]
    words = [piece.decode() for piece in vocabulary if piece.isalpha() and piece.isascii()]
    frequencies = [1 / (10 + i) for i in range(len(words))]
    rng = random.Random(0)
    lines = [" ".join(rng.choices(words, frequencies, k=rng.randint(3, 15))) for _ in range(4000)]
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


def losses(job: Job, threads: int = 1) -> list[dict[str, Any]]:
    """Train the job. Returns the pinned values of each step."""
    with num_threads(threads):
        train(job)
    keys = ("step", *NUMBERS, "data/batch_sha")
    return [{key: line[key] for key in keys if key in line} for line in metrics_of(job)]


@contextmanager
def num_threads(threads: int) -> Iterator[None]:
    """Set the number of threads during the body; it decides the order of additions in sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def weights_sha(job: Job) -> str:
    """SHA-256 of the initial weights, their names and shapes. Trains nothing."""
    digest = hashlib.sha256()
    with (
        runtime(job.training, job.parallelism, job.comm, job.folder) as rt,
        FolderLock(job.folder) as lock,
        build(job, rt, lock) as run,
    ):
        for name, p in sorted(run.model.net.named_parameters()):
            digest.update(f"{name} {list(p.shape)} {p.dtype}\n".encode())
            digest.update(np.ascontiguousarray(p.detach().numpy()).tobytes())
    return digest.hexdigest()


def differences(
    measured: list[dict[str, Any]], golden: list[dict[str, Any]], tolerance: float = TOLERANCE
) -> list[str]:
    """Descriptions of the values that differ from the golden ones. Data hashes are compared exactly, losses
    and gradient norms to the relative tolerance."""
    if [line["step"] for line in measured] != [line["step"] for line in golden]:
        return [f"steps {[line['step'] for line in measured]} are not {[line['step'] for line in golden]}"]
    told = []
    for line, wanted in zip(measured, golden):
        step = f"step {wanted['step']}:"
        if line.keys() != wanted.keys():
            told.append(f"{step} {sorted(line)} are not {sorted(wanted)}")
        elif line["data/batch_sha"] != wanted["data/batch_sha"]:
            told.append(f"{step} data/batch_sha {line['data/batch_sha']} is not {wanted['data/batch_sha']}")
        told += [
            f"{step} {key} {line[key]:.9g} is not {wanted[key]:.9g}: {error:.1e} apart"
            for key in NUMBERS
            if key in line.keys() & wanted.keys()
            if not (error := abs(line[key] / wanted[key] - 1)) <= tolerance  # NaN is told, too
        ]
    return told


def stored() -> dict[str, Any]:
    """The golden values by run."""
    return json.loads(FILE.read_text(encoding="utf-8"))["runs"]


def measured(folder: Path, threads: int = 1) -> dict[str, Any]:
    """All golden values by run, computed by this version."""
    runs: dict[str, Any] = {}
    for name in RUNS:
        steps = losses(make(name, folder / name), threads)
        sha = weights_sha(make(name, folder / name, run="untrained"))
        runs[name] = {"initial_weights": sha, "steps": steps}
    return runs


def update() -> None:
    """Write the golden values."""
    with tempfile.TemporaryDirectory() as folder:
        runs = measured(Path(folder))
    made_with = {"torch": torch.__version__, "python": platform.python_version(), "by": UPDATE}
    FILE.write_text(json.dumps({"made_with": made_with, "runs": runs}, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {FILE.relative_to(ROOT)}")


def compare(threads: int) -> int:
    """Print how far this version, on this machine, is from the golden values. Returns the exit code."""
    code = 0
    with tempfile.TemporaryDirectory() as folder:
        runs = measured(Path(folder), threads)
    for name, golden in stored().items():
        told = differences(runs[name]["steps"], golden["steps"])
        if runs[name]["initial_weights"] != golden["initial_weights"]:
            told.append(f"initial weights {runs[name]['initial_weights']} are not the golden ones")
        pairs = zip(runs[name]["steps"], golden["steps"])
        errors = [abs(a[key] / b[key] - 1) for a, b in pairs for key in NUMBERS if key in a.keys() & b.keys()]
        print(f"{name}: largest relative difference {max(errors):.1e}; {'; '.join(told) or 'as pinned'}")
        code |= bool(told)
    return code


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.golden",
        description="Train the golden runs and print how far they are from the pinned values.",
        allow_abbrev=False,
    )
    parser.add_argument("--update", action="store_true", help=f"write {FILE.relative_to(ROOT)}")
    parser.add_argument("--threads", type=int, default=1, help="threads of a comparison")
    arguments = parser.parse_args()
    if not arguments.update:
        return compare(arguments.threads)
    if arguments.threads != 1:
        parser.error("--update: the golden values are those of one thread")
    update()
    return 0


if __name__ == "__main__":
    sys.exit(main())
