"""A job in three stages with a batch ramp, and the sequences that its steps should have."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.runs import UNTIED
from titanlite.data.batch import sequence_hash
from titanlite.data.dataset import SequenceDataset
from titanlite.job import Job
from titanlite.start import open_stages

SHORT = 'until = "30 sequences", name = "short", seq_len = 16, weights = { "a.jsonl" = 1 }'
MAIN = 'until = "60 sequences", name = "main"'  # the weights of data.sources, 3 and 1
DECAY = (
    'until = "end", name = "decay", weights = [0, 1], global_batch_size = 8, lr_factor = 0.5, '
    'lr_scheduler = { name = "piecewise", points = [[1, 1.0], [5, 0.2]] }'
)
RAMP = [
    '--training.batch_ramp=[{ until = "10 sequences", global_batch_size = 4 }, '
    '{ until = "640 tokens", global_batch_size = 8 }]',
    "--training.batch_ramp_lr=sqrt",
]
BATCH = ["--training.local_batch_size=1", "--training.global_batch_size=16"]
STEPS = 11


def staged(*stages: str) -> str:
    """An override: these stages."""
    return f"--stages=[{', '.join(f'{{ {stage} }}' for stage in stages)}]"


STAGED = [*BATCH, *RAMP, UNTIED, staged(SHORT, MAIN, DECAY)]


def opened(job: Job) -> SequenceDataset:
    """The sequences of a job, with the weights of its stages."""
    sequences = job.data.build(job.tokenizer.build(), seq_len=job.training.seq_len, seed=job.training.seed)
    open_stages(job, 1, sequences)
    return sequences


def sha_of(sequences: SequenceDataset, *numbers: int) -> str:
    """The data/batch_sha of a step that takes these sequences."""
    hashes = [sequence_hash(n, sequences.training(np.array([n]))[0].tokens) for n in numbers]
    return f"{sum(hashes) % 2**64:016x}"


def assert_no_repeats(sequences: SequenceDataset, end: int) -> None:
    """The sequences of every epoch of every source before `end` are different ones."""
    by_source: dict[Any, list[int]] = {}
    for number in range(end):
        packed, local = sequences.origin(number)
        by_source.setdefault(packed.fingerprint, []).append(local)
    sizes = dict(zip((packed.fingerprint for packed in sequences.packed), sequences.sizes))
    for fingerprint, numbers in by_source.items():
        for begin in range(0, len(numbers), sizes[fingerprint]):
            epoch = numbers[begin : begin + sizes[fingerprint]]
            assert len(set(epoch)) == len(epoch)
