"""When to save, what to resume from, what to keep. The protocol is in commit.py, the contents in state.py.

Rank 0 chooses and all ranks follow; torch DCP writes each rank's shards. Async saves copy to host memory,
then write in a thread over a process group of their own; sync saves run the same code in line, so both write
the same bytes.
"""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from titanlite.checkpoint import commit
from titanlite.checkpoint.staging import HostBuffers
from titanlite.checkpoint.state import (
    CheckpointError,
    TrainState,
    check_same_tensors,
    make_optimizer_state,
    model_tensors,
    optimizer_tensors,
)
from titanlite.config.component import ConfigError
from titanlite.log import logger


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Saving and resuming. A run resumes by itself from the newest good checkpoint in its folder."""

    enable: bool = True
    """Save checkpoints and resume from them."""
    folder: str = "checkpoint"
    """Where, under job.dump_folder."""
    interval: int = 500
    """Steps between saves; the last step is always saved."""
    async_mode: Literal["disabled", "async"] = "async"
    """`async`: training goes on while the checkpoint is written; only the copy to host memory blocks."""
    keep_latest_k: int = 10
    """Committed checkpoints to keep; 0: all."""
    allow_changed: list[str] = field(default_factory=list)
    """Parts of the recipe that may differ on resume, for example `["data.seed"]`; anything else that differs
    is refused."""

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise ConfigError(f"{self.interval} is below 1; use enable = false to save nothing", "interval")
        if self.keep_latest_k < 0 or self.keep_latest_k == 1:
            raise ConfigError(
                "keep 2 or more, or 0 for all: with 1, one bad checkpoint would be the run", "keep_latest_k"
            )


class Checkpointer:
    """Checkpoints of one run. Opening it chooses what to resume from and refuses another recipe's folder
    (ConfigError).

    `recipe`: nested plain values that a resumed run must share. `job_toml`: stored in every checkpoint.
    """

    def __init__(self, config: Checkpoint, dump_folder: Path, recipe: dict[str, Any], job_toml: str):
        self.config, self.folder = config, dump_folder / config.folder
        self.recipe, self.job_toml = recipe, job_toml
        self._distributed = dist.is_initialized()
        self._rank = dist.get_rank() if self._distributed else 0
        self._group = dist.new_group(backend="gloo") if self._distributed else None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._host = HostBuffers()
        self._resume_step = self._agree(self._choose) if config.enable else None
        self.resumed = self._read_train_json() if self._resume_step is not None else None

    def load(self, net: nn.Module, optimizer: torch.optim.Optimizer, state: TrainState) -> None:
        """Restore all three in place from the chosen checkpoint; a run without one starts fresh."""
        if self._resume_step is None or self.resumed is None:
            return
        make_optimizer_state(optimizer)
        tensors = {"model": model_tensors(net), "optimizer": optimizer_tensors(net, optimizer)}
        load_tensors(self._path(self._resume_step), tensors, self._group)
        state.restore(self.resumed)
        logger.info(f"resumed from {self._path(self._resume_step)}")

    def due(self, step: int, last_step: int) -> bool:
        """Whether the step that was just taken is to be saved."""
        return self.config.enable and (step % self.config.interval == 0 or step == last_step)

    def save(
        self, net: nn.Module, optimizer: torch.optim.Optimizer, state: TrainState, extra: dict[str, Any]
    ) -> None:
        """Save now. Waits for a save still in flight and raises what went wrong with it."""
        self.wait()
        if self._path(state.step).exists():  # the step this run resumed from: it is there already, and whole
            return
        tensors = {"model": model_tensors(net), "optimizer": optimizer_tensors(net, optimizer)}
        small = json.dumps({**state.as_json(), **extra, "recipe": self.recipe}, indent=1) + "\n"
        if self.config.async_mode == "disabled":
            self._write(state.step, tensors, small)
        else:
            staged = self._host.copy(tensors)
            self._pending = self._writer.submit(self._write, state.step, staged, small)

    def wait(self) -> None:
        """Until the save in flight is committed; raises CheckpointError if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait for the last commit, and for all ranks to have seen it."""
        self.wait()
        self._writer.shutdown()
        if self._distributed:
            dist.barrier(self._group)

    def _write(self, step: int, tensors: dict[str, dict[str, torch.Tensor]], small: str) -> None:
        partial = commit.partial_path(self.folder, step)
        try:
            writer = FileSystemWriter(partial, overwrite=False)
            save(tensors, storage_writer=writer, process_group=self._group, no_dist=not self._distributed)
        except CheckpointException as e:  # a BaseException
            raise CheckpointError(f"step {step} could not be saved: {_cause(e)}") from e
        if self._rank == 0:  # DCP's save ends with rank 0 holding every rank's result: all have written
            (partial / "train.json").write_text(small)
            (partial / "job.toml").write_text(self.job_toml)
            path = commit.commit(partial, step)
            commit.retain(self.folder, self.config.keep_latest_k)
            logger.info(f"saved {path}")

    def _choose(self) -> int | None:
        """On rank 0: the newest checkpoint without fault; bad ones are set aside. CheckpointError if all are
        bad."""
        self.folder.mkdir(parents=True, exist_ok=True)
        commit.clean(self.folder)
        reasons = []
        for step, path in reversed(commit.committed(self.folder)):
            reason = commit.fault(path, step)
            if reason is None:
                return step
            reasons.append(f"{path}: {reason}")
            logger.warning(f"checkpoint set aside as {commit.set_aside(path)}: {reason}")
        reasons += [f"{path} was set aside" for path in commit.set_aside_before(self.folder)]
        if reasons:  # a fresh start over the remains of a run would lose it in silence
            raise CheckpointError(
                f"no usable checkpoint in {self.folder}: {'; '.join(reasons)}; delete them to start afresh"
            )
        return None

    def _agree(self, choose: Any) -> int | None:
        """`choose()` of rank 0, its error included, on every rank."""
        box: list[Any] = [None]
        if self._rank == 0:
            try:
                box = [choose()]
            except (CheckpointError, OSError) as e:
                box = [CheckpointError(str(e))]
        if self._distributed:
            dist.broadcast_object_list(box, group=self._group, group_src=0)
        if isinstance(box[0], Exception):
            raise box[0]
        return box[0]

    def _read_train_json(self) -> dict[str, Any]:
        assert self._resume_step is not None
        file = self._path(self._resume_step) / "train.json"
        try:
            values = json.loads(file.read_text())
        except (OSError, ValueError) as e:
            raise CheckpointError(f"{file}: {e}") from None
        theirs, ours = flatten(values["recipe"]), flatten(self.recipe)
        allowed = tuple(self.config.allow_changed)
        changed = [
            f"{key} was {theirs.get(key)!r}, is {ours.get(key)!r}"
            for key in sorted(theirs.keys() | ours.keys())
            if theirs.get(key) != ours.get(key)
            and not any(key == a or key.startswith(a + ".") for a in allowed)
        ]
        if changed:
            more = f" (and {len(changed) - 3} more)" if len(changed) > 3 else ""
            raise ConfigError(
                f"{self.folder} holds checkpoints of another recipe: {'; '.join(changed[:3])}{more}. "
                "Choose another --job.dump_folder, set it back, or name it in --checkpoint.allow_changed"
            )
        return values

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step}"


def load_tensors(
    path: Path, tensors: dict[str, dict[str, torch.Tensor]], group: dist.ProcessGroup | None = None
) -> None:
    """Load `{"model": {name: tensor}, ...}` in place, strictly. Collective when process groups exist. Raises
    CheckpointError if anything is missing, unexpected or of another shape or dtype."""
    try:
        reader = FileSystemReader(path)
        check_same_tensors(tensors, reader.read_metadata(), str(path))
        load(tensors, storage_reader=reader, process_group=group, no_dist=not dist.is_initialized())
    except CheckpointException as e:  # a BaseException
        raise CheckpointError(f"{path} cannot be loaded: {_cause(e)}") from e
    except OSError as e:
        raise CheckpointError(f"{path} cannot be read: {e}") from None


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _cause(error: CheckpointException) -> str:
    rank, (first, _) = next(iter(error.failures.items()))
    return f"rank {rank}: {type(first).__name__}: {first}"
