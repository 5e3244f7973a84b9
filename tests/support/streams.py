"""Loaders of streams for tests: raw bytes in short sequences, without a model."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from titanlite.data.batch import Batch
from titanlite.data.loader import LoaderLayout
from titanlite.data.step_sizes import StepSizes
from titanlite.data.stream_batches import TokenStream
from titanlite.data.stream_loader import StreamLoader
from titanlite.data.stream_source import Stream
from titanlite.tokenizers.bytes import Bytes

SEQ_LEN, STEP, MICRO_BATCH = 16, 8, 2


def write_webdataset(folder: Path, files: Sequence[Sequence[str]]) -> Path:
    """Write texts as shards of a WebDataset, one per item of `files`, with members named N.text."""
    folder.mkdir()
    for shard, texts in enumerate(files):
        with tarfile.open(folder / f"{shard:05}.tar", "w") as tar:
            for i, text in enumerate(texts):
                member = tarfile.TarInfo(f"{i:06}.text")
                member.size = len(text)
                tar.addfile(member, io.BytesIO(text.encode()))
    return folder


def stream_loader(
    source: Stream,
    ranks: int,
    workers: int,
    rank: int = 0,
    state: Any = None,
    *,
    masked: bool = False,
    sizes: StepSizes | None = None,
    pin_memory: bool = False,
) -> StreamLoader:
    """The loader of a rank. `state`: of this rank, by `state_of`."""
    tokens = TokenStream(source, Bytes().build(), SEQ_LEN, masked)
    layout = LoaderLayout(num_ranks=ranks, num_workers=workers, micro_batch_size=MICRO_BATCH)
    states = {"states": [state] * ranks} if state else {}
    return StreamLoader(tokens, layout, rank, sizes or StepSizes.constant(STEP), pin_memory, states)


def state_of(loader: StreamLoader) -> Any:
    """The state of this rank, as a checkpoint has it."""
    states = loader.stream_state(lambda own: [(rank, own[1]) for rank in range(4)])
    return json.loads(json.dumps(states))["states"][0]


def steps(loader: StreamLoader, count: int) -> list[Batch]:
    """The micro-batches of the next steps; the workers are ended."""
    batches = [batch for _ in range(count) for batch in loader.next_step(torch.device("cpu"))[1]]
    loader.close()
    return batches


def values(batches: list[Batch]) -> list[Any]:
    """Micro-batches as plain values, for comparison."""
    fields = ("inputs", "targets", "positions", "source_ids", "hash", "num_targets")
    rows = [[getattr(batch, name) for name in fields] for batch in batches]
    return [[v.tolist() if torch.is_tensor(v) else v for v in row] for row in rows]
