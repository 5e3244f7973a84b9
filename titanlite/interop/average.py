"""The weighted average of the weights in several checkpoints of a run, written as a checkpoint without
optimizer state.

An average of checkpoints of one learning rate imitates a decay of the learning rate (WSM, Tian et al. 2025,
arXiv 2507.17634). With the coefficients c_0 to c_(N-1), from the oldest checkpoint to the newest, an update
between the checkpoints j - 1 and j is contained in the average c_j + ... + c_(N-1) times. To imitate a decay
that gives these updates the factor f(j / N), where f falls from f(0) = 1 to f(1) = 0, each coefficient is the
drop of the factor at its checkpoint: c_j = f(j / N) - f((j + 1) / N).

Tensors are read, averaged in fp64 and written one chunk at a time. A model of any size needs about five times
the memory of its largest chunk."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from titanlite.checkpoint import commit
from titanlite.checkpoint.commit import CheckpointError
from titanlite.checkpoint.run_identity import differences, spell
from titanlite.checkpoint.saver import about_save
from titanlite.checkpoint.state import AVERAGED_FROM, TRAIN, BaseModel, listed, read_train
from titanlite.checkpoint.writer import ShardWriter
from titanlite.config.component import ConfigError
from titanlite.files import new_folder, read_regular
from titanlite.interop.dcp import MODEL
from titanlite.interop.weights import Chunk, LazyTensor, Region, Weights

JOB = "job.toml"
COEFFICIENTS: dict[str, Callable[[int, int], float]] = {
    "uniform": lambda j, n: 1 / n,  # imitates f(x) = 1 - x
    "linear": lambda j, n: (j + 1) / (n * (n + 1) / 2),
    "sqrt": lambda j, n: math.sqrt((j + 1) / n) - math.sqrt(j / n),  # imitates f(x) = 1 - sqrt(x)
}


def coefficients(kind: str, num: int) -> list[float]:
    """The coefficients of `num` checkpoints, from the oldest to the newest; their sum is 1. `kind`: a key of
    COEFFICIENTS."""
    return [COEFFICIENTS[kind](j, num) for j in range(num)]


def check_one_model(checkpoints: Sequence[Weights]) -> None:
    """Raise ConfigError unless all checkpoints are of one model with one tokenizer or, if they are of
    adapters, of the same adapters of one base model."""
    newest = checkpoints[-1]
    model, base = _model_of(newest)
    shapes = {name: stored.shape for name, stored in newest.tensors.items()}
    for other in checkpoints[:-1]:
        other_model, other_base = _model_of(other)
        changes = [
            f"its {key} is {spell(theirs)}, not {spell(ours)}"
            for key, theirs, ours in differences(other_model, model)
        ]
        if other_base != base:
            changes.append("its base model is another one")
        if other.tokenizer != newest.tokenizer:
            changes.append("its tokenizer is another one")
        if {name: stored.shape for name, stored in other.tensors.items()} != shapes:
            changes.append("its tensors have other names or shapes")
        if changes:
            raise ConfigError(
                f"{other.path} is not of the same model as {newest.path}: {listed(changes, separator='; ')}"
            )


def _model_of(checkpoint: Weights) -> tuple[dict[str, Any], str]:
    """The model and its adapters in the run identity of a checkpoint, and the fingerprint of the base model,
    which is empty without adapters."""
    train = read_train(checkpoint.path)
    base = BaseModel.recorded_in(train)
    model = {key: train["identity"][key] for key in ("model", "lora") if key in train["identity"]}
    return model, base.sha256 if base else ""


def write_average(
    checkpoints: Sequence[Weights],
    weights: Sequence[float],
    parameters: Collection[str],
    target: Path,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> int:
    """Write the average of `checkpoints`, from the oldest to the newest, as the new checkpoint `target`.
    Returns the size of its tensors in bytes. An error leaves nothing on the disk.

    `weights`: the coefficient of each checkpoint. `parameters`: names of the tensors to average; all other
    tensors, which are buffers, and integer tensors are copied from the newest checkpoint. `advance`: called
    with the size of each block read. Raises CheckpointError if a checkpoint is damaged or `target` cannot be
    written."""
    newest = checkpoints[-1]
    sums = {}
    for name, stored in newest.tensors.items():
        is_averaged = name in parameters and stored.dtype.is_floating_point
        terms = (
            [(c.tensors[name], w) for c, w in zip(checkpoints, weights)] if is_averaged else [(stored, 1.0)]
        )
        sums[f"{MODEL}{name}"] = _WeightedSum(terms, advance)
    try:
        with new_folder(target) as folder:
            commit.check_space(folder.parent, newest.num_bytes, "the average")
            writer = ShardWriter(folder, num_threads=1)  # each thread would hold a chunk
            _save(sums, writer)
            train = read_train(newest.path)
            texts = {
                TRAIN: json.dumps(train | _note(checkpoints, weights), indent=1) + "\n",
                JOB: read_regular(newest.path / JOB).decode(),
            }
            commit.complete(folder, train["step"], texts, writer.files, about_save(num_ranks=1))
    except OSError as e:
        raise CheckpointError(f"{target} could not be written: {type(e).__name__}: {e}") from e
    return newest.num_bytes


def _note(checkpoints: Sequence[Weights], weights: Sequence[float]) -> dict[str, Any]:
    """The entries of train.json for an average, which is never healthy, so that no run goes back to it."""
    folder = checkpoints[-1].path.absolute().parent
    about = {
        "folder": f"{folder.parent.name}/{folder.name}",
        "steps": [read_train(checkpoint.path)["step"] for checkpoint in checkpoints],
        "weights": list(weights),
    }
    return {"healthy": False, AVERAGED_FROM: about}


def _save(sums: Mapping[str, _WeightedSum], writer: ShardWriter) -> None:
    """Write all tensors. Raises the first error as it is: DCP wraps even KeyboardInterrupt."""
    try:
        dcp_save({}, storage_writer=writer, planner=_Planner(sums), no_dist=True)
    except CheckpointException as e:
        error, _ = next(iter(e.failures.values()))
        raise error from None


class _WeightedSum(NamedTuple):
    """The sum of stored tensors of one shape, each times a number; a single tensor is copied."""

    terms: Sequence[tuple[LazyTensor, float]]
    advance: Callable[[int], None]

    @property
    def newest(self) -> LazyTensor:
        return self.terms[-1][0]

    def chunks(self) -> Sequence[Chunk]:
        """The largest of the stored chunks, so that a change of the layout between two checkpoints makes no
        chunk be read more often."""
        return min((stored for stored, _ in self.terms), key=lambda stored: len(stored.chunks)).chunks

    def read(self, region: Region) -> torch.Tensor:
        """A region of the sum, in the dtype of the newest tensor. Raises CheckpointError for values that are
        not finite."""
        if len(self.terms) == 1:
            return self._read(self.newest, region)
        total = torch.zeros([s.stop - s.start for s in region], dtype=torch.float64)
        for stored, weight in self.terms:
            total.add_(self._read(stored, region), alpha=weight)
        values = total.to(self.newest.dtype)
        if not values.isfinite().all():
            raise CheckpointError(f"{self.newest.file}: an average is not finite; nothing is written")
        return values

    def _read(self, stored: LazyTensor, region: Region) -> torch.Tensor:
        values = stored.read(region)
        self.advance(values.nbytes)
        return values


class _Planner(DefaultSavePlanner):
    """Plans to write each chunk of each sum, and computes a chunk when it is written."""

    def __init__(self, sums: Mapping[str, _WeightedSum]):
        super().__init__()
        self._sums = sums

    def create_local_plan(self) -> SavePlan:
        items = [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.shape)),
                    properties=TensorProperties(dtype=total.newest.dtype),
                    size=torch.Size(total.newest.shape),
                ),
            )
            for name, total in self._sums.items()
            for chunk in total.chunks()
        ]
        paths = {name: tuple(name.split(".", 1)) for name in self._sums}
        self.plan = SavePlan(items, planner_data=paths)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        region = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes))
        return self._sums[write_item.index.fqn].read(region)
