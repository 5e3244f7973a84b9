"""A one-layer run, and damage to its checkpoints."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from titanlite.checkpoint import commit
from titanlite.checkpoint.checkpointer import Checkpointer, KeptForFaults, RunRecord
from titanlite.checkpoint.lock import FolderLock
from titanlite.checkpoint.memory import NodeMemory, Place
from titanlite.checkpoint.section import Checkpoint
from titanlite.checkpoint.start import Start, check_run_identity, decide
from titanlite.checkpoint.state import TrainState
from titanlite.metrics.spikes import SpikeDetector
from titanlite.ranks import Ranks

GUARD = {
    "streak": 0,
    "streak_steps": [],
    "skipped_steps": 0,
    "outliers": {"streak": 0, "losses": [], "log_norms": []},
    "spikes": SpikeDetector().state_dict(),
    "unreported_spikes": [],
    "sequences": [[1, 0, 8]],
    "num_rewinds": 0,
}
IDENTITY = {"model": {"dim": 4}, "data": {"seed": 0, "sources": {"abc": 1000}}}


@dataclass
class SavedGuard:
    """Stands for the guard of a run, whose state is always GUARD."""

    healthy: bool = True

    def state_dict(self) -> dict[str, Any]:
        return GUARD

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == GUARD

    def is_healthy(self) -> bool:
        return self.healthy


def state_of(net: nn.Module, optimizer: torch.optim.Optimizer, **values: Any) -> TrainState:
    """The state of a run with a global batch of 8."""
    tokens = values.pop("tokens", torch.zeros((), dtype=torch.int64))
    return TrainState(net, optimizer, tokens, SavedGuard(), 8, **values)


class Toy:
    """A model of one layer, its optimizer, and the state of its run."""

    def __init__(self, width: int = 4, seed: int = 0):
        torch.manual_seed(seed)
        net = nn.Linear(width, width)
        self.state = state_of(net, torch.optim.AdamW(net.parameters(), lr=0.1))

    @property
    def net(self) -> Any:
        return self.state.net

    @net.setter
    def net(self, net: nn.Module) -> None:
        self.state.net = net

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.state.optimizer

    @optimizer.setter
    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self.state.optimizer = optimizer

    def step(self) -> None:
        self.net(torch.ones(2, self.net.in_features)).pow(2).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.state.step += 1
        self.state.num_sequences += 8
        self.state.tokens += 80

    def values(self) -> list[torch.Tensor]:
        moments = [t for state in self.optimizer.state.values() for t in state.values()]
        return [t.clone() for t in [*self.net.parameters(), *moments]]


def sharded_toy(ranks: int, width: int, seed: int = 0) -> Toy:
    """A toy, sharded over the ranks of this process's group if there are several."""
    toy = Toy(width, seed)
    if ranks > 1:
        fully_shard(toy.net, mesh=init_device_mesh("cpu", (ranks,)))
        toy.optimizer = torch.optim.AdamW(toy.net.parameters(), lr=0.1)
    return toy


def open_run(folder: Path, /, identity: dict = IDENTITY, **config: object) -> Checkpointer:
    return start_run(folder, Checkpoint(interval=1, **config), identity)


def start_run(
    folder: Path,
    config: Checkpoint,
    identity: dict = IDENTITY,
    distance: int | None = None,
    bits: dict | None = None,
    shared_memory: Path | None = None,
) -> Checkpointer:
    """The checkpoints of a run, which is started as a job is: locked, decided and compared. `shared_memory`:
    of this rank, which is alone on its node, for copies of the state."""
    ranks, lock = Ranks(folder / config.folder), FolderLock(folder)
    memory = None if shared_memory is None else NodeMemory(shared_memory, folder, ranks, Place(0, 1))

    def decided() -> Start:
        start = decide(config, folder, lock=lock)
        check_run_identity(start, identity, config.allow_changed, folder)
        return start

    try:
        start = ranks.from_rank_zero(decided)
        if memory is not None:
            start = memory.newer(start)
        record = RunRecord(identity, "[job]\n", bits)
        return Checkpointer(config, record, start, ranks, lock, KeptForFaults(distance), memory)
    except BaseException:
        lock.close()
        raise


def save_steps(folder: Path, steps: int, **config: object) -> tuple[Toy, Checkpointer]:
    run, toy = open_run(folder, **config), Toy()
    for _ in range(steps):
        toy.step()
        run.save(toy.state)
    run.check_save()
    return toy, run


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / "checkpoint").iterdir())


def go(folder: Path, to_step: int, **config: Any) -> int | None:
    """A start of the program: resume, and save every step up to `to_step`. Returns the step that it resumed
    from."""
    run, toy = open_run(folder, **config), Toy()
    try:
        run.load(toy.state)
        start = toy.state.step or None
        assert start == (run.candidate.step if run.candidate else None)
        while toy.state.step < to_step:
            toy.step()
            run.save(toy.state)
        run.close()
    finally:
        run.close_after_error()
    return start


def archived(folder: Path) -> list[list[int]]:
    """The steps in archived-0, archived-1, ..."""
    paths = (folder / "checkpoint").glob("archived-*")
    paths = sorted(paths, key=lambda path: int(path.name.removeprefix("archived-")))
    return [[step for step, _ in commit.list_committed(path)] for path in paths]


def shards(path: Path) -> dict[str, str]:
    """The SHA-256 of the shards of a checkpoint."""
    files = commit.digests(commit.read_manifest(path))
    return {name: digest.sha256 for name, digest in files.items() if name.endswith(".distcp")}


def flip(file: Path, place: float = 0.5) -> None:
    data = bytearray(file.read_bytes())
    data[int(place * len(data))] ^= 16
    file.write_bytes(data)


def flip_a_shard(step: Path) -> None:
    flip(next(step.glob("*.distcp")))


def shorten_a_shard(step: Path) -> None:
    file = next(step.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])


def kill_before_moving(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Raise KeyboardInterrupt before a folder of this name is renamed."""
    rename = os.rename

    def killed(a: Any, b: Any) -> None:
        if os.path.basename(a) == name:
            raise KeyboardInterrupt
        rename(a, b)

    monkeypatch.setattr(os, "rename", killed)
