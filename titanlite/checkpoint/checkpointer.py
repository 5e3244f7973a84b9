"""When to save, what to resume from, what to keep. The protocol is in commit.py, the contents in state.py.

Rank 0 chooses and all ranks follow; torch DCP writes each rank's shards. Async saves copy to host memory,
then write in a thread over a process group of their own; sync saves run the same code in line, so both write
the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from titanlite.checkpoint import commit
from titanlite.checkpoint.commit import CheckpointError
from titanlite.checkpoint.staging import HostBuffers
from titanlite.checkpoint.state import (
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
        folder = Path(self.folder)
        if folder.is_absolute() or ".." in folder.parts or folder == Path():
            raise ConfigError(f"{self.folder!r} is not a folder below job.dump_folder", "folder")
        if self.interval < 1:
            raise ConfigError(f"{self.interval} is below 1; use enable = false to save nothing", "interval")
        if self.keep_latest_k < 0 or self.keep_latest_k == 1:
            raise ConfigError(
                "keep 2 or more, or 0 for all: with 1, one bad checkpoint would be the run", "keep_latest_k"
            )


TIMEOUT = timedelta(hours=1)  # of collectives among checkpoint writers: a slow disk is not a hang
T = TypeVar("T")


class Checkpointer:
    """Checkpoints of one run. Opening it chooses what to resume from and refuses another recipe's folder
    (ConfigError).

    `recipe`: nested plain values that a resumed run must share. `job_toml`: stored in every checkpoint.
    """

    def __init__(self, config: Checkpoint, dump_folder: Path, recipe: dict[str, Any], job_toml: str):
        self.config, self.folder = config, dump_folder / config.folder
        self.recipe, self.job_toml = recipe, job_toml
        self._recipe_file = dump_folder / "recipe.json"
        self._distributed = dist.is_initialized()
        self._rank = dist.get_rank() if self._distributed else 0
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT) if self._distributed else None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._host = HostBuffers()
        self.resumed: dict[str, Any] | None = self._agree(self._open)

    def load(self, net: nn.Module, optimizer: torch.optim.Optimizer, state: TrainState) -> None:
        """Restore all three in place from the chosen checkpoint; a run without one starts fresh."""
        if self.resumed is None:
            return
        make_optimizer_state(optimizer)
        tensors = {"model": model_tensors(net), "optimizer": optimizer_tensors(net, optimizer)}
        path = self._path(self.resumed["step"])
        load_tensors(path, tensors, self._group)
        state.restore(self.resumed)
        logger.info(f"resumed from {path}")

    def due(self, step: int, last_step: int) -> bool:
        """Whether the step that was just taken is to be saved."""
        return self.config.enable and (step % self.config.interval == 0 or step == last_step)

    def save(
        self, net: nn.Module, optimizer: torch.optim.Optimizer, state: TrainState, extra: dict[str, Any]
    ) -> None:
        """Save now. Waits for a save still in flight and raises what went wrong with it."""
        self.wait()
        tensors = {"model": model_tensors(net), "optimizer": optimizer_tensors(net, optimizer)}
        small = json.dumps({**state.as_json(), **extra, "recipe": self.recipe}, indent=1) + "\n"
        if self.config.async_mode == "disabled":
            self._write(state.step, tensors, small)
        else:
            staged = self._host.copy(tensors)
            self._pending = self._writer.submit(self._write, state.step, staged, small)

    def check(self) -> None:
        """Raise what went wrong with a save in flight, if it has ended. Each step: an error must not wait for
        the next save."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Until the save in flight is committed; raises CheckpointError if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def abandon(self) -> None:
        """After an error elsewhere: let a save in flight become whole if it still can."""
        try:
            if self._pending is not None:
                self._pending.result(timeout=60)
        except Exception as e:
            logger.error(f"the checkpoint that was being written is lost: {type(e).__name__}: {e}")

    def close(self) -> None:
        """Wait for the last commit."""
        self.wait()
        self._writer.shutdown()

    def _write(self, step: int, tensors: dict[str, dict[str, torch.Tensor]], small: str) -> None:
        partial = commit.partial_path(self.folder, step)
        try:
            writer = FileSystemWriter(partial, overwrite=False)
            save(tensors, storage_writer=writer, process_group=self._group, no_dist=not self._distributed)
        except CheckpointException as e:  # a BaseException
            raise CheckpointError(f"step {step} could not be saved: {_cause(e)}") from e
        # DCP's save ends with rank 0 holding every rank's result: all have written.
        self._agree(lambda: self._commit(partial, step, small))

    def _commit(self, partial: Path, step: int, small: str) -> None:
        (partial / "train.json").write_text(small, encoding="utf-8")
        (partial / "job.toml").write_text(self.job_toml, encoding="utf-8")
        path = commit.commit(partial, step)
        commit.retain(self.folder, self.config.keep_latest_k)
        logger.info(f"saved {path}")

    def _open(self) -> dict[str, Any] | None:
        """On rank 0: the train.json of the newest checkpoint without fault, None for a new run.

        Nothing in the folder is touched before it is known to be this run's. ConfigError if it is another
        recipe's, CheckpointError if it holds the remains of a run that cannot be resumed.
        """
        newest, faults = None, []
        for step, path in reversed(commit.committed(self.folder)):
            reason = commit.fault(path, step)
            if reason is None:
                newest = json.loads((path / "train.json").read_text(encoding="utf-8"))
                self._check_recipe(newest["recipe"], self.folder)
                break
            faults.append((path, reason))
        if self._recipe_file.exists():
            self._check_recipe(json.loads(self._recipe_file.read_text(encoding="utf-8")), self.folder.parent)
        if not self.config.enable:
            if newest or faults:
                raise ConfigError(
                    f"{self.folder} holds a run; choose another --job.dump_folder to go without",
                    "checkpoint.enable",
                )
            return None
        remains = [f"{path}: {reason}" for path, reason in faults]
        remains += [f"{path} was set aside" for path in commit.set_aside_before(self.folder)]
        if newest is None and remains:  # a fresh start over the remains of a run would lose it in silence
            why = "; ".join(remains)
            raise CheckpointError(
                f"no usable checkpoint in {self.folder}: {why}; delete them to start afresh"
            )
        commit.clean(self.folder)
        for path, reason in faults:
            logger.warning(f"checkpoint set aside as {commit.set_aside(path)}: {reason}")
        return newest

    def _check_recipe(self, theirs: dict[str, Any], where: Path) -> None:
        before, now = flatten(theirs), flatten(self.recipe)
        allowed = tuple(self.config.allow_changed)
        changed = [
            f"{key} was {before.get(key, 'absent')!r}, is {now.get(key, 'absent')!r}"
            # What is one value first: a changed tokenizer changes each source's fingerprint, too.
            for key in sorted(before.keys() | now.keys(), key=lambda key: (key.count("."), key))
            if before.get(key) != now.get(key)
            and not any(key == a or key.startswith(a + ".") for a in allowed)
        ]
        if changed:
            more = f" (and {len(changed) - 3} more)" if len(changed) > 3 else ""
            raise ConfigError(
                f"{where} holds a run of another recipe: {'; '.join(changed[:3])}{more}. Choose another "
                "--job.dump_folder, delete that one, set it back, or name it in --checkpoint.allow_changed",
                "job.dump_folder",
            )

    def _agree(self, act: Callable[[], T]) -> T:
        """What `act()` gave on rank 0, its error included, on every rank."""
        box: list[Any] = [None]
        if self._rank == 0:
            try:
                box = [act()]
            except (CheckpointError, ConfigError) as e:
                box = [e]
            except (OSError, ValueError, KeyError) as e:
                box = [CheckpointError(f"{self.folder}: {type(e).__name__}: {e}")]
        if self._distributed:
            dist.broadcast_object_list(box, group=self._group, group_src=0)
        if isinstance(box[0], Exception):
            raise box[0]
        return box[0]

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
